"""Matches a target with a checkpoint: load items, and the differences between the two."""
