"""Changes the names and shapes of a checkpoint's tensors, without moving a byte."""
