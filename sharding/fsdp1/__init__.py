"""FSDP with flat parameters: the wrapper class, its setup, and its state dicts."""
