"""Conversions: any format to any format."""
