"""The `ckpt` command: the script of that name, and `python -m ckpt`."""

from __future__ import annotations

import sys
from contextlib import suppress

INTERRUPTED = 130
"""128 + SIGINT: `tools.exit_codes` has it too, and may not be imported yet."""


def main() -> int:
    """Run the command line in `tools` and return its exit code."""
    try:
        from tools.main import main as run  # an interrupt may come during this import
    except KeyboardInterrupt:
        if sys.stderr is not None:
            with suppress(OSError):
                print("ckpt: interrupted", file=sys.stderr)
        return INTERRUPTED
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
