"""The identity of weights: digests that no layout, world size or format changes.

Rules:

1. The digest of a tensor is the SHA-256 of its dtype, its shape and its elements, row by row.
2. The digest of a checkpoint is the SHA-256 of the names, sorted, each with its tensor's digest. A
   tied name counts like any other. Plain values do not count.
3. A block of each tensor is in memory, and all checksums of what is read are compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ckpt.arguments import memory_budget, workers_for
from ckpt.checking.elements import read_elements
from ckpt.errors import ArgumentError, ArgumentTypeError
from ckpt.opening.sources import open_source
from ckpt.state.patterns import Selection
from ckpt.stores.store import Options
from ckpt.transfer.read import Array, RangeReader
from ckpt.transfer.record_sums import RecordSums
from formats.catalog import TensorRecord
from formats.storage import Pool
from sharding.errors import without_secrets

__all__ = ["Identity", "id"]

BLOCK_BYTES = 4 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Identity:
    """The digests of a checkpoint, or of a state in memory. Equal weights have equal ones."""

    digest: str
    """The SHA-256 of all names and tensors: 64 hex digits."""
    tensors: Mapping[str, str]
    """The SHA-256 of each tensor, by its name."""

    def __str__(self) -> str:
        return self.digest


def id(  # noqa: A001 - `ckpt.id`; `ckpt.__all__` leaves it out
    of: str | os.PathLike[str] | object,
    *,
    select: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
    storage_options: Options = None,
) -> Identity:
    """Returns the digests of the weights at a path or URL, of any format, or of a state in memory.

    A module has the digest of its checkpoint: `ckpt.id(model) == ckpt.id(url, select="model")`
    tells whether an engine computes with the weights that were saved. Of a state with DTensors all
    ranks of their mesh call this, and each gets the digests of the whole tensors.

    Args:
        of: a path, a URL, a module, or a dict of tensors, modules and such dicts.
        select: a key path. Only what is below it counts, without it in the names.
        include, exclude: patterns of names, as for `ckpt.convert`.
        progress: called with numbers of bytes of tensors.
        storage_options: options of the fsspec driver.

    Raises:
        NotACheckpointError, CorruptError, FormatError: as `ckpt.load`.
        ArgumentError: nothing is below `select`, or a pattern matches no name.
        ArgumentTypeError: a part of a state is no tensor, module or dict.

    >>> import ckpt, tempfile, torch
    >>> model = torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/step-1", {"model": model, "step": 1})
    ...     _ = ckpt.convert(f"{folder}/step-1", f"{folder}/m.safetensors", select="model")
    ...     found = ckpt.id(f"{folder}/step-1", select="model")
    ...     found == ckpt.id(model) == ckpt.id(f"{folder}/m.safetensors")
    True
    """
    chosen = Selection.of(include, exclude)

    def names_in(names: Iterable[str], where: str) -> dict[str, str]:
        """Returns the chosen names, by the names that they have without `select`."""
        prefix = "" if select is None else f"{select}."
        digests = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        if not digests:
            raise ArgumentError(f"{where} has no tensor below {select!r}")
        chosen.check_chooses(digests, where)
        return {short: name for short, name in digests.items() if short in chosen}

    if not isinstance(of, str | os.PathLike):
        tensors = dict(_tensors_in(of))
        names = names_in(tensors, "the state")
        return identity_of({short: digest_of(tensors[name]) for short, name in names.items()})
    with open_source(of, storage_options) as source:
        catalog = source.catalog
        records = dict(catalog.tensors)
        records |= {alias: records[name] for alias, name in catalog.aliases.items()}
        names = names_in(records, without_secrets(source.url))
        engine = RangeReader(source.store, RecordSums("all"))
        wanted = {records[name].name: records[name] for name in names.values()}

        def of_record(record: TensorRecord) -> str:
            name, itemsize = record.dtype.torch_name, record.dtype.itemsize
            read = partial(read_elements, engine, record)
            return _digest(name, record.shape, itemsize, read, progress)

        with Pool(workers_for(1)) as pool:
            digests = dict(zip(wanted, pool.map(of_record, wanted.values()), strict=True))
        engine.finish()
        return identity_of({short: digests[records[name].name] for short, name in names.items()})


def identity_of(tensors: dict[str, str]) -> Identity:
    """Returns the identity of tensors with these digests (rule 2)."""
    ordered = dict(sorted(tensors.items()))
    whole = hashlib.sha256()
    for name, digest in ordered.items():
        encoded = name.encode("utf-8", "surrogatepass")
        whole.update(b"%d:%s%s" % (len(encoded), encoded, bytes.fromhex(digest)))
    return Identity(whole.hexdigest(), ordered)


def _digest(
    dtype: str,
    shape: Sequence[int],
    itemsize: int,
    read: Callable[[int, int], Array],
    progress: Progress | None = None,
) -> str:
    """Returns the digest of a tensor (rule 1); `read` returns elements `[lo, hi)`."""
    digest, elements = hashlib.sha256(f"{dtype}[{','.join(map(str, shape))}]".encode()), prod(shape)
    step = max(1, min(BLOCK_BYTES, memory_budget() // 8) // itemsize)
    for lo in range(0, elements, step):
        block = read(lo, min(lo + step, elements))
        digest.update(block.data)
        if progress is not None:
            progress(block.nbytes)
    return digest.hexdigest()


def digest_of(tensor: Any) -> str:
    """Returns the digest of a tensor in memory (rule 1)."""
    import torch
    from torch.distributed.tensor import DTensor

    whole = _gathered(tensor) if isinstance(tensor, DTensor) else tensor
    flat = whole.detach().contiguous().reshape(-1)

    def read(lo: int, hi: int) -> Any:
        part = flat[lo:hi].cpu().resolve_conj().resolve_neg().contiguous()
        return part.view(torch.uint8).numpy()

    dtype = str(whole.dtype).removeprefix("torch.")
    return _digest(dtype, whole.shape, flat.element_size(), read)


def _gathered(tensor: Any) -> Any:
    """Returns the whole of a DTensor. Gloo has no 8-bit floats and few integers: bytes travel."""
    import torch
    from torch.distributed.tensor import DTensor

    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.full_tensor()
    local = tensor.to_local().resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)
    whole = torch.empty((*tensor.shape, local.shape[-1]), device="meta")
    raw = DTensor.from_local(
        *(local, tensor.device_mesh, tensor.placements),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return raw.full_tensor().view(tensor.dtype).squeeze(-1)


def _tensors_in(state: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a state with the names that a checkpoint gives them."""
    import torch

    if isinstance(state, torch.Tensor):
        yield path, state
        return
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"{path or 'the state'} is a {type(state).__name__}; give a module, or a dict of "
            "tensors, modules and such dicts"
        )
    for key, entry in state.items():
        yield from _tensors_in(entry, f"{path}.{key}" if path else str(key))
