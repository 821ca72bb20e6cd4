"""What is said of modules of torch's FSDP1: pieces that tile what torch itself gathers."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sharding.describe.describing import describe, describe_module, flat_members, load_rest, part_of
from sharding.describe.torch_fsdp import parts_by_name
from sharding.layout import FlatShard, Mesh
from sharding.layout import Shard as RowShard
from tests.sharding.pieces import Held, Parameters, held, whole

CPU = torch.device("cpu")


class Block(nn.Module):
    """A unit inside, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)
        self.register_buffer("scale", torch.linspace(0.25, 1.0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x * self.scale))


class Network(nn.Module):
    """Two blocks and a frozen one, a tied head, a layer that FSDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([Block(), Block(), Block().requires_grad_(False)])
        self.ignored = nn.Linear(3, 3)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ignored(x))


def wrapped(original: bool, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    """A network, wrapped block by block."""
    torch.manual_seed(0)
    model = Network()
    mesh = None
    if "HYBRID" in strategy:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=CPU,
        device_mesh=mesh,
        ignored_modules=[model.ignored],
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        **arguments,
    )


def step(model: nn.Module) -> None:
    """Change every parameter that is trained."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full_state_dict(model: nn.Module) -> dict[str, np.ndarray]:
    """What torch gathers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def described(original: bool, strategy: str, steps: int) -> tuple[Held, dict[str, np.ndarray]]:
    model = wrapped(original, strategy)
    for _ in range(steps):
        step(model)
    return held(describe_module(model)), full_state_dict(model)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("FULL_SHARD", 1),
        ("FULL_SHARD", 2),
        ("SHARD_GRAD_OP", 3),
        ("NO_SHARD", 2),
        ("HYBRID_SHARD", 4),
        ("_HYBRID_SHARD_ZERO2", 4),
    ],
)
def test_the_pieces_of_all_ranks_are_what_torch_gathers(
    clusters: Callable[[int], Any], original: bool, strategy: str, ranks: int, steps: int
) -> None:
    found = clusters(ranks).run(described, original, strategy, steps)
    gathered = found[0][1]
    torch.manual_seed(0)
    assert sorted(gathered) == sorted(Network().state_dict())
    for tensors, _ in found:
        assert sorted(tensors) == sorted(gathered)
    for name, tensor in gathered.items():
        np.testing.assert_array_equal(whole(name, [tensors for tensors, _ in found]), tensor)


def described_alone(original: bool, strategy: str) -> int:
    model = wrapped(original, strategy)
    step(model)
    return len(describe_module(model)) if dist.get_rank() == 0 else 0


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("original", [False, True])
def test_nothing_is_gathered_or_said_to_other_ranks(
    clusters: Callable[[int], Any], original: bool, strategy: str
) -> None:
    names = len(Network().state_dict())
    assert clusters(2).run(described_alone, original, strategy) == [names, 0]


def held_of_shapes(shapes: list[tuple[int, ...]], original: bool) -> Held:
    model = FullyShardedDataParallel(Parameters(shapes), device_id=CPU, use_orig_params=original)
    return held(describe_module(model))


SHAPES = st.lists(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


@pytest.mark.parametrize("original", [False, True])
@settings(max_examples=10)
@given(SHAPES)
def test_the_pieces_tile_parameters_of_any_shape_with_whatever_padding_is_between(
    clusters: Callable[[int], Any], original: bool, shapes: list[tuple[int, ...]]
) -> None:
    found = clusters(3).run(held_of_shapes, shapes, original)
    for name, parameter in Parameters(shapes).named_parameters():
        np.testing.assert_array_equal(whole(name, found), parameter.detach().numpy())


def members_of(original: bool) -> list[tuple[tuple[tuple[str, ...], ...], bool, bool, int]]:
    model = wrapped(original)
    seen = {id(parameter) for parameter in model.parameters()}
    members = list(flat_members(model))
    assert all(id(member.parameter) in seen for member in members)
    for member in members:
        parts, first = dict(member.parts()), member.parameter.data_ptr()
        for tied, own in zip(member.names, member.slices, strict=True):
            local = parts[tied[0]].local
            assert local.numel() == 0 or local.data_ptr() == first + 4 * own.lo
    return [(m.names, m.is_original, m.is_idle, m.parameter.numel()) for m in members]


def test_an_optimizer_sees_flat_parameters_with_all_names_of_what_is_in_them(
    clusters: Callable[[int], Any],
) -> None:
    for found in clusters(2).run(members_of, False):
        assert found[0][0] == (
            ("embedding.weight", "head.weight"),
            ("head.bias",),
        )
        assert all(not original and not idle for _, original, idle, _ in found)
        assert len(found) == 4


def test_an_optimizer_sees_original_parameters_some_of_them_empty_and_idle(
    clusters: Callable[[int], Any],
) -> None:
    ranks = clusters(2).run(members_of, True)
    for found in ranks:
        assert found[0][0] == (("embedding.weight", "head.weight"),)
        assert all(original and idle == (numel == 0) for _, original, idle, numel in found)
    assert any(idle for _, _, idle, _ in ranks[0])
    assert not any(one[2] and other[2] for one, other in zip(*ranks, strict=True))


def over_tensor_parallelism(original: bool) -> tuple[Held, dict[str, np.ndarray]]:
    """Two ranks of each of two data-parallel groups divide the first block."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
    plain = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = FullyShardedDataParallel(
        model, device_mesh=mesh["data"], device_id=CPU, use_orig_params=original
    )
    return held(describe_module(model)), plain


