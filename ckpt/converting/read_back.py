"""Reads a conversion's result back and compares it with the source, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ckpt.checking.diff import FLAT_FORMATS, GGUF
from ckpt.checking.elements import Tolerance, same_value
from ckpt.converting.native_target import StoredState
from ckpt.transfer.copy_shares import stream_tensors
from formats.catalog import OutgoingTensor, TensorRef, Tree, iter_leaves
from formats.errors import CorruptError


def check_written(wanted: StoredState, found: StoredState, url: str, target_format: str) -> None:
    """Compares two checkpoints: names, shapes, dtypes, bytes, and plain values if both hold them.

    `wanted` is the source with all changes, `found` the result at `url`.

    Raises:
        CorruptError: they differ. The message names the tensor or value.
    """
    tensors = {name: found.tensors.get(found.aliases.get(name, name)) for name in wanted.tensors}
    for name, tensor in wanted.tensors.items():
        _check_described(tensor, tensors[name], url)
    names = {*found.tensors, *found.aliases}
    for name in wanted.aliases:
        if target_format not in (*FLAT_FORMATS, GGUF) and name not in names:
            raise _differs(url, name, "it is missing")
    there = [tensor for tensor in tensors.values() if tensor is not None]
    with (
        stream_tensors(wanted.copier, list(wanted.tensors.values())) as ours,
        stream_tensors(found.copier, there) as theirs,
    ):
        for tensor, other in zip(ours, theirs, strict=True):
            at = _first_difference(tensor.blocks(), other.blocks())
            if at is not None:
                at //= tensor.dtype.itemsize
                raise _differs(url, tensor.name, f"element {at} has other bytes")
        found.copier.finish()
    if target_format not in (*FLAT_FORMATS, GGUF):
        _check_values(dict(_values(wanted.tree)), dict(_values(found.tree)), url)


def _check_described(wanted: OutgoingTensor, found: OutgoingTensor | None, url: str) -> None:
    if found is None:
        raise _differs(url, wanted.name, "it is missing")
    if (wanted.shape, wanted.dtype) != (found.shape, found.dtype):
        raise _differs(
            url,
            wanted.name,
            f"it is {found.dtype} {list(found.shape)} and was {wanted.dtype} {list(wanted.shape)}",
        )


def _first_difference(a: Iterator[memoryview], b: Iterator[memoryview]) -> int | None:
    """Returns the first byte in which two streams differ; None if they are equal."""
    at = 0
    here = there = memoryview(b"")
    while True:
        here = here or _next(a)
        there = there or _next(b)
        size = min(len(here), len(there))
        if size == 0:
            return at if len(here) or len(there) else None
        unequal = np.frombuffer(here[:size], np.uint8) != np.frombuffer(there[:size], np.uint8)
        if unequal.any():
            return at + int(unequal.argmax())
        here, there, at = here[size:], there[size:], at + size


def _next(blocks: Iterator[memoryview]) -> memoryview:
    """Returns the next block that has bytes; an empty one at the end."""
    return next((block for each in blocks if (block := each.cast("B"))), memoryview(b""))


def _values(tree: Tree) -> Iterator[tuple[str, Tree]]:
    return (pair for pair in iter_leaves(tree) if not isinstance(pair[1], TensorRef))


def _check_values(wanted: Mapping[str, Tree], found: Mapping[str, Tree], url: str) -> None:
    exact = Tolerance(0.0, 0.0)
    for name, value in wanted.items():
        is_empty = isinstance(value, dict | list | tuple) and not value
        if name not in found and not is_empty:
            raise _differs(url, name, "the value is missing")
        if name in found and not same_value(value, found[name], exact):
            raise _differs(url, name, f"the value is {found[name]!s:.80} and was {value!s:.80}")


def _differs(url: str, name: str, problem: str) -> CorruptError:
    return CorruptError(
        f"{url}: {name}: {problem} when the result is read back: it is not what was converted; "
        "check the disk, and convert again"
    )
