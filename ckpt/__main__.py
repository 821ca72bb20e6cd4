"""The `ckpt` command: the script of that name, and `python -m ckpt`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line in `tools` and return its exit code."""
    from tools.main import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
