"""The composition of an exchange between ranks, and the tag of its messages, which identifies it.

An exchange is an all-gather or a reduction of one parameter group, or of several small ones. Its
composition lists these groups, each with the purpose and the sequence number of its part. Gloo
delivers a message to the receive with the same tag, and ends the process if their lengths differ.

Rules:

1. A tag is a hash of the composition, the dtype and the lengths of all messages that one exchange
   sends from one rank to another. The receiver computes the tag from the tensors that it expects,
   so that no message takes the place of one that differs in any of these.
2. A composition is the same on all ranks that run the same program. It holds no address, no time
   and no value that depends on Python's randomized hashes.

[Note: 30 bits]
torch takes tags from 0 to 2**31 - 1. These messages use the upper half; user
programs number their messages from 0. Two different messages have the same tag with a probability
of 1 in 10**9. Equal tags do harm only if ranks disagree, and only to the few messages that are in
flight at the same time between the same two ranks. If ranks agree, messages with the same tag
arrive in the order in which they were sent.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

FIRST_TAG = 1 << 30
"""The lowest tag of these messages."""
SHOWN = 4
"""The number of parameter groups that the text of a composition names."""


class Purpose(IntEnum):
    """The purpose of a parameter group's part in an exchange."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    """The sum over the ranks that hold the same shard."""
    REGATHER = 3
    """A gather in backward, from the few ranks that kept a part after forward."""
    COMPARISON = 4
    """The comparison of the units that ranks have, before anything else travels."""


_WORDS = {
    Purpose.ALL_GATHER: "all-gather",
    Purpose.REDUCE_SCATTER: "reduce-scatter",
    Purpose.ALL_REDUCE: "all-reduce over replicas",
    Purpose.REGATHER: "all-gather over fewer ranks",
    Purpose.COMPARISON: "comparison",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter group's part of an exchange."""

    name: str
    """The unit's path in the root module."""
    key: int
    """Identifies the parameter group: see `key_of`."""
    purpose: Purpose
    sequence: int
    """The number of this exchange among those of the group for this purpose, from 1."""


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts of one exchange, in order."""

    items: tuple[Item, ...]
    stage: int = 0
    """1 for the second of an operation's two exchanges, else 0."""

    @property
    def digest(self) -> bytes:
        """A hash of 8 bytes: different compositions have different ones."""
        numbers = array("Q", [self.stage])
        for item in self.items:
            numbers.extend((item.key, item.purpose, item.sequence))
        return blake2b(numbers, digest_size=8).digest()

    def __str__(self) -> str:
        if not self.items:
            return "an exchange of nothing"
        first = self.items[0]
        named = ", ".join(_numbered(item) for item in self.items[:SHOWN])
        left = len(self.items) - SHOWN
        more = f" and {left} more" if left > 0 else ""
        return f"the {_WORDS[first.purpose]} of {named}{more}"


class GroupTags:
    """The key of a parameter group in tags, and its sequence numbers."""

    def __init__(self) -> None:
        self.key = 0
        """The key of `key_of`; 0 before it is known."""
        self._sequence = [0] * len(Purpose)

    def next_item(self, name: str, purpose: Purpose) -> Item:
        """Returns the group's part of its next exchange for a purpose."""
        self._sequence[purpose] += 1
        return Item(name, self.key, purpose, self._sequence[purpose])


def key_of(number: int, names: Iterable[str], shapes: Iterable[Sequence[int]]) -> int:
    """Returns 64 bits that identify a parameter group by number, parameters' names and shapes."""
    told = repr((number, tuple(names), [tuple(shape) for shape in shapes]))
    return int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), "little")


def tag_of(digest: bytes, tensors: Sequence[torch.Tensor]) -> int:
    """Returns the tag of messages with these flat tensors of one dtype, in this order (rule 1)."""
    numbers = array("Q", [_code(tensors[0].dtype)])
    numbers.extend(tensor.numel() for tensor in tensors)
    hashed = blake2b(digest, digest_size=4)
    hashed.update(numbers)
    return FIRST_TAG + int.from_bytes(hashed.digest(), "little") % FIRST_TAG


@cache
def _code(dtype: torch.dtype) -> int:
    """Returns a number for a dtype, the same in every process."""
    return int.from_bytes(blake2b(str(dtype).encode(), digest_size=8).digest(), "little")


def _numbered(item: Item) -> str:
    return f"{item.name} (number {item.sequence})"
