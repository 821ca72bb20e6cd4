"""Loads: into a target, lazily by name, and of the newest or the last sound checkpoint."""
