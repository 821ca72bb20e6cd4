"""The cost of one rank's load plan, counted without reading: bytes, requests and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt.plan.load_plan import LoadItem, LoadPlan, LoadPolicy, plan_load
from ckpt.plan.read_plan import BoxCopies, Limits, ReadRequest, byte_ranges_of, groups_of
from formats.catalog import Catalog
from sharding.layout import Layout, Mesh, Shape


@dataclass(frozen=True, slots=True)
class RankReads:
    """The reads of one rank in one load."""

    rank: int
    tensors: int
    """Tensors of which the rank holds elements."""
    wanted_bytes: int
    """Bytes of the checkpoint that the rank's elements take."""
    read_bytes: int
    """Bytes that the rank reads from files: rounded out to checksummed chunks, and less for a rank
    whose replicas send it elements."""
    requests: int
    """Reads of ranges. Each is one request to a server."""
    files: int


def rank_reads(
    catalog: Catalog,
    layout_of: Callable[[str, Shape], Layout],
    world: Mesh,
    rank: int,
    policy: LoadPolicy,
    limits: Limits,
    copies: BoxCopies,
) -> RankReads:
    """Returns the reads of a rank whose tensors have the checkpoint's names, shapes and dtypes.

    `layout_of` has the layout of each tensor on the ranks of `world`. The targets are contiguous,
    so their bytes are read directly into them. Raises as `plan_load` does.
    """
    held: list[LoadItem] = []
    wanted = 0
    for name, record in catalog.tensors.items():
        layout = layout_of(name, record.shape)
        held.append(LoadItem(name, name, len(held), layout, layout.local_shape(rank), True))
        wanted += sum(map(copies.numel, copies.pieces(layout, rank))) * record.dtype.itemsize
    plan = plan_load(held, catalog, world, rank, policy, copies)
    ranges = byte_ranges_of(_requests(plan), True, limits)
    groups = list(groups_of(ranges, limits))
    return RankReads(
        rank,
        sum(any(map(copies.numel, copies.pieces(item.layout, rank))) for item in held),
        wanted,
        sum(max(one.hi for one in group) - group[0].lo for group in groups),
        len(groups),
        len({one.file for one in ranges}),
    )


def _requests(plan: LoadPlan) -> Iterator[ReadRequest]:
    yield from plan.requests
    for round_ in plan.scatter_rounds:
        yield from round_.requests
