"""Describes modules of torch's FullyShardedDataParallel (FSDP1), without a gather.

Like our units, torch's flatten parameters into one and cut it evenly over the ranks of a process
group, `FlatShard`. Under a hybrid strategy other groups hold copies. The differences are:

1. With `use_orig_params=True` torch puts padding between parameters, so that each begins at an
   aligned address. Offsets count the padding, and no part includes it.
2. A parameter without elements on a rank is an empty tensor on this rank and gets no gradient: the
   optimizer of the rank keeps no state for it (`FlatMember.is_idle`).
3. A parameter whose elements do not lie in row-major order is flattened in the order of its memory,
   which no layout describes.
4. After a forward without a backward, torch keeps a part of the parameters unsharded, and the next
   forward uses them without a gather. They are resharded here, or that forward would ignore loaded
   values.
5. Torch's hooks around state dicts gather, refuse device meshes and change names. They are removed
   while a state dict is read or loaded here.

Torch's FSDP takes a second to import. This module does not import it: before a program has imported
it, no module can have it.

The layouts of the parameters in a flat parameter of torch's FSDP1, each over its ranks.

The axes of the mesh are those of `sharding.describe.own_members`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from sharding.describe import dtensor
from sharding.describe.dtensor import Grids
from sharding.describe.members import FlatMember, FlatSlice, check_numel
from sharding.describe.wrappers import CleanNames, names_in
from sharding.errors import LocalShapeError, ShardingError, UnknownPlacementError
from sharding.layout import FlatShard, Layout

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle

FSDP_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
MARK = "_fsdp_flattened"
"""Torch's attribute of a flat parameter, and of a parameter in one."""
FLAT_PARAMETER = "_flat_param"
"""Torch's name of a unit's flat parameter, in the module and in local state dicts."""
HOOKS_MODULE = "torch.distributed.fsdp._state_dict_utils"
HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The attributes of a module for its hooks around state dicts."""


def is_unit(module: nn.Module) -> TypeGuard[FullyShardedDataParallel]:
    """Whether a module is an instance of torch's wrapper."""
    found = sys.modules.get(FSDP_MODULE)
    return found is not None and isinstance(module, found.FullyShardedDataParallel)


def is_in(module: nn.Module) -> bool:
    """Whether a module contains instances of torch's wrapper."""
    return FSDP_MODULE in sys.modules and any(map(is_unit, module.modules()))


def is_flattened(value: object) -> TypeGuard[nn.Parameter]:
    """Whether a value is a flat parameter of torch's wrapper, or a parameter in one."""
    return hasattr(value, MARK) and isinstance(value, nn.Parameter)


def flat_members(module: nn.Module) -> Iterator[FlatMember]:
    """Yields the parameters that an optimizer sees for flat ones in a module; reshards the module.

    Original parameters that are not divided are left out: they are the same as before wrapping.
    """
    for unit, handle in _units(module):
        _reshard(handle)
        names, flat = _names(module, handle), handle.flat_param
        if not handle._use_orig_params:
            check_numel(flat, names[0][0], flat._sharded_size.numel())
            yield FlatMember(flat, tuple(names), tuple(slices_of(unit, handle)), is_original=False)
        elif handle.uses_sharded_strategy:
            for parameter, tied, part in zip(
                _originals(flat), names, slices_of(unit, handle), strict=True
            ):
                numel = part.hi - part.lo
                check_numel(parameter, tied[0], numel)
                own = FlatSlice(0, numel, part.layout, part.key)
                idle = numel == 0 and part.layout.numel > 0
                yield FlatMember(parameter, (tied,), (own,), is_original=True, is_idle=idle)


