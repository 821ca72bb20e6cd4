"""Places for tests to open stores in: folders on a disk, in memory and on servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt.testing import StorePlace
from tests.selection import thorough
from tests.stores import gcs_emulator
from tests.stores.server import Server

GCS = () if gcs_emulator.TESTBENCH is None else ("gcs",)
"""Google's storage, where Google's own testbench plays it."""
SERVERS = ("moto", "radosgw", "azurite", *GCS)
"""Those that behave like what they stand for."""
KINDS = (
    "path",
    "file",
    "memory",
    "moto",
    thorough("radosgw"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("azurite", *GCS)),
)
LOCAL = ("path", "file")
S3 = ("moto", "radosgw")
FOLDER = "run/step 1"
STRONG = (*LOCAL, *S3, "azurite", *GCS)
"""Where of several commits at once one succeeds, and unfinished files are hidden."""


@dataclass(frozen=True, slots=True)
class Place(StorePlace):
    """Somewhere to open a store, as often as a test likes; nothing is there yet."""

    kind: str = ""
    server: Server | None = None


def place_at(kind: str, folder: Path, servers: Callable[[str], Server]) -> Place:
    """A new place; `folder` is the test's own, and names it on servers."""
    if kind == "path":
        return Place(f"{folder}/{FOLDER}", kind=kind)
    if kind == "file":
        return Place(f"file://{folder}/{FOLDER}", kind=kind)
    if kind == "memory":
        return Place(f"memory://{folder.name}/{FOLDER}", kind=kind)
    server = servers(kind)
    return Place(
        server.url(f"{folder.parent.name}/{folder.name}/{FOLDER}"), server.options, kind, server
    )
