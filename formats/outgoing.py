"""The input of a format's writer: names, shapes and a stream of bytes for each tensor.

Sizes are known before the first byte, so headers can go first. Bytes come in blocks, so no whole
tensor is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from formats.catalog import Tree
from formats.dtypes import DType
from formats.errors import FormatError


@dataclass(frozen=True, slots=True)
class OutgoingTensor:
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
