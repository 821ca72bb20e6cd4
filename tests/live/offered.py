"""A checkpoint of a disk offered as a live state: its files go into the memory of a server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import UnreachableError
from ckpt.live.process import HostOptions, HostServer
from ckpt.live.protocol import FileAt, Segment
from ckpt.stores.addresses import LiveUrl

RUNTIME = "CKPT_RUNTIME_DIR"
"""The variable with the folder of the servers' sockets: another folder is another host."""
CUTS = (7, 4096)
"""The ends of a file's first segments: readers cross them."""


class Offer:
    """A server of one name in a process of its own."""

    def __init__(self, name: str, lease_seconds: float = 30.0) -> None:
        self.token = secrets.token_urlsafe(8)
        self.server = HostServer.start(HostOptions(name, self.token, lease_seconds=lease_seconds))
        self.server.own()
        self.memory: dict[int, dict[str, int]] = {}
        """By version and file: the descriptor of the bytes."""

    @property
    def url(self) -> str:
        """The address, with the token."""
        return str(LiveUrl(*self.server.address, self.server.name, None, self.token))

    def at(self, version: int) -> str:
        """The address of a version, with the token."""
        return str(LiveUrl(*self.server.address, self.server.name, version, self.token))

    def publish(self, version: int, folder: Path) -> None:
        """Makes the files of a folder a version."""
        files = {}
        self.memory[version] = {}
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            descriptor = os.memfd_create(path.name)
            os.write(descriptor, b"head" + data)
            self.memory[version][path.name] = descriptor
            ends = sorted({min(cut, len(data)) for cut in CUTS} | {len(data)})
            pairs = zip([0, *ends[:-1]], ends, strict=True)
            segments = [Segment(descriptor, 4 + lo, hi - lo) for lo, hi in pairs]
            self.server.put(version, path.name, segments)
            files[path.name] = FileAt(len(data), (self.server.address,))
        self.server.commit(version, files)

    def retire(self, version: int, wait_seconds: float = 0.0) -> bool:
        """Takes a version away as a publisher does; returns whether a reader still had it."""
        overdue = self.server.retire(version, wait_seconds)
        held = self.server.drop(version, overdue)
        for descriptor in self.memory.pop(version).values():
            if held:
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
        return held

    def close(self) -> None:
        """Ends the server, and frees the memory."""
        with suppress(UnreachableError):  # a test has ended it
            self.server.remove()
        self.server.close()
        for files in self.memory.values():
            for descriptor in files.values():
                os.close(descriptor)
        self.memory.clear()


@contextmanager
def offered(
    folder: Path, name: str = "policy", version: int = 1, lease_seconds: float = 30.0
) -> Iterator[Offer]:
    """Yields a server with the checkpoint of a folder as its version."""
    offer = Offer(name, lease_seconds)
    try:
        offer.publish(version, folder)
        yield offer
    finally:
        offer.close()
