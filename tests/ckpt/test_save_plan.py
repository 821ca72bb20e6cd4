"""Who stores what: each element once, evenly, from layouts alone."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt.errors import StateError
from ckpt.plan.save_plan import SPLIT_BYTES, choose_layouts
from ckpt.state.state_spec import StateSpec, check_members, merge_specs
from formats.catalog import TensorRef, Tree
from formats.dtypes import BY_NAME
from formats.native.manifest import Manifest, StoredTensor, dump
from sharding.layout import (
    FlatShard,
    Layout,
    Mesh,
    Only,
    Placement,
    Replicate,
    Shard,
    Split,
    StridedShard,
)

F32 = BY_NAME["F32"]


def plain(shape: Sequence[int], world: int, dtype: str = "F32") -> StoredTensor:
    """A tensor that every rank of a world has."""
    return StoredTensor(tuple(shape), BY_NAME[dtype], Layout.replicated(shape, world))


def placed(shape: Sequence[int], mesh: Mesh, *placements: Placement) -> StoredTensor:
    return StoredTensor(tuple(shape), F32, Layout(tuple(shape), mesh, placements))


def described(tensors: Mapping[str, StoredTensor], **values: Any) -> StateSpec:
    tree: Any = {**{name: TensorRef(name) for name in tensors}, **values}
    return StateSpec(tensors, {}, tree)


def times_stored(tensor: StoredTensor) -> np.ndarray:
    """How often each element is stored."""
    times = np.zeros(tensor.shape, dtype=np.int64)
    for rank in tensor.layout.mesh.ranks():
        for piece in tensor.layout.pieces(rank):
            box = zip(piece.box.lo, piece.box.hi, strict=True)
            times[tuple(slice(lo, hi) for lo, hi in box)] += 1
    return times


def bytes_by_rank(stored: Mapping[str, StoredTensor], ranks: Sequence[int]) -> list[int]:
    """What each rank writes."""
    written = []
    for rank in ranks:
        spans = [(t.layout.span(rank), t.dtype.itemsize) for t in stored.values()]
        written.append(sum((hi - lo) * itemsize for (lo, hi), itemsize in spans))
    return written


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout over a few ranks."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    dims = st.integers(0, max(0, len(shape) - 1))
    kinds: list[st.SearchStrategy[Placement]] = [
        st.just(Replicate()),
        st.builds(FlatShard, st.integers(0, 9), st.integers(1, 99)),
    ]
    if shape:
        kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))]
    placements = tuple(draw(st.one_of(kinds)) for _ in sizes)
    names = tuple(f"axis{axis}" for axis in range(len(sizes)))
    ranks = draw(st.permutations(range(3, 3 + prod(sizes))))
    mesh = draw(
        st.sampled_from([Mesh.grid(names, sizes, 3), Mesh.of_ranks(names, tuple(sizes), ranks)])
    )
    try:
        return Layout(shape, mesh, placements)
    except ValueError:
        assume(False)
        raise


@given(
    found=st.lists(st.tuples(layouts(), st.sampled_from(["F32", "I8", "C128"])), max_size=6),
    split_bytes=st.sampled_from([1, 40, SPLIT_BYTES]),
)
def test_each_element_of_any_layout_is_stored_once(
    found: list[tuple[Layout, str]], split_bytes: int
) -> None:
    tensors = {
        str(i): StoredTensor(layout.shape, BY_NAME[dtype], layout)
        for i, (layout, dtype) in enumerate(found)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("ckpt.plan.save_plan"), "SPLIT_BYTES", split_bytes)
        stored = choose_layouts(tensors)
    assert list(stored) == list(tensors)
    for name, tensor in stored.items():
        assert (times_stored(tensor) == 1).all(), (name, str(tensor.layout))
        assert (tensor.shape, tensor.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert tensor.layout.mesh == tensors[name].layout.mesh
        for before, after in zip(
            tensors[name].layout.placements, tensor.layout.placements, strict=True
        ):
            assert after == before or (
                isinstance(before, Replicate) and isinstance(after, (Split, Only))
            )


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    world=st.integers(1, 9),
    split_bytes=st.sampled_from([200, 600, SPLIT_BYTES]),
)
def test_replicas_write_evenly_but_for_one_small_tensor(
    sizes: list[int], world: int, split_bytes: int
) -> None:
    tensors = {f"t{i}": plain((size,), world) for i, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("ckpt.plan.save_plan"), "SPLIT_BYTES", split_bytes)
        stored = choose_layouts(tensors)
    written = bytes_by_rank(stored, range(world))
    total = 4 * sum(sizes)
    assert sum(written) == total
    small = max((4 * size for size in sizes if 4 * size < split_bytes), default=0)
    rounding = 4 * sum(4 * size >= split_bytes for size in sizes)  # an element of each
    assert max(written) <= total / world + small + rounding


def transformer(world: int, width: int = 768, layers: int = 12) -> dict[str, StoredTensor]:
    """The parameters of a small language model and the two moments of AdamW, replicated."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, width), "wpe": (1024, width)}
    for layer in range(layers):
        shapes |= {
            f"h.{layer}.{name}": shape
            for name, shape in {
                "ln_1.weight": (width,),
                "ln_1.bias": (width,),
                "attn.qkv.weight": (3 * width, width),
                "attn.qkv.bias": (3 * width,),
                "attn.out.weight": (width, width),
                "attn.out.bias": (width,),
                "ln_2.weight": (width,),
                "ln_2.bias": (width,),
                "mlp.up.weight": (4 * width, width),
                "mlp.up.bias": (4 * width,),
                "mlp.down.weight": (width, 4 * width),
                "mlp.down.bias": (width,),
            }.items()
        }
    return {
        f"{part}.{name}": plain(shape, world)
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 3, 8, 64, 512])
def test_a_replicated_model_is_written_evenly(world: int) -> None:
    stored = choose_layouts(transformer(world))
    written = bytes_by_rank(stored, range(world))
    assert max(written) <= 1.05 * sum(written) / world
    assert min(written) >= 0.9 * sum(written) / world


