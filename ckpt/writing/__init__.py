"""From memory into files: who writes what, how, and when it counts."""
