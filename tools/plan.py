"""`ckpt plan`: the reads of each rank of a job that would load a checkpoint. Reads no tensor."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ckpt.display import count, size
from sharding.errors import ArgumentError
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_storage_options, mapping, ranks_in
from tools.text import columns, json_text, place, size_of

if TYPE_CHECKING:
    from ckpt.converting.layouts import TargetLayouts
    from ckpt.opening.sources import Source
    from ckpt.plan.load_plan import RankReads

HELP = Help(
    summary="show what each rank of a job would read from a checkpoint",
    description="""\
Shows the bytes, requests and files that each rank of a job would read from a checkpoint, before the
job starts. No tensor is read.""",
    examples=(
        (
            "ckpt plan runs/gpt/step-100 --world-size 64",
            "the reads of 64 ranks that divide dimension 0",
        ),
        (
            "ckpt plan step-100 --world-size 8 --mesh dp=2,tp=4 --placements 'replicate,shard(0)'",
            "the reads of a mesh of two axes",
        ),
    ),
    codes=OF_A_READER,
)
SHOWN_RANKS = 64
"""Of a larger world, the first, the middle and the last rank are planned."""


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoint, and the job that would load it."""

    url: str
    world_size: int
    mesh: str | None
    placements: list[str] | None
    ranks: str | None
    bandwidth: int | None
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="CHECKPOINT", help="a path or URL")
    add("--world-size", type=ranks_in, required=True, metavar="N", help="the job's ranks")
    add(
        "--mesh",
        metavar="AXES",
        help="the job's mesh (example: dp=2,tp=4); by default one axis over all ranks",
    )
    add(
        "--placements",
        action="append",
        metavar="[NAME=]P,...",
        help="the placement along each axis, replicate or shard(DIM), of all tensors or of those "
        "whose names fit a pattern with * and ?; repeatable, the last that fits decides; by "
        "default shard(0) along the last axis",
    )
    add(
        "--ranks",
        metavar="LIST",
        help=f"the ranks to plan, as in 0,4-7, or all; by default all of up to {SHOWN_RANKS}, and "
        "three of more",
    )
    add(
        "--bandwidth",
        type=size_of,
        metavar="SIZE",
        help="bytes that a rank reads in a second (example: 1GB), for the seconds of a load",
    )
    add("--json", dest="as_json", action="store_true", help="the plan as JSON")
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints a line for each planned rank, and the rank that reads most."""
    from ckpt.converting.layouts import PlacementRule, TargetLayouts, parse_mesh
    from ckpt.opening.sources import open_source
    from ckpt.state.patterns import check_names_some, matches

    rules = [PlacementRule.parse(text) for text in options.placements or ()]
    target = TargetLayouts(parse_mesh(options.mesh, options.world_size), rules)
    ranks = _ranks(options.ranks, options.world_size)
    with open_source(options.url, mapping(options.storage_options)) as source:
        for rule in rules:
            check_names_some(rule.pattern, list(source.catalog.tensors), source.url, matches)
        found = _plan(source, target, ranks)
        if options.as_json:
            print(json_text(_describe(options, source, found)))
        else:
            for line in _lines(options, source, found):
                print(line)
    return ExitCode.FINE


def _plan(source: Source, target: TargetLayouts, ranks: Sequence[int]) -> list[RankReads]:
    """Returns the reads of these ranks, by the policy that a load has by default."""
    from ckpt.arguments import memory_budget
    from ckpt.plan.load_plan import LoadPolicy, rank_reads
    from ckpt.plan.read_plan import BoxCopies
    from ckpt.transfer.read import ReadPolicy
    from formats.storage import LOCAL_READ_BYTES, REMOTE_READ_BYTES
    from sharding.layout import Mesh

    budget, world = memory_budget(), Mesh.grid(("world",), (target.mesh.size,))
    is_far = source.store.read_bytes > LOCAL_READ_BYTES
    exchanges = is_far and world.size > 1
    scatter = min(REMOTE_READ_BYTES, budget // 3) if exchanges else 0
    policy = LoadPolicy(budget // 2, exchanges, scatter)
    limits = ReadPolicy.within(budget // 2, source.store, world.size).limits
    layout_of, copies = target.with_cache(), BoxCopies()
    return [
        rank_reads(source.catalog, layout_of, world, rank, policy, limits, copies) for rank in ranks
    ]


def _lines(options: Options, source: Source, found: Sequence[RankReads]) -> list[str]:
    tensors = source.catalog.tensors
    rows = [["rank", "tensors", "holds", "reads", "requests", "files"]]
    for reads in found:
        wanted, read = size(reads.wanted_bytes), size(reads.read_bytes)
        rows.append(
            [
                str(reads.rank),
                f"{reads.tensors:,}",
                wanted,
                read,
                f"{reads.requests:,}",
                f"{reads.files:,}",
            ]
        )
    if options.bandwidth:
        rows[0].append("seconds")
        for row, reads in zip(rows[1:], found, strict=True):
            row.append(f"{reads.read_bytes / options.bandwidth:.3g}")
    slowest = max(found, key=lambda reads: reads.read_bytes)
    last = f"rank {slowest.rank} reads most: {size(slowest.read_bytes)}"
    if len(found) < options.world_size:
        last += f" of the {count(len(found), 'rank')} above; --ranks all plans every rank"
    head = f"{place(options.url)}: {source.catalog.format}, {count(len(tensors), 'tensor')}"
    whole = size(source.catalog.nbytes)
    return [
        f"{head}, {whole}, loaded by {count(options.world_size, 'rank')}",
        "",
        *columns(rows, right=range(len(rows[0]))),
        "",
        last,
    ]


def _describe(options: Options, source: Source, found: Sequence[RankReads]) -> dict[str, object]:
    ranks = [asdict(rank) for rank in found]
    if options.bandwidth:
        for rank in ranks:
            rank["seconds"] = rank["read_bytes"] / options.bandwidth
    return {
        "url": options.url,
        "format": source.catalog.format,
        "tensors": len(source.catalog.tensors),
        "bytes": source.catalog.nbytes,
        "world_size": options.world_size,
        "ranks": ranks,
    }


def _ranks(text: str | None, world_size: int) -> list[int]:
    """Returns the ranks of a list such as `0,4-7`. Raises ArgumentError for another text.

    >>> _ranks("0,4-6", 8), _ranks(None, 3), _ranks(None, 1000)
    ([0, 4, 5, 6], [0, 1, 2], [0, 500, 999])
    """
    if text == "all" or (text is None and world_size <= SHOWN_RANKS):
        return list(range(world_size))
    if text is None:
        return [0, world_size // 2, world_size - 1]
    ranks: set[int] = set()
    for part in text.split(","):
        lo, dash, hi = part.strip().partition("-")
        last = hi if dash else lo
        if not (lo.isdecimal() and last.isdecimal() and lo.isascii() and last.isascii()):
            raise ArgumentError(
                f"--ranks {text}: {part!r} is no rank and no range; give them as in 0,4-7"
            )
        if not int(lo) <= int(last) < world_size:
            raise ArgumentError(
                f"--ranks {text}: {part.strip()} is not within ranks 0 to {world_size - 1}"
            )
        ranks.update(range(int(lo), int(last) + 1))
    return sorted(ranks)
