"""One state that several ranks hold together: each describes its part, and they compare.

Usually all say the same, and one exchange of hashes shows it. Only where they do not, as when
pipeline stages hold other names, does each different description travel once, and all ranks merge
them alike.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from ckpt.ranks import HASH_BITS, Ranks
from ckpt.states.described import Described, merged, overruled
from ckpt.states.flatten import FlatState
from formats.catalog import TensorRef, Tree
from formats.dtypes import DType
from formats.native.manifest import Manifest, StoredTensor, dump, load


@dataclass(frozen=True, slots=True)
class Together:
    """A state on one rank, and what it is part of."""

    flat: FlatState
    """As this rank has it."""
    whole: Described
    """As all ranks have it together; the same on every rank, but for plain values."""
    same_values: bool
    """Whether the plain values are the same on all ranks too; True where the structures differ."""
    overruled: str | None
    """There, the name of a plain value of this rank, where that of another rank is in `whole`."""
    number: int
    """Rank 0's."""


def together(
    ranks: Ranks, stage: str, flatten: Callable[[], FlatState], mark: bytes = b"", number: int = 0
) -> Together:
    """What `flatten` describes on every rank, as one state.

    Called by all ranks. An error of any of them is raised on all, with `stage` in it. `mark` is
    compared besides. Raises StateError where descriptions contradict each other.
    """

    def describing() -> _Marked:
        flat = flatten()
        described = described_by(flat)
        if ranks.alone:
            return _Marked(flat, described, 0, 0)
        structure = structure_mark(described, mark)
        return _Marked(flat, described, structure, _values(described, structure))

    found, agreed = ranks.compare(
        stage, describing, lambda found: (found.structure, found.values), 2, number
    )
    same_structure, same_values = agreed.same
    whole, other = found.described, None
    if not same_structure:
        whole = merge(ranks, whole, found.structure)
        other = overruled(found.described.tree, whole.tree)
    return Together(found.flat, whole, same_values or not same_structure, other, agreed.number)


def described_by(flat: FlatState) -> Described:
    """A rank's state without its bytes. What is described alike is the same object."""
    alike: dict[tuple[int, str], StoredTensor] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, leaf in flat.leaves.items():
        key = (id(leaf.layout), leaf.dtype.name)
        stored = alike.get(key)
        if stored is None:
            stored = alike[key] = StoredTensor(leaf.layout.shape, leaf.dtype, leaf.layout)
        tensors[name] = stored
    return Described(tensors, flat.aliases, flat.tree)


def merge(ranks: Ranks, mine: Described, mark: int) -> Described:
    """The states of all ranks in one; ranks with the same `mark` have described the same."""
    hashes = ranks.all_hashes(mark)
    data = summary(mine)
    ranks_of: dict[int, list[int]] = {}
    for rank, value in enumerate(hashes):
        ranks_of.setdefault(value, []).append(rank)
    world = ranks.mesh
    received = [
        ([world.rank((rank,)) for rank in alike], ranks.broadcast(data, alike[0]))
        for alike in ranks_of.values()
    ]
    return ranks.attempt(
        "merging the ranks' states",
        lambda: merged([(alike, _described(text)) for alike, text in received], world),
    )


def summary(described: Described) -> bytes:
    """A description as bytes that another rank can read back."""
    return dump(Manifest(described.tensors, described.aliases, described.tree, ()))


def structure_mark(described: Described, mark: bytes = b"") -> int:
    """A hash of names, types, layouts and ties."""
    kinds: dict[str, int] = {}
    kind_of: dict[int, int] = {}
    """By the id of a description: many tensors share one."""
    numbers: list[int] = []
    for tensor in described.tensors.values():
        kind = kind_of.get(id(tensor))
        if kind is None:
            text = repr((tensor.dtype.name, tensor.layout))
            kind = kind_of[id(tensor)] = kinds.setdefault(text, len(kinds))
        numbers.append(kind)
    aliases = sorted(described.aliases.items())
    return _hash((mark, list(described.tensors), numbers, list(kinds), aliases))


@dataclass(frozen=True, slots=True)
class _Marked:
    """A state on one rank, with hashes that say whether the other ranks' is the same."""

    flat: FlatState
    described: Described
    structure: int
    values: int
    """Of the structure and the plain values."""


def _values(described: Described, structure: int) -> int:
    try:
        return _hash((structure, _without_tensors(described.tree)))
    except ValueError:  # a key of a class of the user's
        return xxhash.xxh3_64_intdigest(summary(described)) >> (64 - HASH_BITS)


def _hash(values: Any) -> int:
    # Version 2 of marshal's format has no references: equal values give equal bytes.
    return xxhash.xxh3_64_intdigest(marshal.dumps(values, 2)) >> (64 - HASH_BITS)


def _without_tensors(tree: Tree) -> object:
    """The plain values of a tree in their nest, as marshal takes them."""
    if isinstance(tree, TensorRef):
        return ...
    if isinstance(tree, dict):
        return {
            key: ... if type(item) is TensorRef else _without_tensors(item)
            for key, item in tree.items()
        }
    if isinstance(tree, list):
        return [_without_tensors(item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_without_tensors(item) for item in tree)
    if isinstance(tree, DType):
        return (..., tree.name)
    return tree


def _described(text: bytes) -> Described:
    manifest = load(text, "another rank's summary", stored=False)
    return Described(manifest.tensors, manifest.aliases, manifest.tree)
