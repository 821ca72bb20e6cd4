"""What the runtime says of a module: names, local tensors and layouts that tile every parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sharding
from sharding import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from sharding.describe.describing import (
    describe_module,
    flat_members,
    load_rest,
    part_of,
    state_dict_keys,
)
from sharding.describe.members import LocalPart
from sharding.errors import ShardingError
from tests.kept_groups import kept
from tests.sharding.pieces import Held, Parameters, held, whole
from tests.sharding.wrapper_models import (
    full_parameters,
    loss_of,
    network,
    sgd,
    wrapped,
)


@kept
def groups(strategy: str) -> Any:
    """The groups of a hybrid strategy over all ranks, two of which replicate. Made once."""
    if "HYBRID" not in strategy:
        return None
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return mesh.get_group(1), mesh.get_group(0)


def flat(module: nn.Module, form: str, strategy: str) -> nn.Module:
    """A module given to a entry point to flat parameters."""
    chosen, group = ShardingStrategy[strategy], groups(strategy)
    if form == "composable":
        return sharding.composable.fully_shard(module, strategy=chosen, process_group=group)
    return FullyShardedDataParallel(
        module, group, sharding_strategy=chosen, use_orig_params=form == "original"
    )


def held_of_shapes(shapes: list[tuple[int, ...]], form: str, strategy: str) -> Held:
    return held(describe_module(flat(Parameters(shapes), form, strategy)))


SHAPES = st.lists(
    st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6
).filter(lambda shapes: sum(int(np.prod(shape)) for shape in shapes) > 0)


@pytest.mark.parametrize(
    ("form", "strategy", "ranks"),
    [
        ("flat", "FULL_SHARD", 2),
        ("original", "FULL_SHARD", 2),
        ("composable", "NO_SHARD", 2),
        ("flat", "NO_SHARD", 2),
        ("flat", "HYBRID_SHARD", 4),
    ],
)
@settings(max_examples=8)
@given(SHAPES)
def test_the_pieces_of_all_ranks_tile_parameters_of_any_shape(
    clusters: Callable[[int], Any],
    form: str,
    strategy: str,
    ranks: int,
    shapes: list[tuple[int, ...]],
) -> None:
    found = clusters(ranks).run(held_of_shapes, shapes, form, strategy)
    plain = dict(Parameters(shapes).named_parameters())
    assert all(sorted(tensors) == sorted(plain) for tensors in found)
    for name, parameter in plain.items():
        np.testing.assert_array_equal(whole(name, found), parameter.detach().numpy())


def described_network(form: str, strategy: str) -> tuple[Held, dict[str, np.ndarray]]:
    """A trained network described, and its whole parameters as the runtime gathers them."""
    if form == "fully_shard":
        model = network()
        for block in (*model.blocks, model.frozen):
            sharding.fully_shard(block)
        sharding.fully_shard(model)
    else:
        model = wrapped(sharding, network(), strategy, use_orig_params=form == "original")
    optimizer = sgd(model)
    loss_of(model, 0).backward()
    optimizer.step()
    found = held(describe_module(model))
    if form == "fully_shard":
        wholes = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    else:
        wholes = full_parameters(sharding, model)
    return found, {name: tensor.numpy() for name, tensor in wholes.items()}


@pytest.mark.parametrize(
    ("form", "strategy"),
    [("flat", "FULL_SHARD"), ("original", "SHARD_GRAD_OP"), ("fully_shard", "")],
)
def test_nested_units_are_described_by_the_names_and_values_of_the_module_inside(
    clusters: Callable[[int], Any], form: str, strategy: str
) -> None:
    results = clusters(2).run(described_network, form, strategy)
    found = [tensors for tensors, _ in results]
    names = list(network().state_dict())
    assert all(sorted(tensors) == sorted(names) for tensors in found)
    for name, parameter in results[0][1].items():
        np.testing.assert_array_equal(whole(name, found), parameter)
    tied = found[0]["embedding.weight"], found[0]["head.weight"]
    np.testing.assert_array_equal(tied[0][0], tied[1][0])
    assert tied[0][1] == tied[1][1]


def described_alone() -> list[str]:
    """Rank 0 describes while the other does something else: it can wait for nobody."""
    model = wrapped(sharding, network(), use_orig_params=False)
    loss_of(model, 0).backward()
    names = list(describe_module(model)) if dist.get_rank() == 0 else []
    dist.barrier()
    return names


def test_describing_takes_one_rank_alone(clusters: Callable[[int], Any]) -> None:
    names, _ = clusters(2).run(described_alone)
    assert sorted(names) == sorted(network().state_dict())


def write_through(form: str) -> bool:
    """Whether what is written to local parts is in the whole parameters, and in those alone."""
    model = wrapped(sharding, network(), use_orig_params=form == "original")
    loss_of(model, 0).backward()
    for entry in describe_module(model).values():
        if isinstance(entry, LocalPart):
            entry.local.fill_(2.5)
    loss_of(model, 1).backward()
    return all(bool((p == 2.5).all()) for p in full_parameters(sharding, model).values())


@pytest.mark.parametrize("form", ["flat", "original"])
def test_a_part_shares_the_memory_of_what_is_trained(
    clusters: Callable[[int], Any], form: str
) -> None:
    assert clusters(2).run(write_through, form) == [True, True]


def special_names() -> dict[str, list[Any]]:
    """What describing calls things in wrappers of several kinds, with shapes and dtypes."""
    model = network()
    ignored = model.frozen.turn
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(model, ignored_modules=[ignored]), nn.Linear(2, 2)),
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )
    return {
        name: [type(entry).__name__, tuple(entry.shape), str(entry.dtype)]
        for name, entry in describe_module(model).items()
    }


def test_ignored_parameters_and_buffers_are_as_they_are(clusters: Callable[[int], Any]) -> None:
    found = clusters(2).run(special_names)[0]
    plain = {f"0.{name}": tensor for name, tensor in network().state_dict().items()}
    assert sorted(found) == sorted([*plain, "1.weight", "1.bias"])
    for name, tensor in plain.items():
        kind, shape, dtype = found[name]
        assert (shape, dtype) == (tuple(tensor.shape), str(tensor.dtype))
        ignored = "frozen" in name or name in ("0.scale", "0.calls")
        assert (kind == "LocalPart") != ignored


def cast_buffers() -> tuple[str, str]:
    model = FullyShardedDataParallel(
        network(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16)
    )
    loss_of(model, 0)
    return str(describe_module(model)["scale"].dtype), str(model.scale.dtype)


def test_a_buffer_that_mixed_precision_casts_is_described_in_its_own_dtype(
    clusters: Callable[[int], Any],
) -> None:
    assert clusters(2).run(cast_buffers)[0] == ("torch.float32", "torch.bfloat16")


def over_tensor_parallelism(form: str, strategy: str) -> Held:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapper = FullyShardedDataParallel(
        model,
        mesh["data"].get_group(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=form == "original",
    )
    return held(describe_module(wrapper))


@pytest.mark.parametrize("form", ["flat", "original"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_the_pieces_tile_what_tensor_parallelism_divided_before(
    clusters: Callable[[int], Any], form: str, strategy: str
) -> None:
    found = clusters(4).run(over_tensor_parallelism, form, strategy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))
    for name, parameter in model.named_parameters():
        tensor = whole(name, found, one_layout=False)
        np.testing.assert_array_equal(tensor, parameter.detach().numpy())


def parameters_by_themselves() -> list[tuple[str, str]]:
    """What every parameter of a block says that it is, and what the block's model says."""
    model = wrapped(sharding, network(), use_orig_params=True)
    every = describe_module(model)
    found = []
    for name, parameter in model.module.blocks[0].module.named_parameters():
        part = part_of(parameter)
        assert part is not None
        assert part.local.data_ptr() == parameter.data_ptr() or not parameter.numel()
        found.append((str(part.layout), str(every[f"blocks.0.{name}"].layout)))
    assert part_of(nn.Parameter(torch.ones(2))) is None
    return found


