"""A run: when to save, which checkpoints to keep, where to go on from. It moves no bytes itself."""
