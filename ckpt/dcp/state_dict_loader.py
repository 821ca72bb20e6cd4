"""`load` by the name and arguments of torch.distributed.checkpoint, for every format.

DCP's own planner flattens the state dict, and its entries are the target of a load: tensors are
filled in place, values are replaced in the nest. Names that only the checkpoint has are ignored.
With a user's planner, torch's function plans and our StorageReader reads (`ckpt.dcp.arguments`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_loader as _torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from ckpt.dcp.arguments import (
    check_coordinator,
    check_state,
    given_arguments,
    group_of,
    have_layouts,
    is_plain_storage,
    is_served,
    on_all_ranks,
    state_of,
    storage_of,
    translate_errors,
)
from ckpt.dcp.storage_reader import CkptStorageReader
from ckpt.errors import StateError
from ckpt.loading.load import load_partly
from ckpt.state.stateful import by_parameters
from ckpt.state.typed_values import like_target
from sharding.describe.members import LocalPart

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
    """Fills `state_dict`, by its names, from a checkpoint of any format and any number of ranks.

    docs/dcp.md compares this function with torch's, argument by argument. All ranks of
    `process_group` call this, or with `no_dist=True` one rank alone. Tensors are filled in place,
    Stateful entries get `load_state_dict`, values are replaced. The state dict is unchanged until
    all ranks have found all names with their shapes.

    Raises:
        ArgumentError: no place was given, or an argument is not supported.
        MismatchError: names are missing, unless the planner allows that, or shapes differ.
        NotACheckpointError, CorruptError, RankError: as `ckpt.load`.

    >>> import tempfile, torch
    >>> from ckpt.dcp import load, save
    >>> state = {"model": {"w": torch.zeros(2)}, "step": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save({"model": {"w": torch.ones(2)}, "step": 1}, checkpoint_id=folder)
    ...     load(state, checkpoint_id=folder)
    >>> state
    {'model': {'w': tensor([1., 1.])}, 'step': 1}
    """
    group = group_of(process_group, no_dist)
    begin = partial(_begin, state_dict, storage_reader, checkpoint_id, planner)
    reader, target = on_all_ranks("ckpt.dcp.load", group, begin, is_served)
    if target is None or not isinstance(reader, CkptStorageReader):
        arguments = given_arguments(checkpoint_id=checkpoint_id, planner=planner, no_dist=no_dist)
        with translate_errors(process_group, no_dist):
            _torch.load(state_dict, storage_reader=reader, process_group=process_group, **arguments)
        return
    load_partly(
        reader.checkpoint_id,
        target.parts,
        allows_missing=target.allows_missing,
        verify=reader.verify,
        group=group,
        storage_options=reader.storage_options,
    )
    on_all_ranks("ckpt.dcp.load", group, partial(_install, state_dict, target))


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Calls `load`, which replaces it. Raises ArgumentError for another coordinator than rank 0."""
    warn("load_state_dict is deprecated: call load instead", FutureWarning, stacklevel=2)
    check_coordinator(coordinator_rank)
    load(
        state_dict,
        storage_reader=storage_reader,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Returns a new state dict of these keys, or of all, by torch's function of this name."""
    reader = storage_of(storage_reader, CkptStorageReader, checkpoint_id, "storage_reader")
    with translate_errors(process_group, no_dist=False):
        found: dict[str, Any] = _torch._load_state_dict_from_keys(
            keys, storage_reader=reader, process_group=process_group
        )
    return found


def __getattr__(name: str) -> object:
    return getattr(_torch, name)


class _Target(NamedTuple):
    """A flattened state dict."""

    given: dict[str, Any]
    """The entries, or the state dicts of Stateful entries, in the same order on all ranks."""
    nests: dict[str, Any]
    """The same, local state dicts by the names of their parameters."""
    parts: dict[str, object]
    """The tensors, the Stateful objects and the places of the values, by DCP's names."""
    allows_missing: bool


def _begin(
    state_dict: dict[str, Any],
    own_reader: StorageReader | None,
    checkpoint_id: str | os.PathLike[str] | None,
    planner: LoadPlanner | None,
) -> tuple[StorageReader, _Target | None]:
    """Returns the reader, and the target if `ckpt.load` serves the call.

    Raises ArgumentError for an argument that is not supported.
    """
    reader = storage_of(own_reader, CkptStorageReader, checkpoint_id, "storage_reader")
    check_state(state_dict)
    if not is_plain_storage(reader, CkptStorageReader):
        return reader, None
    _ = reader.checkpoint_id  # raises if there is none
    taking = DefaultLoadPlanner() if planner is None else planner
    if type(taking) is not DefaultLoadPlanner:
        return reader, None
    entries: dict[str, Any] = state_of(state_dict, in_order=True)
    nests = {
        key: by_parameters(nest) if isinstance(nest, Mapping) else nest
        for key, nest in entries.items()
    }
    if not have_layouts(nests):
        return reader, None
    return reader, _Target(entries, nests, _parts(nests, taking), taking.allow_partial_load)


def _parts(nests: dict[str, Any], planner: DefaultLoadPlanner) -> dict[str, object]:
    """Returns the entries of flattened nests: tensors to fill, and places for values.

    Raises StateError for two equal names, or for a tensor on the meta device that cannot be made.
    """
    # The planner of saves, because the planner of loads replaces unknown objects by None.
    taking = DefaultSavePlanner(planner.flatten_state_dict, planner.flatten_sharded_tensors)
    try:
        taking.set_up_planner(nests)
        real = {
            name: leaf
            for name, leaf in taking.state_dict.items()
            if isinstance(leaf, torch.Tensor) and leaf.is_meta
        }
        if real:
            DefaultLoadPlanner().set_up_planner(real)
    except ValueError as error:
        raise StateError(
            f"torch's planner cannot flatten the state dict: {error}; rename one of two keys "
            "that make the same name, and give tensors on the meta device memory, by to_empty()"
        ) from error
    parts: dict[str, object] = {}
    for name, leaf in {**taking.state_dict, **real}.items():
        path = taking.mappings.get(name, (name,))
        if name in real:
            _put(nests, path, leaf)
        is_filled = isinstance(leaf, torch.Tensor | np.ndarray | LocalPart) or _has_stateful(leaf)
        parts[name] = leaf if is_filled else _Value(nests, path, leaf)
    return {**parts, **_empty_dicts(nests)} if planner.flatten_state_dict else parts


def _has_stateful(leaf: object) -> bool:
    """Whether an entry is or holds a Stateful object: DCP takes a list without tensors for one."""
    if isinstance(leaf, list | tuple):
        return any(map(_has_stateful, leaf))
    return isinstance(leaf, Stateful)


def _install(state_dict: dict[str, Any], target: _Target) -> None:
    """Loads nests into Stateful entries, and puts them in the places of the other entries."""
    for key, nest in target.nests.items():
        if isinstance(nest, LocalPart):  # a part of a tensor in the state dict, which is filled
            continue
        entry, value = state_dict[key], target.given[key]
        if value is not nest and isinstance(value, dict):  # a local state dict
            own = {k: v for k, v in nest.items() if k in value and not isinstance(v, LocalPart)}
            value.update(own)
            nest = value
        if isinstance(entry, Stateful):
            entry.load_state_dict(nest)
        else:
            state_dict[key] = nest


class _Value:
    """The place of a value in a nest: a target that takes any saved value."""

    def __init__(self, nests: dict[str, Any], path: KeyPath, own: object) -> None:
        self._nests, self._path, self._own = nests, tuple(path), own

    def state_dict(self) -> dict[str, object]:
        """Returns an empty dict: no tensor is filled in place."""
        return {}

    def load_state_dict(self, loaded: object) -> None:
        """Puts the value into the nest."""
        _put(self._nests, self._path, like_target(self._own, loaded))


def _put(nests: dict[str, Any], path: KeyPath, value: object) -> None:
    """Puts a value into the nests at a key path of DCP's."""
    *outer, last = path
    node: Any = nests
    for key in outer:
        node = node[_own_key(node, key)]
    node[_own_key(node, last)] = value


def _own_key(node: Mapping[Any, object] | list[object], key: str | int) -> object:
    """Returns the key of a container that DCP has turned into this text."""
    if isinstance(node, list) or key in node:
        return key
    with suppress(ValueError):
        if int(key) in node:
            return int(key)
    return next((own for own in node if str(own) == key), key)


def _empty_dicts(nest: dict[Any, Any], path: str = "") -> dict[str, dict[Any, Any]]:
    """Returns the empty dicts of a nest by name: they take all that was saved at their names."""
    empty: dict[str, dict[Any, Any]] = {}
    for key, item in nest.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(item, dict):
            empty.update(_empty_dicts(item, name) if item else {name: item})
    return empty