def test_a_model_sharded_within_replicas_is_written_evenly() -> None:
    mesh = Mesh.grid(("replicate", "shard"), (4, 8))
    tensors = {
        name: placed(tensor.shape, mesh, Replicate(), Shard(0))
        for name, tensor in transformer(32).items()
    }
    written = bytes_by_rank(choose_layouts(tensors), range(32))
    assert max(written) <= 1.05 * sum(written) / 32


def test_only_the_axes_that_replicate_share_the_work() -> None:
    mesh = Mesh.grid(("a", "b", "c"), (2, 3, 2))
    large = placed((1200, 1000), mesh, Replicate(), Shard(0), Replicate())
    small = placed((12, 5), mesh, Replicate(), Shard(0), Replicate())
    stored = choose_layouts({"large": large, "small": small})
    assert stored["large"].layout.placements == (Split(), Shard(0), Split())
    assert stored["small"].layout.placements == (Only(0), Shard(0), Only(0))


def test_small_neighbours_are_stored_by_one_rank() -> None:
    tensors = {f"bn.{i}.{part}": plain((64,), 4) for i in range(40) for part in ("mean", "var")}
    stored = choose_layouts(tensors)
    owners = [stored[name].layout.placements[0] for name in tensors]
    assert owners == sorted(owners, key=lambda only: only.index)  # type: ignore[union-attr]
    assert owners[:2] == [Only(0)] * 2
    assert [owners.count(Only(i)) for i in range(4)] == [20] * 4


def test_a_tensor_alone_or_cut_already_is_stored_as_it_lies() -> None:
    mesh = Mesh.grid(("dp",), (4,))
    tensors = {
        "alone": plain((1000, 1000), 1),
        "cut": placed((1000, 1000), mesh, Shard(1)),
        "flat": placed((10, 10), mesh, FlatShard(7, 30)),
    }
    assert choose_layouts(tensors) == tensors