def buffer_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Returns the original dtypes of the buffers that mixed precision has cast, by name."""
    clean = CleanNames(module)
    dtypes: dict[str, torch.dtype] = {}
    for path, unit in module.named_modules():
        if is_unit(unit) and unit.mixed_precision.buffer_dtype is not None:
            for name, dtype in unit._buffer_name_to_orig_dtype.items():
                if name not in unit._ignored_buffer_names:
                    dtypes[clean.of(f"{path}.{name}" if path else name)] = dtype
    return dtypes


def parts_by_name(module: nn.Module, state: Mapping[str, object]) -> dict[str, object]:
    """Returns a local state dict of this module by parameter names. Does not communicate.

    `LocalPart`s replace every flat parameter, a ShardedTensor or this rank's shard with or without
    padding, and share its memory. All other values stay as they are.

    Raises LocalShapeError for a shard that is missing, truncated, or of another world size.
    """
    clean = CleanNames(module)
    units = {
        clean.prefix(path) + FLAT_PARAMETER: (unit, unit._handle)
        for path, unit in module.named_modules()
        if is_unit(unit) and unit._handle is not None
    }
    parts: dict[str, object] = {}
    inside: set[str] = set()
    named = {clean.of(key): value for key, value in state.items()}
    for key, (unit, handle) in units.items():
        if key in named:
            shard = _shard(key, named[key], handle)
            for tied, part in zip(_names(module, handle), slices_of(unit, handle), strict=True):
                inside.update(tied)
                parts |= dict.fromkeys(tied, part.of(shard, part.key))
        elif handle.uses_sharded_strategy:
            raise LocalShapeError(
                f"{key}: the state dict has no local shard of this flat parameter; give one that "
                "the module returned under StateDictType.LOCAL_STATE_DICT"
            )
    rest = {k: v for k, v in named.items() if k not in units and k not in inside}
    return parts | rest


def check_is_whole(module: nn.Module) -> None:
    """Raises ShardingError for a part of a unit, whose parameters are in a flat one outside."""
    if FSDP_MODULE not in sys.modules or not any(map(_may_be_part, module.modules())):
        return
    bare = [("", module)]
    while bare:
        path, part = bare.pop(0)
        if is_unit(part):
            continue
        bare += [(f"{path}.{name}", child) for name, child in part.named_children()]
        if not getattr(part, "_is_fsdp_managed_module", False):
            continue
        shown = path.removeprefix(".") or type(module).__name__
        for parameter in part._parameters.values():
            if is_flattened(parameter):
                raise loose(parameter, shown)
        is_emptied = not getattr(part, "_fsdp_use_orig_params", True)
        if is_emptied and any(isinstance(value, torch.Tensor) for value in vars(part).values()):
            raise loose(None, shown)


def _may_be_part(part: nn.Module) -> bool:
    """Whether a wrapper around a module has taken its parameters."""
    attributes = vars(part)
    return "_is_fsdp_managed_module" in attributes and (
        not attributes.get("_fsdp_use_orig_params", True)
        or any(map(is_flattened, part._parameters.values()))
    )


def loose(parameter: torch.Tensor | None, where: str = "") -> ShardingError:
    """Returns the error for a parameter, or a module of that name, without its unit."""
    shape = "" if parameter is None else f" of shape {tuple(parameter.shape)}"
    what = f"{where} has its parameters" if where else f"a parameter{shape} is, or may be, a part"
    return ShardingError(
        f"{what} in a flat parameter of torch's FullyShardedDataParallel, which only its module "
        "knows; put the wrapped module itself into the state, not its parts"
    )


@contextmanager
def local_state_dicts(module: nn.Module) -> Iterator[None]:
    """Makes state dicts have this rank's tensors in the block, by the names inside wrappers."""
    units = [part for part in module.modules() if is_unit(part)]
    before = [(hooks := getattr(unit, kind), dict(hooks)) for unit in units for kind in HOOKS]
    for hooks, every in before:
        for key, hook in every.items():
            if getattr(getattr(hook, "hook", hook), "__module__", "") == HOOKS_MODULE:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, every in before:
            hooks.clear()
            hooks.update(every)


def _units(module: nn.Module) -> Iterator[tuple[FullyShardedDataParallel, FlatParamHandle]]:
    """Yields the instances in a module that have parameters of their own."""
    for part in module.modules():
        if is_unit(part) and part._handle is not None:
            yield part, part._handle


def _reshard(handle: FlatParamHandle) -> None:
    """Puts the parameters that the optimizer sees into the modules, and frees all others."""
    flat = handle.flat_param
    if handle._training_state.name == "SUMMON_FULL_PARAMS":
        raise ShardingError(
            f"the parameters {flat._fqns[:3]} are whole, in summon_full_params of torch's "
            "FullyShardedDataParallel; leave it before saving or loading"
        )
    if not handle.uses_sharded_strategy:
        return
    whole = [
        storage
        for name in ("_full_param_padded", "_full_prec_full_param_padded")
        if (tensor := getattr(flat, name, None)) is not None
        and (storage := tensor.untyped_storage()).size() > 0
    ]
    if whole:
        with torch.no_grad():
            handle._use_sharded_flat_param()
        for storage in whole:
            storage.resize_(0)
        handle._prefetched = False


def _names(module: nn.Module, handle: FlatParamHandle) -> list[tuple[str, ...]]:
    """Returns, by parameter in a flat one, its names in a module."""
    flat = handle.flat_param
    places = [[(info.module, info.param_name)] for info in flat._param_infos]
    first = {place[0]: index for index, place in enumerate(places)}
    for tied in flat._shared_param_infos:
        places[first[tied.prim_module, tied.prim_param_name]].append((tied.module, tied.param_name))
    return names_in(module, places)


