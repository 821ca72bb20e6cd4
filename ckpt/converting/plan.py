"""The plan of a conversion as a value: each tensor's names, shape and dtype, and the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ckpt.mapping.apply import Mapped
from ckpt.state.patterns import Casts
from formats.catalog import TensorRef, iter_leaves


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the target."""

    name: str
    sources: tuple[str, ...]
    """The names in the source that it comes from."""
    shape: tuple[int, ...]
    source_dtype: str
    dtype: str
    nbytes: int
    """The bytes that are written."""
    tied_to: str | None = None
    """The name of the tensor whose bytes these are; they count once."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The tensors that a conversion reads and writes, and its bytes."""

    tensors: tuple[PlannedTensor, ...]
    """In the order of the target, with tied names."""
    excluded: tuple[str, ...]
    """The names in the source that a mapping leaves out."""
    read_bytes: int
    """The bytes of the source's tensors, each once."""
    written_bytes: int
    """The bytes of the target's tensors, without headers."""
    memory_bytes: int
    """The largest size of all blocks that are in memory together."""


def conversion_plan(
    found: Mapped, casts: Casts, memory_bytes: int, untied: bool = False
) -> ConversionPlan:
    """Returns the plan for a catalog after its changes. Pure: reads nothing.

    With `untied`, each tied name has bytes of its own.
    """
    catalog = found.catalog
    first_names: dict[str, str] = {}
    planned: list[PlannedTensor] = []
    read_bytes = 0
    for name, leaf in iter_leaves(catalog.tree):
        if not isinstance(leaf, TensorRef):
            continue
        record = catalog.tensors[leaf.name]
        first = first_names.setdefault(leaf.name, name)
        dtype = casts.written_dtype(first, record)
        is_tied = first != name and not untied
        planned.append(
            PlannedTensor(
                name,
                _sources(found.origins, name),
                record.shape,
                str(record.dtype),
                str(dtype),
                0 if is_tied else dtype.itemsize * prod(record.shape),
                first if is_tied else None,
            )
        )
        read_bytes += 0 if first != name else record.nbytes
    written = sum(tensor.nbytes for tensor in planned)
    return ConversionPlan(tuple(planned), found.excluded, read_bytes, written, memory_bytes)


def _sources(origins: Mapping[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    """Returns the origins of a name; an item of a list has those of the list."""
    while name and name not in origins:
        name = name.rpartition(".")[0]
    return origins.get(name, ())
