"""The only place that moves bytes: from files and peers into memory, and back into files."""