def test_an_original_parameter_knows_what_part_it_is_without_its_module(
    clusters: Callable[[int], Any],
) -> None:
    found = clusters(2).run(parameters_by_themselves)[1]
    assert len(found) == 4
    assert all(own == by_module for own, by_module in found)


def members() -> list[tuple[str, list[tuple[str, ...]]]]:
    model = wrapped(sharding, network(), use_orig_params=False)
    return [(type(m.parameter).__name__, list(m.names)) for m in flat_members(model)]


def test_a_flat_parameter_is_told_as_the_names_in_it_tied_ones_together(
    clusters: Callable[[int], Any],
) -> None:
    found = clusters(2).run(members)[0]
    assert {kind for kind, _ in found} == {"FlatParameter"}
    names = [names for _, every in found for names in every]
    assert ("embedding.weight", "head.weight") in names
    plain = network()
    assert sorted(names[0] for names in names) == sorted(n for n, _ in plain.named_parameters())


def part_of_a_flat_unit() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    names = list(model.state_dict())
    wrapped = FullyShardedDataParallel(model)
    for part in (wrapped.module[0], wrapped.module):
        with pytest.raises(ShardingError, match=r"in the flat parameter of the Sequential"):
            describe_module(part)
    assert list(describe_module(wrapped)) == names


