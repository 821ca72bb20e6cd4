"""The names in the folder of a run: of the folders of its steps, and of the files that pin one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sharding.errors import ArgumentError

_FOLDER = re.compile(r"step-(\d{1,18})")
_PIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PIN = re.compile(r"pin-(\d{1,18})-([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.json")


def folder_name(step: int) -> str:
    """Returns the name of the folder of a step.

    >>> folder_name(100)
    'step-100'
    """
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Returns the step whose folder has this name; None for another folder."""
    found = _FOLDER.fullmatch(name)
    if found is None or folder_name(int(found[1])) != name:
        return None
    return int(found[1])


def pin_file(step: int, name: str) -> str:
    """Returns the name of the file, in the folder of the run, that pins a step under a name.

    Raises ArgumentError for a name that is no name of a file everywhere.

    >>> pin_file(500, "release-1")
    'pin-500-release-1.json'
    """
    if not isinstance(name, str) or _PIN_NAME.fullmatch(name) is None:
        raise ArgumentError(
            f"name={name!r:.80}: give up to 64 letters, digits and '._-', a letter or digit first"
        )
    return f"pin-{step}-{name}.json"


def is_pin(file: str) -> bool:
    """Whether the name of a file, in the folder of the run, is that of a pin."""
    return _PIN.fullmatch(file) is not None


def pins_in(files: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Returns the names of the pins of each step, from the files in the folder of the run.

    >>> pins_in(["pin-500-b.json", "pin-500-a.json", "owner-1.json", "pin-05-a.json"])
    {500: ('a', 'b')}
    """
    pins: dict[int, tuple[str, ...]] = {}
    for file in sorted(files):
        found = _PIN.fullmatch(file)
        step = None if found is None else step_of(f"step-{found[1]}")
        if found is not None and step is not None:
            pins[step] = (*pins.get(step, ()), found[2])
    return pins