def manifest_bytes(world: int, tensors: Mapping[str, StoredTensor]) -> bytes:
    """The manifest of a state but for its files, which are as many as ranks."""
    tree: Any = {name: TensorRef(name) for name in tensors}
    return dump(Manifest(choose_layouts(tensors), {}, tree, ()))


def test_the_manifest_does_not_grow_with_the_world() -> None:
    sizes, kinds = {}, {}
    for world in (8, 4096, 1 << 20):
        tensors = transformer(world)
        stored = choose_layouts(tensors)
        sizes[world] = len(manifest_bytes(world, tensors))
        kinds[world] = len({(t.layout.mesh, t.layout.placements) for t in stored.values()})
    small = sum(len(tensor.shape) == 1 for tensor in transformer(8).values())
    assert kinds[8] <= 8 + 1  # `only` for each rank, and `split`
    assert max(kinds.values()) <= small + 1
    # A layout of its own for each small tensor is the most there can be, and then no more.
    assert sizes[4096] - sizes[8] <= small * len('[0,["only(4096)"]],' + "99")
    assert sizes[1 << 20] - sizes[4096] <= (small + 10) * len("000")


def test_the_manifest_of_a_sharded_model_is_the_same_for_every_world_but_for_digits() -> None:
    sizes = {}
    for world in (8, 4096):
        mesh = Mesh.grid(("dp",), (world,))
        tensors = {
            name: placed(tensor.shape, mesh, Shard(0))
            for name, tensor in transformer(world).items()
        }
        sizes[world] = len(manifest_bytes(world, tensors))
    assert sizes[4096] - sizes[8] == len("4096") - len("8")


def calls(world: int) -> int:
    """How many functions are called to plan a save."""
    tensors, count = transformer(world), 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        choose_layouts(tensors)
    finally:
        sys.setprofile(before)
    return count


def test_planning_is_no_more_work_in_a_larger_world() -> None:
    assert max(calls(4096), calls(1 << 20)) <= 1.01 * calls(8)


SCRIPT = """
import sys
from formats.dtypes import BY_NAME
from formats.native.manifest import Manifest, StoredTensor, dump
from formats.catalog import TensorRef, Tree
from ckpt.plan.save_plan import choose_layouts
from sharding.layout import Layout, Mesh, Replicate, Shard
import hashlib
tensors = {}
for i in range(50):
    for j, mesh in enumerate((Mesh.grid(("a", "b"), (3, 2)), Mesh.grid(("world",), (6,)))):
        shape = (i * 7 + 1, 3) if i % 5 else (40_000, i + 3)
        placements = (Replicate(), Shard(0)) if j == 0 else (Replicate(),)
        layout = Layout(shape, mesh, placements)
        tensors[f"t{i}.{j}"] = StoredTensor(shape, BY_NAME["F32"], layout)
tree = {name: TensorRef(name) for name in tensors}
print(hashlib.sha256(dump(Manifest(choose_layouts(tensors), {}, tree, ()))).hexdigest())
"""


def test_every_process_comes_to_the_same_plan() -> None:
    plans = set()
    for seed in ("0", "1"):  # sets and hashes come in another order in each process
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        finished = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        plans.add(finished.stdout)
    assert len(plans) == 1


# Ranks that hold different things.

WORLD = Mesh.grid(("world",), (4,))


def held_by(tensor: StoredTensor) -> list[int]:
    return sorted(tensor.layout.mesh.ranks())


def test_stages_of_a_pipeline_become_one_state() -> None:
    first = described({"embed": plain((9,), 4), "shared": plain((5,), 4)}, stage=0, lr=0.1)
    second = described({"head": plain((7,), 4), "shared": plain((5,), 4)}, stage=1, loss="mse")
    whole = merge_specs([([0, 1], first), ([2, 3], second)], WORLD)
    assert {name: held_by(tensor) for name, tensor in whole.tensors.items()} == {
        "embed": [0, 1],
        "shared": [0, 1, 2, 3],
        "head": [2, 3],
    }
    assert list(whole.tree) == ["embed", "shared", "stage", "lr", "head", "loss"]  # type: ignore[arg-type]
    assert whole.tree["stage"] == 0  # type: ignore[index, call-overload]
    for tensor in choose_layouts(whole.tensors).values():
        assert (times_stored(tensor) == 1).all()


