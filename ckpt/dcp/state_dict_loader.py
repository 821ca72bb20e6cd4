"""`load` with the name and arguments of torch.distributed.checkpoint, from every format.

DCP's own planner takes the state dict apart, and the parts are the target of a load: tensors are
filled in place, values take their places in the nest. Names that only the checkpoint has stay
there. With a planner of the program's own torch's function plans and our StorageReader reads
(`ckpt.dcp.arguments`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeGuard
from warnings import warn

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_loader as _torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from ckpt.dcp.arguments import check_coordinator, group_of, state_of, storage_of, taken
from ckpt.dcp.storage_reader import CkptStorageReader
from ckpt.dcp.torch_errors import translated_errors
from ckpt.loading import load_partly
from ckpt.state.typed_values import like_target

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load", "load_state_dict"]

KeyPath = Sequence[str | int]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """`state_dict` holds what was saved under its names, in any format, by any number of ranks.

    As torch's function of this name; docs/dcp.md compares the two, argument by argument. To be
    called by all ranks of `process_group`, or with `no_dist=True` by any rank by itself. Tensors
    are filled in place, Stateful entries get `load_state_dict`, values are replaced. Nothing is
    touched before all ranks have found all names with their shapes.

    Raises:
        ArgumentError: no place was given, or an argument asks for what is not done.
        MismatchError: names are missing, unless the planner allows that, or shapes differ.
        NotACheckpointError, CorruptError, RankError: as `ckpt.load`.

    >>> import tempfile, torch
    >>> from ckpt.dcp.state_dict_saver import save
    >>> state = {"model": {"w": torch.zeros(2)}, "step": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save({"model": {"w": torch.ones(2)}, "step": 1}, checkpoint_id=folder)
    ...     load(state, checkpoint_id=folder)
    >>> state
    {'model': {'w': tensor([1., 1.])}, 'step': 1}
    """
    reader = storage_of(storage_reader, CkptStorageReader, checkpoint_id, "storage_reader")
    if not _is_served(reader, planner):
        given = taken(checkpoint_id=checkpoint_id, planner=planner, no_dist=no_dist)
        with translated_errors(process_group, no_dist):
            _torch.load(state_dict, storage_reader=reader, process_group=process_group, **given)
        return
    entries = {key: state_dict[key] for key in sorted(state_dict, key=str)}  # alike on all ranks
    nests = state_of(entries)
    _fill(nests, reader, planner, process_group, no_dist)
    for key, entry in entries.items():
        if isinstance(entry, Stateful):
            entry.load_state_dict(nests[key])  # type: ignore[arg-type]
        else:
            state_dict[key] = nests[key]


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """As `load`, which takes its place. Raises ArgumentError for a coordinator but rank 0."""
    warn("load_state_dict is deprecated: call load instead", FutureWarning, stacklevel=2)
    check_coordinator(coordinator_rank)
    load(
        state_dict,
        storage_reader=storage_reader,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )


def _is_served(reader: StorageReader, planner: object) -> TypeGuard[CkptStorageReader]:
    """Whether `ckpt.load` itself does what these are to do."""
    is_default = planner is None or type(planner) is DefaultLoadPlanner
    return isinstance(reader, CkptStorageReader) and is_default


def _fill(
    nests: dict[str, Any],
    reader: CkptStorageReader,
    planner: LoadPlanner | None,
    process_group: ProcessGroup | None,
    no_dist: bool,
) -> None:
    """Nests whose tensors and values are those of the checkpoint. Called by all ranks."""
    taking = planner if isinstance(planner, DefaultLoadPlanner) else DefaultLoadPlanner()
    taking.set_up_planner(nests)
    paths = taking.mappings if taking.flatten_state_dict else {}
    target: dict[str, object] = {}
    for name, leaf in taking.state_dict.items():
        is_filled = isinstance(leaf, torch.Tensor | np.ndarray)
        target[name] = leaf if is_filled else _Value(nests, paths.get(name, (name,)), leaf)
    target.update(_empty_dicts(nests) if taking.flatten_state_dict else {})
    load_partly(
        reader.checkpoint_id,
        target,
        allows_missing=taking.allow_partial_load,
        verify=reader.verify,
        group=group_of(process_group, no_dist),
        storage_options=reader.storage_options,
    )


class _Value:
    """The place of a value in a nest, as a target that takes whatever was saved there."""

    def __init__(self, nests: dict[str, Any], path: KeyPath, own: object) -> None:
        self._nests, self._path, self._own = nests, tuple(path), own

    def state_dict(self) -> dict[str, object]:
        """Nothing to fill in place."""
        return {}

    def load_state_dict(self, loaded: object) -> None:
        """The value is in the nest."""
        *outer, last = self._path
        node: Any = self._nests
        for key in outer:
            node = node[_own_key(node, key)]
        node[_own_key(node, last)] = like_target(self._own, loaded)


def _own_key(node: Mapping[Any, object] | list[object], key: str | int) -> object:
    """The key of a container that DCP has made this text of."""
    if isinstance(node, list) or key in node:
        return key
    with suppress(ValueError):
        if int(key) in node:
            return int(key)
    return next((own for own in node if str(own) == key), key)


def _empty_dicts(nest: dict[Any, Any], path: str = "") -> dict[str, dict[Any, Any]]:
    """The empty dicts of a nest by name: they take what was saved in their places."""
    found: dict[str, dict[Any, Any]] = {}
    for key, item in nest.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(item, dict):
            found.update(_empty_dicts(item, name) if item else {name: item})
    return found