@pytest.mark.parametrize("original", [False, True])
def test_parts_of_what_tensor_parallelism_divided_are_parts_of_the_whole(
    clusters: Callable[[int], Any], original: bool
) -> None:
    found = clusters(4).run(over_tensor_parallelism, original)
    for name, tensor in found[0][1].items():
        np.testing.assert_array_equal(whole(name, [tensors for tensors, _ in found]), tensor)


# What cannot be described.


def transposed() -> None:
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.ones(3, 5).t())
    describe_module(FullyShardedDataParallel(model, device_id=CPU))


def summoned() -> None:
    model = wrapped(True)
    with FullyShardedDataParallel.summon_full_params(model):
        describe_module(model)


def inside_original() -> None:
    describe_module(wrapped(True).module)


def inside_flat() -> None:
    describe_module(wrapped(False).module.blocks[0].module.up)


def loose() -> None:
    part_of(next(wrapped(True).parameters()))


def reshaped() -> None:
    model = wrapped(True)
    for parameter in model.parameters():
        parameter.data = parameter.data.new_zeros(2)
    describe_module(model)


def uneven_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Linear(3, 5), mesh["tensor"], ColwiseParallel())
    model = FullyShardedDataParallel(model, device_mesh=mesh["data"], device_id=CPU)
    describe_module(model)


@pytest.mark.parametrize(
    ("function", "ranks", "kind", "text"),
    [
        (transposed, 2, "UnknownPlacementError", "weight: .* strides .1, 5.* make the parameter"),
        (summoned, 2, "ShardingError", "leave it before saving"),
        (inside_original, 2, "ShardingError", "embedding has its .* wrapped module itself"),
        (inside_flat, 2, "ShardingError", "Linear has its .* wrapped module itself"),
        (loose, 2, "ShardingError", "a parameter of shape .* wrapped module itself"),
        (reshaped, 2, "LocalShapeError", "embedding.weight has 2 elements, .* replaced"),
        (uneven_tensor_parallelism, 4, "UnknownPlacementError", "unevenly"),
    ],
)
def test_what_has_no_layout_is_an_error_that_says_what_to_do(
    clusters: Callable[[int], Any], function: Callable[[], None], ranks: int, kind: str, text: str
) -> None:
    with pytest.raises(Exception, match=text) as caught:
        clusters(ranks).run(function)
    assert {name for name, *_ in caught.value.errors.values()} == {kind}  # type: ignore[attr-defined]


# What modules are left with.


def hooks_and_kinds() -> tuple[list[str], list[str], bool]:
    model = wrapped(True)
    kinds = [StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT]
    found = []
    for kind in kinds:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            describe_module(model)
            found.append(type(model.state_dict()["blocks.0.up.weight"]).__name__)
    before = full_state_dict(model)
    load_rest(model, {})
    after = full_state_dict(model)
    return found, sorted(after), all(np.array_equal(after[k], before[k]) for k in before)


def test_torchs_own_state_dicts_are_what_they_were_before(clusters: Callable[[int], Any]) -> None:
    for found, names, same in clusters(2).run(hooks_and_kinds):
        assert found == ["ShardedTensor", "Tensor"]
        assert names == sorted(Network().state_dict())
        assert same