@given(holders=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=5))
def test_plain_tensors_are_stored_once_by_ranks_that_have_them(holders: list[set[int]]) -> None:
    world = Mesh.grid(("world",), (6,))
    kinds: dict[tuple[str, ...], list[int]] = {}
    for rank in range(6):
        names = tuple(f"t{i}" for i, ranks in enumerate(holders) if rank in ranks)
        kinds.setdefault(names, []).append(rank)
    summaries = [
        (ranks, described({name: plain((11,), 6) for name in names}))
        for names, ranks in kinds.items()
    ]
    whole = merge_specs(summaries, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("ckpt.plan.save_plan"), "SPLIT_BYTES", 1)
        stored = choose_layouts(whole.tensors)
    for i, ranks in enumerate(holders):
        assert set(held_by(whole.tensors[f"t{i}"])) == ranks
        assert (times_stored(stored[f"t{i}"]) == 1).all()


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((3, 1), (2, 0))])
def test_shards_on_meshes_of_their_own_are_replicas_of_one_another(
    groups: tuple[tuple[int, int], ...],
) -> None:
    summaries = []
    for ranks in groups:
        mesh = Mesh.of_ranks(("tp",), (2,), ranks)
        summaries.append((sorted(ranks), described({"w": placed((8, 3), mesh, Shard(0))})))
    tensor = merge_specs(summaries, WORLD).tensors["w"]
    assert tensor.layout.placements == (Replicate(), Shard(0))
    assert tensor.layout.mesh.sizes == (2, 2)
    for ranks in groups:
        for index, rank in enumerate(ranks):
            (piece,) = tensor.layout.pieces(rank)
            assert (piece.box.lo[0], piece.box.hi[0]) == (4 * index, 4 * index + 4)
    (stored,) = choose_layouts({"w": tensor}).values()
    assert (times_stored(stored) == 1).all()


def test_a_shard_on_part_of_the_ranks_keeps_its_layout() -> None:
    mesh = Mesh.grid(("tp",), (2,), 2)
    tensor = placed((8, 3), mesh, Shard(0))
    whole = merge_specs([([0, 1], described({})), ([2, 3], described({"w": tensor}))], WORLD)
    assert whole.tensors["w"] == tensor


PAIR = Mesh.grid(("tp",), (2,))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (plain((2,), 4), plain((3,), 4), r"rank 0 has float32 \[2\].*, rank 2 has float32 \[3\]"),
        (plain((2,), 4), plain((2,), 4, "F16"), r"rank 0 has float32.*rank 2 has float16"),
        (plain((8,), 4), placed((8,), PAIR, Shard(0)), r"world:4=R.*tp:2=S\(0\)"),
        (
            placed((8, 8), PAIR, Shard(0)),
            placed((8, 8), Mesh.grid(("tp",), (2,), 2), Shard(1)),
            r"S\(0\).*S\(1\)",
        ),
    ],
    ids=["shape", "dtype", "sharding", "placement"],
)
def test_descriptions_that_contradict_each_other_are_named_with_their_ranks(
    first: StoredTensor, second: StoredTensor, message: str
) -> None:
    with pytest.raises(StateError, match=f"model.w: .*{message}.*different names"):
        merge_specs(
            [([0, 1], described({"model.w": first})), ([2, 3], described({"model.w": second}))],
            WORLD,
        )


@pytest.mark.parametrize("axis", ["dp", "world"])
def test_ranks_that_lack_their_part_of_a_shard_are_named(axis: str) -> None:
    tensor = placed((8,), Mesh.grid((axis,), (4,)), Shard(0))
    with pytest.raises(StateError, match=r"w: rank 0 has .*\[0, 1, 2, 3\], of which \[2, 3\] do"):
        merge_specs([([0, 1], described({"w": tensor})), ([2, 3], described({}))], WORLD)


