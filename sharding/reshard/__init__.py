"""Moves tensors from one layout, or kind of state dict, into another, from rank to rank."""
