"""State dicts of modules and optimizers: full, sharded and local, made into one another."""
