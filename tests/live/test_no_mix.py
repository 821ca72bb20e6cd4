"""Readers that stall, leave or take no lease, while the memory behind their bytes is used again."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from ckpt.errors import CkptError
from ckpt.live.process import HostServer
from ckpt.live.protocol import FileAt, Segment
from ckpt.live.shared_files import SharedFile
from ckpt.saving.arena import HEAD_BYTES, Arena
from tests.live.hosts import TOKEN, Client, Hosts

NBYTES = 6 << 20
"""Of a version: about as much as the system's buffers hold."""
VERSIONS = 30
"""The fewest; others follow until memory was held, was used again, and a version was read."""
VALUES = 251
"""The values of bytes, which later versions have again."""
SECONDS = 60


class Publisher:
    """Publishes versions whose bytes are all alike, in two arenas by turns."""

    def __init__(self, server: HostServer) -> None:
        self.server = server
        self.arenas = [Arena(is_sealed=True), Arena(is_sealed=True)]
        self.was_held = self.was_reused = 0

    def publish(self, version: int) -> None:
        turn = version % 2
        if version > 2:
            overdue = self.server.retire(version - 2, 0.02)
            if self.server.drop(version - 2, overdue):
                self.was_held += 1
                self.arenas[turn].discard()
                self.arenas[turn] = Arena(is_sealed=True)
            else:
                self.was_reused += 1
        self.arenas[turn].reserve(NBYTES)[:] = bytes([version % VALUES]) * NBYTES
        part = Segment(self.arenas[turn].descriptor, HEAD_BYTES, NBYTES)
        self.server.put(version, "f", [part])
        self.server.commit(version, {"f": FileAt(NBYTES, (self.server.address,))})

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


def read_by_http(server: HostServer, seed: random.Random) -> bytes:
    """The bytes of the newest version, read as a careless reader reads; too few if it was cut."""
    body = bytearray()
    with Client(server.address) as client:
        lease = client.lease("policy") if seed.random() < 0.7 else "none"
        version = client.get("/policy").json["newest"]
        with socket.create_connection(server.address, SECONDS) as connection:
            head = (
                f"GET /policy/{version}/f HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
            )
            head += f"Ckpt-Lease: {lease}\r\n" if lease != "none" else ""
            head += "Connection: close\r\n" if seed.random() < 0.5 else ""
            connection.sendall(f"{head}\r\n".encode())
            first = connection.recv(1000)
            body += first.partition(b"\r\n\r\n")[2] if first.startswith(b"HTTP/1.1 200") else b""
            time.sleep(seed.random() * 0.2)
            while body and len(body) < NBYTES and (part := connection.recv(1 << 20)):
                body += part
        if lease != "none" and seed.random() < 0.7:
            client.ask("DELETE", f"/policy/leases/{lease}")
    return bytes(body)


def read_from_memory(server: HostServer, seed: random.Random) -> bytes:
    """The same on the same host, by copies or in place."""
    body = bytearray()
    with HostServer.attach("policy") as reader:
        newest = max(reader.versions())
        file = SharedFile(reader.get(newest, "f", TOKEN), reader)
        for at in range(0, file.size, 1 << 20):
            time.sleep(seed.random() * 0.03)
            part = bytearray(min(1 << 20, file.size - at))
            if seed.random() < 0.5:
                if file.read_into(at, [memoryview(part)]) < len(part):
                    break
            else:
                view = file.view(at, len(part))
                assert view is not None
                part[:] = view
                if not file.is_intact(at):
                    break
            body += part
    return bytes(body)


@pytest.mark.thorough
def test_no_reader_ever_sees_bytes_of_two_versions(hosts: Hosts) -> None:
    server = hosts.start(lease_seconds=0.1)
    publisher, is_over = Publisher(server), threading.Event()
    publisher.publish(1)
    mixed: list[set[int]] = []
    whole: list[int] = []

    def read(reads: Callable[[HostServer, random.Random], bytes], number: int) -> None:
        seed = random.Random(number)
        while not is_over.is_set():
            with suppress(CkptError, OSError, AssertionError):  # it came too late
                body = reads(server, seed)
                if len(set(body)) > 1:
                    mixed.append(set(body))
                elif len(body) == NBYTES:
                    whole.append(body[0])

    kinds = [read_by_http] * 4 + [read_from_memory] * 2
    threads = [threading.Thread(target=read, args=(kind, at)) for at, kind in enumerate(kinds)]
    for thread in threads:
        thread.start()
    try:
        for version in range(2, VERSIONS):
            publisher.publish(version)
        while not (whole and publisher.was_held and publisher.was_reused):  # pytest has a time-out
            version += 1
            publisher.publish(version)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        publisher.close()
    assert mixed == []