@given(
    st.sampled_from([(1, 4), (2, 2), (4, 1)]),
    st.integers(1, 5),
    st.integers(0, 12),
    st.sets(st.integers(0, 3), max_size=3),
)
def test_a_rank_may_lack_a_shard_only_if_there_is_nothing_in_it(
    sizes: tuple[int, int], stride: int, offset: int, lacking: set[int]
) -> None:
    assume(offset + 3 <= sizes[1] * stride)
    mesh = Mesh.grid(("replicate", "shard"), sizes)
    tensor = placed((3,), mesh, Replicate(), FlatShard(offset, stride))
    holders = {rank for rank in range(4) if tensor.layout.pieces(rank)}
    having = [rank for rank in range(4) if rank not in lacking]
    summaries = [(having, described({"w": tensor})), (sorted(lacking), described({}))]
    if lacking & holders:
        absent = re.escape(str(sorted(lacking & holders)))
        with pytest.raises(StateError, match=f"of which {absent} do not have it"):
            merge_specs(summaries, WORLD)
        return
    whole = merge_specs(summaries, WORLD).tensors
    assert whole == {"w": tensor}
    (stored,) = choose_layouts(whole).values()
    assert (times_stored(stored) == 1).all()
    assert all(not stored.layout.pieces(rank) for rank in lacking)


def test_meshes_that_overlap_are_an_error_that_names_both() -> None:
    meshes = [Mesh.of_ranks(("tp",), (2,), ranks) for ranks in ((0, 1), (1, 2))]
    summaries = [
        ([0], described({"w": placed((8,), meshes[0], Shard(0))})),
        ([1], described({"w": placed((8,), meshes[0], Shard(0))})),
        ([1, 2], described({"w": placed((8,), meshes[1], Shard(0))})),
    ]
    with pytest.raises(StateError, match=r"w: .*\[0, 1\] and over \[1, 2\], which overlap"):
        merge_specs(summaries, WORLD)


def test_ties_that_differ_between_ranks_are_named() -> None:
    tensors = {"a": plain((2,), 4), "b": plain((2,), 4)}
    tied_to_a = StateSpec(tensors, {"c": "a"}, None)
    tied_to_b = StateSpec(tensors, {"c": "b"}, None)
    with pytest.raises(StateError, match="c: tied to a on one rank, to b on rank 2"):
        merge_specs([([0, 1], tied_to_a), ([2, 3], tied_to_b)], WORLD)
    loose = StateSpec({**tensors, "c": plain((2,), 4)}, {}, None)
    with pytest.raises(StateError, match="c: tied to a on some ranks only"):
        merge_specs([([0, 1], tied_to_a), ([2, 3], loose)], WORLD)
    assert merge_specs([([0], tied_to_a), ([1, 2, 3], tied_to_a)], WORLD).aliases == {"c": "a"}


def test_a_contradiction_names_the_first_two_ranks_that_are_in_it() -> None:
    trees: list[Tree] = [{"a": 1}, {"b": None}, {"b": {"x": 1}}, {"b": 2}]
    described = [([2 * rank, 2 * rank + 1], StateSpec({}, {}, t)) for rank, t in enumerate(trees)]
    with pytest.raises(StateError, match=r"b: a dict of 1 on rank 4, 2 on rank 6; give values"):
        merge_specs(described, WORLD)
    keys: list[Tree] = [{"d": {1: 0}}, {"d": {"1": 0}}]
    with pytest.raises(StateError, match=r"two entries of the ranks' states.* the name 'd\.1'"):
        merge_specs([([rank], StateSpec({}, {}, tree)) for rank, tree in enumerate(keys)], WORLD)


def test_ranks_outside_the_group_that_saves_are_named() -> None:
    members = Mesh.of_ranks(("world",), (2,), (1, 3))
    inside = placed((8,), Mesh.of_ranks(("tp",), (2,), (3, 1)), Shard(0))
    check_members({"w": inside}, members)
    outside = placed((8,), Mesh.grid(("tp",), (4,)), Shard(0))
    with pytest.raises(StateError, match=r"v: .*\[0, 1, 2, 3\], of which \[0, 2\] are not in"):
        check_members({"w": inside, "v": outside}, members)
