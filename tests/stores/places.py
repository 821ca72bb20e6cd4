"""Places for tests to open stores in: folders on a disk, in memory and on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt.stores.store import Store, open_store
from tests.stores.server import Server

SERVERS = ("moto", "radosgw", "azurite")
"""Those that behave like what they stand for."""
KINDS = (
    "path",
    "file",
    "memory",
    "moto",
    "radosgw",
    pytest.param("azurite", marks=pytest.mark.slow),
)
LOCAL = ("path", "file")
S3 = ("moto", "radosgw")
FOLDER = "run/step 1"
STRONG = (*LOCAL, *S3, "azurite")
"""Where of several commits at once one succeeds, and unfinished files are hidden."""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere to open a store, as often as a test likes; nothing is there yet."""

    kind: str
    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    server: Server | None = None

    def open(self, folder: str = "") -> Store:
        """The folder itself, or one below it."""
        return open_store(f"{self.url}/{folder}" if folder else self.url, self.options)


def place_at(kind: str, folder: Path, servers: Callable[[str], Server]) -> Place:
    """A new place; `folder` is the test's own, and names it on servers."""
    if kind == "path":
        return Place(kind, f"{folder}/{FOLDER}")
    if kind == "file":
        return Place(kind, f"file://{folder}/{FOLDER}")
    if kind == "memory":
        return Place(kind, f"memory://{folder.name}/{FOLDER}")
    server = servers(kind)
    return Place(
        kind, server.url(f"{folder.parent.name}/{folder.name}/{FOLDER}"), server.options, server
    )
