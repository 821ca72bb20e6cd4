"""What a format's writer is handed: names, shapes and a stream of bytes for each tensor.

Sizes are known before any byte is read, so headers can go first; bytes come in blocks, so no whole
tensor is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from formats.catalog import Tree
from formats.dtypes import DType


@dataclass(frozen=True, slots=True)
class OutgoingTensor:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    blocks: Callable[[], Iterator[memoryview]]
    """Starts the stream: the packed row-major bytes in order, in blocks of any size.

    A block is valid until the next one is asked for. To be started once.
    """
    stable: bool = False
    """The blocks stay valid and unchanged until the file is finished: they are the tensor's own
    memory, so that many can go to the disk in one call."""

    announce: Callable[[], None] = lambda: None
    """Says that this stream will be started after those announced before; see `announce`."""

    @property
    def nbytes(self) -> int:
        """Bytes the stream will give."""
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


def announce(tensors: Iterable[OutgoingTensor]) -> None:
    """Say in which order streams will be started, so that they can be read ahead, many at once.

    Streams that are started in another order, or unannounced, give the same bytes.
    """
    for tensor in tensors:
        tensor.announce()
