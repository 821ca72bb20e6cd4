"""The bytes of a file as a value: literal bytes, tensors, and bytes that checksums decide.

A format has one kind of checksum, whose records of a tensor stand end to end: the CRC-32 of the
tensor as 4 bytes, or, for a file with `chunk_bytes`, the record of each of its chunks
(`formats.native.shard`).

The writer of a format plans its files, with the length of each part known in advance. Whoever
writes the files (`ckpt.transfer.copy_files`) may therefore begin at any byte, with several threads
or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from formats.outgoing import OutgoingTensor


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that depend on the checksums of tensors that stand before them in the file."""

    nbytes: int
    make: Callable[[bytes], bytes]
    """Returns the bytes, by the records of all tensors of the file that stand before them."""


Part = bytes | OutgoingTensor | Late


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to write: its name, and its parts end to end."""

    name: str
    parts: Sequence[Part]
    chunk_bytes: int = 0
    """The size of the chunks whose checksums the file has; 0 if its checksums are CRC-32s."""

    @property
    def needs_sums(self) -> bool:
        """Whether bytes of the file depend on the checksums of its tensors."""
        return any(isinstance(part, Late) for part in self.parts)


def length_of(part: Part) -> int:
    """Returns the bytes of a part.

    >>> length_of(b"abc"), length_of(Late(16, lambda records: bytes(16)))
    (3, 16)
    """
    return len(part) if isinstance(part, bytes) else part.nbytes