def _originals(flat: FlatParameter) -> Iterator[nn.Parameter]:
    """Yields the parameters now in the modules: original ones, or those that a user put there."""
    for info, parameter in zip(flat._param_infos, flat._params or (), strict=True):
        registered = info.module._parameters.get(info.param_name)
        yield registered if isinstance(registered, nn.Parameter) else parameter


def _shard(key: str, value: object, handle: FlatParamHandle) -> torch.Tensor:
    """Returns this rank's shard of a flat parameter in a local state dict, checked for its size."""
    flat, rank = handle.flat_param, dist.get_rank()
    padded = flat._sharded_size.numel()
    numel, at = padded - flat._shard_numel_padded, padded * handle.rank
    if not isinstance(value, torch.Tensor):
        raise LocalShapeError(f"{key}: rank {rank} has a {type(value).__name__}, not a tensor")
    shard, begin = value, at
    if dtensor.is_sharded(value):
        shards = value.local_shards()
        shard = shards[0].tensor if shards else torch.empty(0, dtype=flat.dtype, device=flat.device)
        begin = shards[0].metadata.shard_offsets[0] if shards else at
    if shard.ndim != 1 or shard.numel() not in (numel, padded) or begin != at:
        raise LocalShapeError(
            f"{key}: rank {rank} has a local shard of shape {tuple(shard.shape)} from element "
            f"{begin} on; expected are {numel} elements, or {padded} with padding, from element "
            f"{at} on: it was truncated, or saved by another number of ranks"
        )
    return shard.detach()


def slices_of(unit: FullyShardedDataParallel, handle: FlatParamHandle) -> Iterator[FlatSlice]:
    """Yields, by parameter, its slice of this rank's shard, with its layout."""
    flat, stride = handle.flat_param, handle.flat_param._sharded_size.numel()
    first = stride * handle.rank if handle.uses_sharded_strategy else 0
    ends = accumulate(flat._numels_with_padding)
    spans = [
        (end - numel, end)
        for end, numel, is_padding in zip(
            ends, flat._numels_with_padding, flat._is_padding_mask, strict=True
        )
        if not is_padding
    ]
    mesh = unit._device_mesh
    grid = dtensor.mesh_of(mesh, (1, 0)) if mesh is not None and mesh.ndim == 2 else None
    grids = Grids(dist.get_rank(), _axes(unit, handle), grid)
    for index, (begin, end) in enumerate(spans):
        _check_order(flat, index)
        divided = handle.uses_sharded_strategy and end > begin
        cut = FlatShard(begin, stride) if divided else None
        layout = grids.layout(tuple(flat._shapes[index]), _parallel_layout(flat, index), cut)
        lo, hi = (min(max(at - first, 0), stride) for at in (begin, end))
        yield FlatSlice(lo, hi, layout, (id(flat), index))


def _axes(unit: FullyShardedDataParallel, handle: FlatParamHandle) -> dict[str, list[int]]:
    """Returns the ranks that hold the same shard as this one, and those that share the shards."""
    sharing = dist.get_process_group_ranks(handle.process_group)
    across = getattr(unit, "_inter_node_pg", None)
    if across is not None:
        return {"replicate": dist.get_process_group_ranks(across), "shard": sharing}
    if handle.uses_sharded_strategy:
        return {"replicate": [dist.get_rank()], "shard": sharing}
    return {"replicate": sharing, "shard": [dist.get_rank()]}


def _check_order(flat: FlatParameter, index: int) -> None:
    """Raises UnknownPlacementError for a parameter that was not flattened in row-major order."""
    shape, strides = flat._shapes[index], flat._strides[index]
    if not torch.empty_strided(shape, strides, device="meta").is_contiguous():
        raise UnknownPlacementError(
            f"{flat._fqns[index]}: its elements lie in torch's flat parameter in the order of the "
            f"strides {tuple(strides)}, which for the shape {tuple(shape)} is not row-major; make "
            "the parameter contiguous before the module is wrapped"
        )


def _parallel_layout(flat: FlatParameter, index: int) -> Layout | None:
    """Returns a parameter's layout under tensor parallelism; None without tensor parallelism."""
    spec = flat._param_extensions[index]
    if spec is None:
        return None
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    name = flat._fqns[index]
    if not isinstance(spec, DTensorSpec):
        raise UnknownPlacementError(
            f"{name}: an extension of torch's FSDP, {type(spec).__name__}, has changed it before "
            "it was flattened, in an unknown way; use ckpt.sharding.fully_shard"
        )
    return dtensor.describe_parallel(tuple(flat._shapes[index]), spec, name)
