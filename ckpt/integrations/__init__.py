"""Libraries that train, each with a file that turns its hooks into saves and loads of ckpt."""
