"""From files into memory: what is where, what to read of it, and the reading."""
