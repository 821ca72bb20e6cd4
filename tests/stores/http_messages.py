"""Heads and bodies of HTTP/1.1, as `fault_proxy` passes them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

LINE_BYTES = 1 << 16
PIECE_BYTES = 1 << 18


class ClientGone(Exception):
    """The connection of a client is over."""


@dataclass(slots=True)
class Message:
    """The head of a request or an answer."""

    start: str
    headers: list[tuple[str, str]]

    @classmethod
    def read(cls, stream: BinaryIO) -> Message:
        """The next head. Raises ClientGone where the stream has ended."""
        start = stream.readline(LINE_BYTES)
        if not start.endswith(b"\r\n"):
            raise ClientGone
        headers = []
        while line := stream.readline(LINE_BYTES).rstrip(b"\r\n"):
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name.strip(), value.strip()))
        return cls(start.decode("latin-1").rstrip("\r\n"), headers)

    def get(self, name: str) -> str:
        """A header; empty where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def without(self, *names: str) -> None:
        """Remove headers."""
        self.headers = [(key, value) for key, value in self.headers if key.lower() not in names]

    def put(self, name: str, value: str) -> None:
        """Set a header."""
        self.without(name.lower())
        self.headers.append((name, value))

    def encoded(self) -> bytes:
        """The head as it goes over the wire."""
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")

    @property
    def chunked(self) -> bool:
        """True where the body says piece by piece how long it is."""
        return self.get("transfer-encoding").lower() == "chunked"

    @property
    def length(self) -> int:
        """Bytes of the body, 0 where none are announced."""
        return int(self.get("content-length") or 0)


def pieces(stream: BinaryIO, head: Message, until_end: bool = False) -> Iterator[memoryview]:
    """The body that follows a head, as it lies on the wire; a view holds until the next.

    Raises ClientGone when the body ends early.
    """
    buffer = memoryview(bytearray(PIECE_BYTES))
    if head.chunked:
        size = -1
        while size != 0:
            line = stream.readline(LINE_BYTES)
            size = int(line.split(b";")[0] or b"0", 16)
            yield memoryview(line)
            yield from _exactly(stream, size, buffer)
            yield memoryview(stream.readline(LINE_BYTES))
    elif until_end and not head.get("content-length"):
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]
            yield buffer[:count]
    else:
        yield from _exactly(stream, head.length, buffer)


def _exactly(stream: BinaryIO, length: int, buffer: memoryview) -> Iterator[memoryview]:
    while length:
        count = stream.readinto(buffer[: min(length, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            raise ClientGone
        length -= count
        yield buffer[:count]
