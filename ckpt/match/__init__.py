"""What of a checkpoint goes where in a target, and what of it does not fit."""
