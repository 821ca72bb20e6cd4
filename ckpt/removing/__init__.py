"""Removals: checkpoints, and files that no manifest names."""
