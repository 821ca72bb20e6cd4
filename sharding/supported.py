"""The versions of Python and torch that the packages run on, checked when one is imported.

Rules:

1. An older Python reads this file and each package's `__init__` up to the check: they use only
   syntax of Python 3.8.
2. The check does not import torch, which takes a second: a file of torch has its version.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

PYTHON = (3, 10)
TORCH = (2, 6)


def check_versions() -> None:
    """Raises ImportError, with the found and the needed version, below the supported range."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}"
    for name, found, needed in (("Python", python, PYTHON), ("torch", torch_version(), TORCH)):
        if found is not None and is_below(found, needed):
            raise ImportError(
                f"ckpt needs {name} {needed[0]}.{needed[1]} or later and this is {name} {found}"
            )


def is_below(found: str, needed: tuple[int, int]) -> bool:
    """Whether a version such as `2.5.1+cpu` is below; False if it does not begin with numbers."""
    first, second = [*found.split("."), "", ""][:2]
    return first.isdigit() and second.isdigit() and (int(first), int(second)) < needed


def torch_version() -> str | None:
    """Returns the version of the torch that `import torch` gives; None if it is unknown."""
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(getattr(loaded, "__version__", "")) or None
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    lines = [line for line in text.splitlines() if line.startswith("__version__")]
    return lines[0].partition("=")[2].strip(" '\"") if lines else None
