"""Ranks that read the same memory divide the checksums: each damage is found by one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt.opening.sources import Source, open_source
from ckpt.plan.load_plan import NOTHING_SHARED, CheckShare, LoadItem, check_share
from ckpt.plan.read_plan import requests_for
from ckpt.transfer.read import ReadPolicy, bytes_of, read_requests
from formats.errors import CorruptError
from sharding.layout import Layout, Mesh, Placement, Replicate, Shard, StridedShard
from tests.ckpt.test_reshard_in_process import save

WORLD = Mesh.grid(("world",), (4,))
GRID = Mesh.grid(("dp", "tp"), (2, 2))
SHAPES = ((50, 4100), (32, 4100), (3, 17, 2100), (1, 90_000), (70_000, 2))
"""Rows shorter than a chunk of 64 KiB and longer ones, and with a last chunk that is shorter."""
WAYS: dict[str, tuple[Mesh, tuple[Placement, ...]]] = {
    "R": (WORLD, (Replicate(),)),
    "S0": (WORLD, (Shard(0),)),
    "S1": (WORLD, (Shard(1),)),
    "S0,S1": (GRID, (Shard(0), Shard(1))),
    "R,S1": (GRID, (Replicate(), Shard(1))),
    "S1,S1": (GRID, (Shard(1), Shard(1))),
    "SS1,S1": (GRID, (StridedShard(1, 2), Shard(1))),
}


def layouts(way: str) -> dict[str, Layout]:
    mesh, placements = WAYS[way]
    return {str(shape): Layout(shape, mesh, placements) for shape in SHAPES}


def shares(source: Source, wanted: dict[str, Layout]) -> list[CheckShare]:
    """The share of each rank."""
    items = [LoadItem(name, name, 0, one, one.shape, True) for name, one in wanted.items()]
    return [check_share("memory", items, source.catalog, WORLD, rank) for rank in range(4)]


def finds(source: Source, name: str, layout: Layout, rank: int, share: CheckShare) -> bool:
    """Whether a rank that reads its part of a tensor, with this share, finds damage."""
    record = source.catalog.tensors[name]
    lo, hi = layout.span(rank)
    array = np.zeros(hi - lo, dtype=np.uint32)
    policy = replace(ReadPolicy.within(1 << 24, source.store), share=share)
    requests = requests_for(record, layout.pieces(rank))
    try:
        read_requests(source.store, requests, [bytes_of(array)], policy=policy)
    except CorruptError:
        return True
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("loading", WAYS)
@pytest.mark.parametrize("saving", WAYS)
def test_damage_in_any_chunk_is_found_by_a_rank_that_shares_the_checks(
    tmp_path: Path, saving: str, loading: str
) -> None:
    random = np.random.default_rng(sum(map(ord, saving + loading)))
    save(tmp_path, 4, layouts(saving))
    wanted = layouts(loading)
    with open_source(str(tmp_path)) as source:
        divided = shares(source, wanted)
        assert len({share.fingerprint for share in divided}) == 1
        for name, layout in wanted.items():
            extents = {one.extent[:3] for one in source.catalog.tensors[name].pieces}
            file, offset, nbytes = sorted(extents)[random.integers(len(extents))]
            ends = {0, nbytes - 1}  # both ends, and one place between
            for at in sorted({*ends, int(random.integers(nbytes))}):
                flip(tmp_path / file, offset + at)
                assert any(finds(source, name, layout, rank, divided[rank]) for rank in range(4))
                flip(tmp_path / file, offset + at)
            assert not any(finds(source, name, layout, rank, divided[rank]) for rank in range(4))


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1]))


@pytest.mark.parametrize("loading", ["R", "S1", "R,S1"])
def test_a_chunk_that_all_ranks_read_is_compared_by_one(tmp_path: Path, loading: str) -> None:
    save(tmp_path, 4, layouts("S0"))
    with open_source(str(tmp_path)) as source:
        name, layout = next(iter(layouts(loading).items()))
        extent = next(iter(source.catalog.tensors[name].pieces)).extent
        finders = []
        for chunk in (0, 2):  # of three, and a last one that is shorter
            at = extent.offset + chunk * (64 << 10) + 5
            flip(tmp_path / extent.file, at)
            everyone = enumerate(shares(source, layouts(loading)))
            finders.append(
                [rank for rank, one in everyone if finds(source, name, layout, rank, one)]
            )
            flip(tmp_path / extent.file, at)
        assert finders == [[1], [3]]


def test_tensors_that_not_all_ranks_read_whole_are_compared_by_each(tmp_path: Path) -> None:
    save(tmp_path, 4, layouts("S1"))
    with open_source(str(tmp_path)) as source:
        assert shares(source, layouts("S0"))[0] is NOTHING_SHARED
        assert shares(source, layouts("S1"))[0] is NOTHING_SHARED  # the checkpoint cuts the columns
        narrow = {"(50, 4100)": Layout((50, 4100), GRID, (Shard(0), Shard(1)))}
        assert shares(source, narrow)[0] is NOTHING_SHARED
        assert shares(source, layouts("R"))[0].periods.keys() == layouts("R").keys()


def test_ranks_that_divide_other_tensors_have_other_fingerprints(tmp_path: Path) -> None:
    save(tmp_path, 4, layouts("S0"))
    with open_source(str(tmp_path)) as source:
        columns, replicas = layouts("S1"), layouts("R")
        some = dict(list(columns.items())[:2])
        prints = [shares(source, one)[0].fingerprint for one in (columns, replicas, some)]
        assert len({*prints, 0}) == 4
