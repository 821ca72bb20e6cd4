import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.arguments import memory_budget
from ckpt.converting.layouts import PlacementRule, TargetLayouts, parse_mesh
from ckpt.display import size
from ckpt.opening.sources import open_source
from ckpt.plan.load_plan import LoadItem, LoadPolicy, RankReads, plan_load, rank_reads
from ckpt.plan.read_plan import BoxCopies
from ckpt.stores.local_store import LocalStore
from ckpt.transfer.read import ReadPolicy, read_requests
from sharding.layout import Mesh
from tools.exit_codes import ExitCode

SHAPES = {"a.w": (96, 640), "a.b": (640,), "n": (), "e.w": (7, 3, 50), "e.empty": (0, 4)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of one process."""
    folder = tmp_path_factory.mktemp("plan") / "step-1"
    torch.manual_seed(0)
    ckpt.save(folder, {name: torch.randn(shape) for name, shape in SHAPES.items()})
    return str(folder)


class Counting(LocalStore):
    """A folder that counts the reads of ranges, and their bytes."""

    requests = nbytes = 0

    def read_into(self, name, offset, *targets):
        self.requests += 1
        self.nbytes += sum(target.nbytes for target in targets)
        super().read_into(name, offset, *targets)


def read_by(url: str, target: TargetLayouts, rank: int) -> RankReads:
    """Reads a rank's part, in the place of `rank_reads`, and counts what was read."""
    world = Mesh.grid(("world",), (target.mesh.size,))
    budget = memory_budget()
    with open_source(url) as source, Counting(url) as store:
        catalog = source.catalog
        items = [
            LoadItem(name, name, number, layout, layout.local_shape(rank), True)
            for number, (name, record) in enumerate(catalog.tensors.items())
            for layout in [target.of(name, record.shape)]
        ]
        plan = plan_load(items, catalog, world, rank, LoadPolicy(budget // 2))
        sizes = [
            sum(piece.box.numel for piece in item.layout.pieces(rank))
            * catalog.tensors[item.name].dtype.itemsize
            for item in items
        ]
        memory = [memoryview(bytearray(nbytes)) for nbytes in sizes]
        policy = ReadPolicy(1, ReadPolicy.within(budget // 2, store, world.size).limits)
        read_requests(store, list(plan.requests), memory, policy=policy)
        files = {request.extent.file for request in plan.requests}
        tensors = sum(nbytes > 0 for nbytes in sizes)
        return RankReads(rank, tensors, sum(sizes), store.nbytes, store.requests, len(files))


PLACEMENTS = st.sampled_from(["replicate", "shard(0)"])


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    last=PLACEMENTS,
    wide=st.sampled_from(["replicate", "shard(0)", "shard(1)"]),
    data=st.data(),
)
def test_a_rank_reads_what_its_plan_says(saved, sizes, last, wide, data):
    names = ",".join(f"x{axis}={size}" for axis, size in enumerate(sizes))
    first = "replicate," * (len(sizes) - 1)
    rules = [PlacementRule.parse(first + last), PlacementRule.parse(f"*.w={first}{wide}")]
    world_size = torch.Size(sizes).numel()
    target = TargetLayouts(parse_mesh(names, world_size), rules)
    rank = data.draw(st.integers(0, world_size - 1))
    with open_source(saved) as source:
        budget = memory_budget()
        limits = ReadPolicy.within(budget // 2, source.store, world_size).limits
        planned = rank_reads(
            source.catalog,
            target.with_cache(),
            Mesh.grid(("world",), (world_size,)),
            rank,
            LoadPolicy(budget // 2),
            limits,
            BoxCopies(),
        )
    assert planned == read_by(saved, target, rank)


def test_ranks_without_replicas_hold_the_checkpoint_once(run, saved):
    ended = run("plan", saved, "--world-size", 5, "--json")
    told = json.loads(ended.out)
    assert [one["rank"] for one in told["ranks"]] == [0, 1, 2, 3, 4]
    scalar = 4  # replicated on each rank
    assert sum(one["wanted_bytes"] for one in told["ranks"]) == told["bytes"] + 4 * scalar


def test_the_command_tells_the_rank_that_reads_most(run, saved):
    ended = run("plan", saved, "--world-size", 2, "--bandwidth", "1MB")
    assert ended.code == ExitCode.FINE
    head, _, titles, first, second, _, last = ended.out.splitlines()
    assert head == f"{saved}: ckpt, 5 tensors, 253 kB, loaded by 2 ranks"
    assert titles.split() == ["rank", "tensors", "holds", "reads", "requests", "files", "seconds"]
    assert (first.split()[0], second.split()[0]) == ("0", "1")
    told = json.loads(run("plan", saved, "--world-size", 2, "--json").out)["ranks"]
    most = max(told, key=lambda one: one["read_bytes"])
    assert last == f"rank {most['rank']} reads most: {size(most['read_bytes'])}"


def test_of_a_large_world_three_ranks_are_planned_and_the_output_says_so(run, saved):
    ended = run("plan", saved, "--world-size", 1024)
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["0", "512", "1023"]
    assert lines[-1].endswith("of the 3 ranks above; --ranks all plans every rank")
    some = run("plan", saved, "--world-size", 1024, "--ranks", "3,1000-1001")
    assert [line.split()[0] for line in some.out.splitlines()[3:6]] == ["3", "1000", "1001"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "dp=2,tp=2"], "the mesh dp=2,tp=2 has 4 ranks, and the world size is 6"),
        (["--mesh", "dp:6"], "the mesh 'dp:6' is not a list of axes, as in dp=2,tp=4"),
        (["--mesh", "a=2,a=3"], "the mesh 'a=2,a=3' is not a list of axes"),
        (["--placements", "shard(1)"], "a.b, of shape [640]: "),
        (["--placements", "shard"], "'shard' in 'shard' is not a placement"),
        (
            ["--placements", "replicate,replicate"],
            "2 placements for '*', and the mesh is world=6: give",
        ),
        (["--placements", "nothing.*=replicate"], "nothing.*"),
        (["--ranks", "6"], "6 is not within ranks 0 to 5"),
        (["--ranks", "5-4"], "5-4 is not within ranks 0 to 5"),
        (["--ranks", "x"], "'x' is no rank and no range"),
    ],
)
def test_a_job_that_cannot_be_is_an_error_with_its_values(run, saved, arguments, said):
    ended = run("plan", saved, "--world-size", 6, *arguments)
    assert ended.code == ExitCode.USAGE
    assert said in ended.err


@pytest.mark.parametrize("ranks", ["0", "-1", "x", "1e3", "99999999999999"])
def test_a_world_size_is_a_whole_number_of_ranks(run, saved, ranks):
    ended = run("plan", saved, "--world-size", ranks)
    assert ended.code == ExitCode.USAGE
    assert "is no number of ranks" in ended.err or "expected one argument" in ended.err