def test_a_part_of_a_flat_unit_is_not_described_as_if_it_were_empty(clusters: Callable) -> None:
    clusters(2).run(part_of_a_flat_unit)


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "norm": lambda weight: weight.detach().norm(),
    "tolist": lambda weight: weight.detach().tolist(),
    "numpy": lambda weight: weight.detach().numpy().sum(),
    "repr": repr,
    "deepcopy": lambda weight: copy.deepcopy(weight.detach()),
    "changed": lambda weight: weight.data.clamp_(0.0),
    "view": lambda weight: weight.detach(),
}


def read_by_hooks(entry_point: str, form: str, read: str) -> tuple[list[float], list[float]]:
    """The parameters before and after descriptions that hooks of state dicts make fail."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    def hook(module: nn.Linear, state: dict[str, Any], prefix: str, metadata: object) -> None:
        found = READS[read](module.weight)
        state[prefix + "found"] = found if isinstance(found, torch.Tensor) else torch.ones(1)

    model[1].register_state_dict_post_hook(hook)
    module: Any = torch.distributed.fsdp if entry_point == "torch" else sharding
    model = module.FullyShardedDataParallel(
        model, use_orig_params=form == "original", device_id=torch.device("cpu")
    )
    model(torch.ones(2, 5)).sum().backward()
    before = [p.detach().sum().item() for p in model.parameters()]
    for describing in (describe_module, state_dict_keys):
        if describing is describe_module or read != "view":  # it does not look at values
            with pytest.raises(ShardingError, match=r"\b1\.weight\b.* is divided over the ranks"):
                describing(model)
    return before, [p.detach().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("entry_point", ["ours", "torch"])
@pytest.mark.parametrize("form", ["flat", "original"])
@pytest.mark.parametrize(
    "read", ["norm", "view", *(pytest.param(r, marks=pytest.mark.slow) for r in list(READS)[1:-1])]
)
def test_a_state_dict_hook_that_reads_a_divided_parameter_is_an_error_by_its_name(
    clusters: Callable[[int], Any], entry_point: str, form: str, read: str
) -> None:
    for before, after in clusters(2).run(read_by_hooks, entry_point, form, read):
        assert before == after


def shapes_by_hooks() -> list[int]:
    """The entries of hooks that look at shapes, or read what is not divided."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state[prefix + "shape"] = torch.tensor(module.weight.detach().view(-1).shape)
        state[prefix + "sum"] = module.running_var.sum()

    model[1].register_state_dict_post_hook(hook)
    found = describe_module(FullyShardedDataParallel(model))
    return [int(found["1.shape"]), int(found["1.sum"])]  # type: ignore[call-overload]


def test_a_state_dict_hook_may_look_at_shapes_and_read_buffers(
    clusters: Callable[[int], Any],
) -> None:
    assert clusters(2).run(shapes_by_hooks) == [[7, 7], [7, 7]]


def read_before_loading() -> None:
    model = nn.Sequential(nn.Linear(5, 7))
    model[0].register_load_state_dict_pre_hook(lambda module, *_: module.weight.sum())
    model = FullyShardedDataParallel(model)
    model(torch.ones(2, 5)).sum().backward()
    state = describe_module(model)
    with pytest.raises(ShardingError, match=r"^0\.weight is divided .* reads it"):
        load_rest(model, state)


def test_a_load_hook_that_reads_a_divided_parameter_is_an_error_by_its_name(
    clusters: Callable[[int], Any],
) -> None:
    clusters(2).run(read_before_loading)


class Transposing(nn.Linear):
    """Stores its weight in another form."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "turned"] = self.weight.detach().t()


def read_by_a_method() -> None:
    model = FullyShardedDataParallel(nn.Sequential(Transposing(5, 7)))
    model(torch.ones(2, 5)).sum().backward()  # its weight has no memory afterwards
    with pytest.raises(
        ShardingError, match=r"^0\.weight is divided .* _save_to_state_dict .*reads it"
    ):
        describe_module(model)


def test_a_method_that_makes_a_view_of_a_weight_out_of_memory_is_an_error_by_its_name(
    clusters: Callable[[int], Any],
) -> None:
    clusters(2).run(read_by_a_method)
