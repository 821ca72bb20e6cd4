"""Verification of a checkpoint, and the differences of two."""
