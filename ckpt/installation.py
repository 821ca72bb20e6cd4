"""The installed package: its version, and the folders of a user that shadow one of its parts.

An installation has one package, `ckpt`, with the others inside, so nothing shadows them. In the
repository `formats`, `sharding` and `tools` are common words: a folder of such a name beside a
user's train.py comes first on Python's path. `formats` or `sharding` would break every call, so it
is an error. `tools` serves only the `ckpt` command, so it is a warning.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from warnings import warn

__version__ = "0.2.0"
"""As it stands in manifests and in `ckpt --version`."""

HOME = Path(__file__).resolve().parent.parent
"""The folder of `ckpt`, and in the repository of all four packages."""


def check_neighbours() -> None:
    """Raises ImportError, or warns, if another folder shadows one of our packages.

    The process of the `ckpt` command runs no other code, so it puts our packages first instead.
    """
    if (HOME / "ckpt" / "formats").is_dir():
        return
    if _is_command():
        sys.path.insert(0, str(HOME))
    for name in ("formats", "sharding"):
        other = shadowing(name)
        if other is not None:
            raise ImportError(
                f"{other} shadows the package {name!r} that ckpt is built on: rename it, or start "
                "Python where it is not on sys.path"
            )
    other = shadowing("tools")
    if other is not None:
        warn(
            f"{other} shadows the package 'tools' of ckpt: the library works, and so does the ckpt "
            "command, but `import tools` gives yours",
            stacklevel=3,
        )


def shadowing(name: str) -> Path | None:
    """Returns the folder or file that `import name` would find instead of our package."""
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else PathFinder.find_spec(name)
    place = _place(spec)
    return None if place is None or place == HOME / name else place


def _place(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


def _is_command() -> bool:
    """Whether this is the process of the installed `ckpt` script or of `python -m ckpt`."""
    return sys.argv[:1] == ["-m"] or Path(sys.argv[0] if sys.argv else "").stem == "ckpt"
