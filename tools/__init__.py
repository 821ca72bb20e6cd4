"""The `ckpt` command: one file per subcommand; the logic is in `ckpt`."""
