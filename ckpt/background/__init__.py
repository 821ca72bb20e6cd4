"""Background saves: they go on while the training continues."""
