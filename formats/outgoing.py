"""What a format's writer takes and gives: tensors as streams of bytes, and the plan of a file.

The input has names, shapes and a stream of bytes for each tensor. Sizes are known before the first
byte, so headers can go first. Bytes come in blocks, so no whole tensor is in memory.

A plan has the bytes of a file as a value: literal bytes, tensors, and bytes that checksums decide.
A format has one kind of checksum, whose records of a tensor stand end to end: the CRC-32 of the
tensor as 4 bytes, or, for a file with `chunk_bytes`, the record of each of its chunks
(`formats.native.shard`).

The length of each part is known in advance. Whoever writes the files (`ckpt.transfer.copy_files`)
may therefore begin at any byte, with several threads or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from formats.catalog import Tree
from formats.dtypes import DType
from formats.errors import FormatError


class OutgoingTensor(NamedTuple):
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    blocks: Callable[[], Iterator[memoryview]]
    """Starts the stream: the packed row-major bytes in order, in blocks of any size.

    A block is valid until the next one. A stream is started once.
    """
    stable: bool = False
    """Whether the blocks stay valid until the file is complete: they are the tensor's own memory,
    so that one call can write many of them."""
    first: int = 0
    """The number of its first element, if it is a run of a larger tensor's row-major elements."""

    @property
    def nbytes(self) -> int:
        """The bytes of the stream."""
        return self.dtype.nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A whole checkpoint to write."""

    tensors: Mapping[str, OutgoingTensor]
    tree: Tree
    """The nested state; a `TensorRef` names an entry of `tensors`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: another name -> the name in `tensors`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The versions of modules' states, as in `Catalog`."""


def encoded_name(name: str) -> bytes:
    """Returns the name of a tensor in UTF-8. Raises FormatError for half a surrogate pair."""
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{name!r:.200} is not Unicode text; rename the tensor") from None


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