def cast_buffers() -> tuple[str, str, str]:
    model = wrapped(False, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model(torch.arange(7))
    entries = describe_module(model)
    loaded = torch.full((3,), 2.0)
    load_rest(model, {"_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.scale": loaded})
    buffer = model.module.blocks[0].module.scale
    return str(entries["blocks.0.scale"].dtype), str(buffer.dtype), str(buffer.tolist())


def test_a_buffer_that_was_cast_is_described_in_its_own_dtype_and_loaded_in_its_present_one(
    clusters: Callable[[int], Any],
) -> None:
    for found in clusters(2).run(cast_buffers):
        assert found == ("torch.float32", "torch.bfloat16", "[2.0, 2.0, 2.0]")


@pytest.mark.thorough
def test_nobody_imports_torchs_fsdp_for_a_module_that_does_not_use_it() -> None:
    program = (
        "import sys, torch; from sharding.describe.describing import describe_module, part_of\n"
        "describe_module(torch.nn.Linear(2, 3)); part_of(torch.ones(2))\n"
        "assert not any(name.startswith('torch.distributed.fsdp') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Torch's local state dicts.


def local_state_dict(model: nn.Module, form: str) -> dict[str, Any]:
    """Torch's, its flat parameters as ShardedTensors or as shards with or without padding."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = dict(model.state_dict())
    for key, value in state.items():
        if key.endswith("_flat_param") and form != "ShardedTensor":
            shards = value.local_shards()
            local = shards[0].tensor if shards else torch.empty(0)
            stride = value.metadata().shards_metadata[0].shard_sizes[0]
            if form == "padded":
                local = nn.functional.pad(local, [0, stride - local.numel()])
            state[key] = local
    return state


def local_parts(original: bool, form: str) -> tuple[Held, Held]:
    model = wrapped(original)
    step(model)
    direct = held(describe_module(model))
    return held(parts_by_name(model, local_state_dict(model, form))), direct


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("form", ["ShardedTensor", "padded", "unpadded"])
def test_a_local_state_dict_is_divided_as_the_module_is(
    clusters: Callable[[int], Any], original: bool, form: str
) -> None:
    for parts, direct in clusters(3).run(local_parts, original, form):
        assert sorted(parts) == sorted(direct)
        for name, (local, layout) in direct.items():
            assert parts[name][1] == layout
            np.testing.assert_array_equal(parts[name][0], local)


def spoiled(how: str) -> None:
    model = wrapped(False)
    state = local_state_dict(model, "unpadded")
    key = "blocks.1._flat_param"
    if how == "missing":
        del state[key]
    elif how == "text":
        state[key] = "shard"
    elif how == "shifted":
        state = local_state_dict(model, "ShardedTensor")
        state[key].local_shards()[0].metadata.shard_offsets[0] += 1
    else:
        state[key] = state[key][: int(how)]
    parts_by_name(model, state)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("13", r"blocks.1._flat_param: rank 0 .* shape \(13,\) .* 19 elements, or 19 with padding"),
        ("missing", "blocks.1._flat_param: the state dict has no local shard"),
        ("text", "blocks.1._flat_param: rank 0 has a str, not a tensor"),
        ("shifted", "from element 1 on; .* from element 0 on"),
    ],
)
def test_a_local_shard_that_is_not_the_ranks_is_refused(
    clusters: Callable[[int], Any], how: str, text: str
) -> None:
    with pytest.raises(Exception, match=text) as caught:
        clusters(2).run(spoiled, how)
    assert {e[0] for e in caught.value.errors.values()} == {"LocalShapeError"}  # type: ignore[attr-defined]


# ShardedTensors.


def sharded(sizes: list[int], width: int | None) -> tuple[str, bool, int]:
    """A ShardedTensor whose ranks have so many rows each; what is said of it."""
    rank, rest = dist.get_rank(), [] if width is None else [width]
    local = torch.arange(float(np.prod([sizes[rank], *rest]))).reshape(sizes[rank], *rest)
    offsets = [sum(sizes[:rank]), *([0] * len(rest))]
    shards = [Shard.from_tensor_and_offsets(local, offsets, rank)] if sizes[rank] else []
    tensor = init_from_local_shards(shards, sum(sizes), *rest)
    found, layout = describe(tensor, "w", Mesh.grid(("world",), (3,)))
    pieces = sum(piece.box.numel for piece in layout.pieces(rank))
    return str(layout), not sizes[rank] or found.data_ptr() == local.data_ptr(), pieces


@pytest.mark.parametrize(
    ("sizes", "width", "layout"),
    [
        ([3, 3, 1], 2, f"shard:3={RowShard(0)}"),
        ([2, 2, 0], 2, f"shard:3={RowShard(0)}"),
        ([4, 4, 2], None, f"shard:3={RowShard(0)}"),
        ([5, 5, 1], None, f"shard:3={FlatShard(0, 5)}"),
        ([5, 2, 0], None, f"shard:3={FlatShard(0, 5)}"),
    ],
)
def test_rows_and_runs_of_sharded_tensors_have_layouts(
    clusters: Callable[[int], Any], sizes: list[int], width: int | None, layout: str
) -> None:
    found = clusters(3).run(sharded, sizes, width)
    assert found == [(layout, True, size * (width or 1)) for size in sizes]


@pytest.mark.parametrize(("sizes", "width"), [([1, 3, 3], 2), ([1, 3, 3], None), ([5, 1, 1], 2)])
def test_other_cuts_of_sharded_tensors_are_refused_with_their_offsets(
    clusters: Callable[[int], Any], sizes: list[int], width: int | None
) -> None:
    with pytest.raises(Exception, match=r"w: this ShardedTensor .* shards at \[0") as caught:
        clusters(3).run(sharded, sizes, width)
    assert len(caught.value.errors) == 3  # type: ignore[attr-defined]
