"""Finds the checkpoints near a place without one, for the messages of errors.

Rules:

1. A search is bounded: it looks into the last `LOOKS` folders by name, and into `DEEPER_LOOKS`
   folders of each. It compares names only on a disk: the listing of a bucket may be long.
2. A search that fails finds nothing, so that the caller's error stays the message.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path

from ckpt.display import natural
from ckpt.stores.store import Store, join_url, local_path, split_url
from formats.detect import folder_format
from formats.native.manifest import MANIFEST

LOOKS, DEEPER_LOOKS = 8, 2
COMPARED = 2000
"""A name is compared with at most so many others: more would take a noticeable time."""


def nothing_at(url: str | os.PathLike[str]) -> str:
    """Returns the state of a place where no file and no folder was found."""
    path = local_path(url)
    is_there = path is not None and os.path.isdir(path)
    return "the folder is empty" if is_there else "nothing is there"


def advice_at(store: Store, entries: Sequence[str]) -> str:
    """Returns a similar path, or the checkpoints below a folder with these entries; empty without.

    It begins with a semicolon, for the end of a message.
    """
    if not entries:
        return similar_path(store.url)
    below = checkpoints_below(store, entries)
    return f"; {below.advice(store.url)}" if below is not None else ""


def similar_path(url: str | os.PathLike[str]) -> str:
    """Returns a question that names an existing path similar to a missing one; empty without one.

    It begins with a semicolon, for the end of a message.
    """
    path = local_path(url)
    if path is None or os.path.lexists(path):
        return ""
    missing, rest = Path(os.path.normpath(path)), Path()
    while not os.path.lexists(missing.parent):
        missing, rest = missing.parent, Path(missing.name, rest)
    with suppress(OSError), os.scandir(missing.parent) as entries:
        names = [entry.name for entry in islice(entries, COMPARED)]
        for near in get_close_matches(missing.name, names, 1):
            found = missing.parent / near
            return f"; did you mean {found / rest if (found / rest).exists() else found}?"
    return ""


@dataclass(frozen=True, slots=True)
class Below:
    """A folder of checkpoints, found in a search."""

    folder: str
    """The path or URL of the folder."""
    checkpoint: str
    """The path or URL of one of its checkpoints: the last by name among those of a search."""
    is_native: bool
    """Whether the checkpoint is of ckpt's own format."""

    def is_in(self, folder: str) -> bool:
        """Whether the checkpoint lies directly in this folder."""
        return self.folder.rstrip("/") == folder.rstrip("/")

    def advice(self, given: str) -> str:
        """Returns a remedy for a user who gave the folder `given` in the place of a checkpoint."""
        verb, told = ("latest", "prints the newest") if self.is_native else ("ls", "lists them")
        command = f"`ckpt {verb} {shlex.quote(self.folder)}` {told}"
        if self.is_in(given):
            return f"give one of these folders, such as {self.checkpoint} ({command})"
        return f"{self.folder} is a folder of checkpoints: {command}"


def checkpoints_below(
    store: Store, entries: Iterable[str], only_native: bool = False
) -> Below | None:
    """Returns the folder itself, with these entries, or one in it, if checkpoints lie in it."""
    with suppress(OSError):
        inside = {name: store.entries(name) for name in _last(entries, LOOKS)}
        deeper = (
            (f"{name}/{one}", store.entries(f"{name}/{one}"))
            for name, names in inside.items()
            for one in _last(names, DEEPER_LOOKS)
        )
        for name, names in chain(inside.items(), deeper):
            is_native = MANIFEST in names
            if is_native or (folder_format(names) is not None and not only_native):
                found = join_url(store.url, name)
                return Below(split_url(found)[0], found, is_native)
    return None


def _last(entries: Iterable[str], most: int) -> list[str]:
    """Returns the last folders among these entries by name, without the slashes at their ends."""
    folders = (name[:-1] for name in entries if name.endswith("/"))
    return sorted(folders, key=natural, reverse=True)[:most]
