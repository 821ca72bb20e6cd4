"""State dicts of modules whose parameters are DTensors, of the kind that a user has set.

Until a kind is set, `state_dict()` and `load_state_dict()` are torch's: a rank has its DTensors. A
kind applies to the module for which it was set and all inner modules:

    full      full plain tensors, on all ranks or the first
    sharded   the DTensors; DTensors of another mesh or placement load as well
    local     the local tensors; the metadata describes their DTensors

Rules:

1. All ranks make and load a full or a sharded state dict together: those of the mesh, if the
   DTensors have one mesh of one dimension, else all of the job. A local one shares memory and does
   not communicate.
2. A local state dict that does not fit is an error before any change. `load_state_dict` reports the
   misfits of the other kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sharding.agreement.ranks import Ranks
from sharding.describe.describing import TensorLike, describe, is_local_forced
from sharding.describe.dtensor import dtensor_like
from sharding.describe.members import FLAT_PARAMETERS, check_source
from sharding.describe.own_members import Record, check_made_by, record_of_layouts
from sharding.describe.wrappers import state_key
from sharding.errors import LocalShapeError, ShardingError
from sharding.kind import Kind
from sharding.layout import Layout, Replicate
from sharding.policies import KIND_OF, FullStateDictConfig, StateDictSettings, StateDictType
from sharding.reshard.kinds import convert_kind, group_of, group_over
from sharding.reshard.redistribute import Move, redistribute

_chosen: WeakKeyDictionary[nn.Module, StateDictSettings] = WeakKeyDictionary()
_hooked: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def chosen_for(module: nn.Module) -> StateDictSettings | None:
    """Returns the settings of a module; None if none were set."""
    return _chosen.get(module)


def choose(module: nn.Module, settings: StateDictSettings | None) -> None:
    """Sets the kind of a module's state dicts from now on; None: torch's own."""
    if settings is None:
        _chosen.pop(module, None)
        return
    _chosen[module] = settings
    if module not in _hooked:
        _hooked[module] = True
        module._register_state_dict_hook(_after_saving)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]


def _after_saving(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Makes the values of the kind that is set. May communicate."""
    settings = _chosen.get(module)
    if settings is None or is_local_forced():
        return
    config, kind = settings.state_dict_config, KIND_OF[settings.state_dict_type]
    keys = [key for key in state if key.startswith(prefix)]
    first = _first_keys(module, state, keys, prefix)
    if kind is Kind.LOCAL:
        _make_local(state, first, prefix, metadata)
    else:
        first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
        group = group_over(group_of(state[key]) for key in first)
        values: dict[str, TensorLike] = {key: state[key] for key in dict.fromkeys(first.values())}
        to_cpu = config.offload_to_cpu
        made = convert_kind(values, kind, rank0_only=first_only, offload_to_cpu=to_cpu, group=group)
        state.update({key: made[other] for key, other in first.items() if other in made})
        if first_only and dist.get_rank(group) > 0:
            for key in keys:
                del state[key]
    if config.offload_to_cpu:
        for key in keys:
            if isinstance(value := state.get(key), torch.Tensor):
                state[key] = value.cpu()


def _make_local(
    state: dict[str, Any], first: dict[str, str], prefix: str, metadata: dict[str, Any]
) -> None:
    """Puts in the local tensors, which share memory, and a record of their DTensors."""
    world = Ranks().mesh
    names: dict[str, list[str]] = {}
    layouts: dict[str, Layout] = {}
    for key, other in first.items():
        names.setdefault(other, []).append(key[len(prefix) :])
        state[key], layouts[other] = describe(state[key], key, world)
    tied = [tuple(names[key]) for key in layouts]
    metadata[FLAT_PARAMETERS] = (record_of_layouts(tied, list(layouts.values())),)


def _first_keys(
    module: nn.Module, state: dict[str, Any], keys: list[str], prefix: str
) -> dict[str, str]:
    """For the key of each DTensor: the first key of the same DTensor; equal on all ranks."""
    tied = {key: id(tensor) for key, tensor in _dtensors(module, prefix)}
    first: dict[int, str] = {}
    return {
        key: first.setdefault(tied.get(key, id(state[key])), key)
        for key in keys
        if isinstance(state[key], DTensor)
    }


def _before_loading(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: object
) -> None:
    """Turns the values for the module's DTensors into DTensors like them. May communicate."""
    settings = _chosen.get(module)
    if settings is None or is_local_forced():
        return
    targets = dict(_dtensors(module, prefix))
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _take_local(state, targets, prefix, metadata)
    else:
        _take_whole_or_sharded(state, targets)


def _dtensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, DTensor]]:
    """Yields the module's parameters and buffers that are DTensors, by their state dict keys."""
    for named in (module.named_parameters, module.named_buffers):
        for path, tensor in named(remove_duplicate=False):
            if isinstance(tensor, DTensor):
                yield prefix + state_key(path), tensor


def _take_local(
    state: dict[str, Any], targets: dict[str, DTensor], prefix: str, metadata: dict[str, Any]
) -> None:
    records: dict[str, Record] = {}
    for record in metadata.get(FLAT_PARAMETERS, ()):
        records |= {prefix + name: record for names in record["fqns"] for name in names}
    taken: dict[str, DTensor] = {}
    for key, target in targets.items():
        value = state.get(key)
        if not isinstance(value, torch.Tensor):
            continue
        if key in records:
            check_made_by(key, records[key], dist.get_rank(), dist.get_world_size())
        local = target.to_local()
        if value.shape != local.shape:
            raise LocalShapeError(
                f"{key}: rank {dist.get_rank()} has a local tensor of shape {tuple(value.shape)} "
                f"in the local state dict, and {tuple(local.shape)} in the module; it was "
                "truncated, or belongs to another rank or world size"
            )
        taken[key] = dtensor_like(target, value)
    state.update(taken)


def _take_whole_or_sharded(state: dict[str, Any], targets: dict[str, DTensor]) -> None:
    values = [value for key in targets if isinstance(value := state.get(key), DTensor)]
    group = group_over(map(group_of, [*targets.values(), *values]))
    ranks = Ranks(group)
    made: dict[str, torch.Tensor] = {}

    def planning() -> dict[str, Move]:
        moves = {}
        for key, target in targets.items():
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or value.shape != target.shape:
                continue
            source, have = describe(value, key, ranks.mesh)
            local, want = describe(target, key, ranks.mesh)
            if have != want:
                check_source(key, source, have, ranks.global_rank)
                made[key] = torch.empty(local.shape, dtype=source.dtype, device=local.device)
                moves[key] = Move(key, source, have, made[key], want)
        return moves

    stage = "reading a state dict"
    moves, agreement = ranks.run_and_compare(stage, planning, lambda each: {"moves": _mark(each)})
    if not agreement.same["moves"]:
        raise ShardingError(
            "the ranks load state dicts whose divided tensors have other names, dtypes or layouts; "
            "all of them load the same, each its own part"
        )
    redistribute(moves.values(), group=group, stage=stage)
    state.update({key: dtensor_like(targets[key], made[key]) for key in moves})


def _mark(moves: Mapping[str, Move]) -> int:
    """Returns a hash of the tensors of which ranks send each other parts."""
    seen = [
        (move.name, str(move.source.dtype), str(move.have), str(move.want))
        for move in moves.values()
        if any(not isinstance(placement, Replicate) for placement in move.have.placements)
    ]
    return crc32(repr(seen).encode())
