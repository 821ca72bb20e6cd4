"""Live states: checkpoints in the memory of server processes, and folders served over HTTP."""
