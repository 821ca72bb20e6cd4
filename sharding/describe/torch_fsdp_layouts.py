"""The layouts of the parameters in a flat parameter of torch's FSDP1, each over its ranks.

The axes of the mesh are those of `sharding.describe.flat_layouts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sharding.describe import dtensor
from sharding.describe.local_part import FlatSlice
from sharding.describe.rank_grid import Grids, check_divides_evenly
from sharding.errors import UnknownPlacementError
from sharding.layout import FlatShard, Layout, Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle

NOWHERE = Mesh.grid((), ())


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
    grid = dtensor.hybrid_grid(mesh) if mesh is not None and mesh.ndim == 2 else None
    grids = Grids(dist.get_rank(), _axes(unit, handle), grid)
    for index, (begin, end) in enumerate(spans):
        _check_order(flat, index)
        divided = handle.uses_sharded_strategy and end > begin
        cut = FlatShard(begin, stride) if divided else None
        layout = grids.layout(tuple(flat._shapes[index]), _divided_before(flat, index), cut)
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


def _divided_before(flat: FlatParameter, index: int) -> Layout | None:
    """Returns a parameter's layout under tensor parallelism; None without tensor parallelism."""
    spec = flat._param_extensions[index]
    if spec is None:
        return None
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    name = flat._fqns[index]
    if not isinstance(spec, DTensorSpec):
        raise UnknownPlacementError(
            f"{name}: an extension of torch's FSDP, {type(spec).__name__}, has changed it before "
            "it was flattened, in an unknown way; use ckpt.sharding.fully_shard"
        )
    local = torch.empty(flat._shapes[index], device="meta")
    like = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    _, layout = dtensor.describe(like, name, NOWHERE)
    check_divides_evenly(layout, name)
    return layout
