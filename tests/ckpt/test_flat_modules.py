"""Modules with flat parameters, ours and torch's, saved and loaded by their pieces.

The table has the strategies of both wrappers; `test_any_to_any` has every runtime under full
sharding, `test_torch_fsdp` what only torch's has. All ranks train on the same batch, so every
wrapping computes what one process does; that is what everything is compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
import sharding
from sharding import FullyShardedDataParallel, ShardingStrategy
from tests.ckpt.wrappings import (
    Counting,
    Network,
    assert_alike,
    flat_dict,
    network,
    state_of,
    train,
    wrapped,
)
from tests.networks import ScaledBlock
from tests.selection import slow, thorough

Run = tuple[str, int]
"""A wrapping and its number of ranks."""

PLAIN: Run = ("unsharded", 1)
RUNS: list[Run] = [
    PLAIN,
    ("flat", 2),
    ("torch-original SHARD_GRAD_OP", 2),
    ("flat HYBRID_SHARD", 4),
    ("composable SHARD_GRAD_OP", 2),
    ("torch-flat NO_SHARD", 2),
    ("flat SHARD_GRAD_OP", 3),
    ("torch-original HYBRID_SHARD", 4),
    ("original NO_SHARD", 2),
    ("fully_shard", 3),
    ("torch-original NO_SHARD", 2),
    ("original HYBRID_SHARD", 4),
    ("original", 3),
    ("torch-flat HYBRID_SHARD", 4),
    ("flat NO_SHARD", 2),
]
QUICK_APART, OWN, APART = (4,), (0,), (1, 2, 7, 8, 11)
"""How far from a run, around the list, those are which it loads: in `make test`, itself, others."""


def sources_of(run: Run, apart: tuple[int, ...]) -> list[Run]:
    """The runs of which this one loads what they saved."""
    return [RUNS[(RUNS.index(run) + each) % len(RUNS)] for each in apart]


def named(run: Run) -> str:
    return f"{run[0]} on {run[1]}".replace(" ", "-")


def train_and_save(how: str, folder: str) -> list[float]:
    """Save after two steps; the losses of these and of two more."""
    state = state_of(how)
    losses = train(state, 0, 2)
    state["optim"].param_groups[1]["lr"] = 0.005
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's of state dicts, which are not asked for
        ckpt.save(folder, state)
    return losses + train(state, 2, 2)


def load_and_train(how: str, folders: list[tuple[str, str]]) -> list[list[float]]:
    """For each pair: load one folder into fresh objects, save them in the other, train on."""
    losses = []
    for folder, again in folders:
        state = state_of(how, seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.load(folder, state)
            ckpt.save(again, state)
        losses.append(train(state, 2, 2))
    return losses


def on_ranks(clusters: Callable[[int], Any], run: Run, function: Any, *arguments: Any) -> Any:
    """What a function returns on the first of a run's ranks: in this process, if it is one."""
    how, ranks = run
    if ranks == 1:
        return function(how, *arguments)
    return clusters(ranks).run(function, how, *arguments)[0]


Saved = Callable[[Run], tuple[Path, list[float]]]
"""A function from a run to the folder that it saved, and the losses that it trained with."""


@pytest.fixture(scope="module")
def saved(clusters: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The function; a run is made when it is first asked for."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def made(run: Run) -> tuple[Path, list[float]]:
        folder = root / named(run)
        return folder, on_ranks(clusters, run, train_and_save, str(folder))

    return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    "run", [run if at % 2 else slow(run) for at, run in enumerate(RUNS)][1:], ids=named
)
def test_a_checkpoint_has_the_names_shapes_and_values_of_the_model_that_is_not_sharded(
    saved: Saved, run: Run
) -> None:
    (folder, losses), (plain_folder, plain_losses) = saved(run), saved(PLAIN)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    found, plain = ckpt.read(folder), ckpt.read(plain_folder)
    assert_alike(found, plain, exact=False)


@pytest.mark.parametrize(
    "apart", [QUICK_APART, thorough(OWN), slow(APART)], ids=["quick", "own", "others"]
)
@pytest.mark.parametrize("run", RUNS, ids=named)
def test_what_one_strategy_saved_loads_into_another_bit_for_bit_and_trains_on(
    clusters: Callable[[int], Any],
    saved: Saved,
    tmp_path: Path,
    run: Run,
    apart: tuple[int, ...],
) -> None:
    sources = sources_of(run, apart)
    pairs = [(str(saved(source)[0]), str(tmp_path / named(source))) for source in sources]
    found = on_ranks(clusters, run, load_and_train, pairs)
    if sources[0] == run:
        assert found[0] == saved(run)[1][2:]
    for source, (given, again), after in zip(sources, pairs, found, strict=True):
        assert_alike(ckpt.read(again), ckpt.read(given), exact=True)
        assert after == pytest.approx(saved(PLAIN)[1][2:], rel=1e-6), source


# What does not fit, and what is left out.


def bits(model: nn.Module) -> dict[str, bytes]:
    """The bytes of what this rank's optimizer would see."""
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


def load_some(how: str, folder: str, again: str) -> None:
    state = state_of(how, seed=1)
    train(state, 7, 1)
    ckpt.save(f"{again}-before", state)
    ckpt.load(folder, state, exclude=["*blocks.0.up.bias*", "optim.state.blocks.1*"])
    ckpt.save(f"{again}-after", state)


@pytest.mark.parametrize("how", ["flat", "original"])
def test_what_is_not_selected_of_a_flat_parameter_stays_as_it_was(
    clusters: Callable[[int], Any],
    saved: Saved,
    tmp_path: Path,
    how: str,
) -> None:
    folder = saved(PLAIN)[0]
    clusters(2).run(load_some, how, str(folder), str(tmp_path / "some"))
    before, after, given = (
        flat_dict(ckpt.read(place))
        for place in (tmp_path / "some-before", tmp_path / "some-after", folder)
    )
    assert after.keys() == given.keys()
    for name, tensor in after.items():
        if not isinstance(tensor, torch.Tensor) or name.endswith("step"):
            continue
        left_out = "blocks.0.up.bias" in name or name.startswith(".optim.state.blocks.1")
        assert torch.equal(tensor, (before if left_out else given)[name]), name


def load_uneven_steps(how: str, folder: str) -> tuple[str, bool]:
    state = state_of(how, seed=1)
    before = bits(state["model"])
    try:
        ckpt.load(folder, state)
    except ckpt.MismatchError as error:
        return error.reason, bits(state["model"]) == before
    return "", bits(state["model"]) != before


def test_names_of_one_flat_parameter_must_agree_on_numbers(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    state = state_of("unsharded")
    train(state, 0, 2)
    state["optim"].state[state["model"].blocks[0].up.bias]["step"] += 3
    ckpt.save(tmp_path, state)
    for text, untouched in clusters(2).run(load_uneven_steps, "flat", str(tmp_path)):
        assert "optim.state.blocks.0.up.bias.step: is 5.0 in the checkpoint" in text
        assert "use_orig_params=True" in text
        assert untouched
    for text, loaded in clusters(2).run(load_uneven_steps, "original", str(tmp_path)):
        assert (text, loaded) == ("", True)


def load_and_save(how: str, folder: str, again: str) -> None:
    state = state_of(how, seed=1)
    ckpt.load(folder, state)
    ckpt.save(again, state)


def test_a_name_without_state_has_zeros_in_a_flat_parameter(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    state = state_of("unsharded")
    train(state, 0, 2)
    del state["optim"].state[state["model"].blocks[0].up.bias]
    ckpt.save(tmp_path / "one", state)
    clusters(2).run(load_and_save, "flat", str(tmp_path / "one"), str(tmp_path / "other"))
    given, found = (ckpt.read(tmp_path / name)["optim"]["state"] for name in ("one", "other"))
    assert not found["blocks.0.up.bias"]["exp_avg"].any()
    for name, entries in given.items():
        for key, tensor in entries.items():
            assert torch.equal(found[name][key], tensor), (name, key)


# Parts of modules and of states that are special.


def counting(how: str, folder: str) -> tuple[int, list[float], str]:
    torch.manual_seed(0)
    model = wrapped(how, make=lambda seed: nn.Sequential(Counting(), nn.Linear(5, 2)))
    inner = next(part for part in model.modules() if isinstance(part, Counting))
    inner.seen = 4
    ckpt.save(folder, model)
    inner.seen = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    FullyShardedDataParallel.set_state_dict_type(model, sharding.StateDictType.SHARDED_STATE_DICT)
    ckpt.load(folder, model)
    kind = FullyShardedDataParallel.get_state_dict_type(model).state_dict_type.name
    return inner.seen, [float(p.sum()) for p in model.parameters()], kind


@pytest.mark.parametrize("how", ["flat", "original", "composable"])
def test_extra_state_is_loaded_and_the_kind_of_state_dict_stays_what_it_was(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    for seen, sums, kind in clusters(2).run(counting, how, str(tmp_path)):
        assert (seen, kind) == (4, "SHARDED_STATE_DICT")
        assert any(sums)
    read = ckpt.read(tmp_path)
    torch.manual_seed(0)
    plain = nn.Sequential(Counting(), nn.Linear(5, 2))
    assert torch.equal(read["0.layer.weight"], plain[0].layer.weight)


class Wants(nn.Linear):
    """Its load misses a key that no state dict has."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        rest[2].append(f"{prefix}scale")


def missed(how: str, folder: str) -> list[str]:
    model = wrapped(how, make=lambda seed: nn.Sequential(Wants(3, 4), nn.Linear(4, 2)))
    ckpt.save(folder, model, overwrite=True)
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(folder, model)
    return [difference.name for difference in caught.value.differences]


def test_a_key_that_a_modules_own_load_misses_is_an_error_beside_flat_parameters(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    for how in ("flat", "original", "composable", "torch-flat", "torch-original"):
        assert clusters(2).run(missed, how, str(tmp_path)) == [["0.scale"]] * 2, how


def cast_buffers(folder: str) -> tuple[str, float]:
    mixed = sharding.MixedPrecision(buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(network(), mixed_precision=mixed)
    model(torch.zeros(1, 1, dtype=torch.int64))
    ckpt.save(folder, model)
    model.blocks[0].scale.zero_()
    ckpt.load(folder, model)
    return str(model.blocks[0].scale.dtype), float(model.blocks[0].scale[-1])


def test_a_buffer_that_was_cast_is_stored_in_its_own_dtype_and_loaded_in_its_present_one(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    assert clusters(2).run(cast_buffers, str(tmp_path)) == [("torch.bfloat16", 1.0)] * 2
    assert ckpt.read(tmp_path)["blocks.0.scale"].dtype == torch.float32


class Copies(TorchDispatchMode):
    """Writes down every operation of torch that copies elements."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("copy", "clone", "cat")):
            self.made.append(str(func))
        return func(*args, **(kwargs or {}))


def copies_while_loading(how: str, folder: str) -> list[str]:
    model = wrapped(how)
    ckpt.save(folder, model, overwrite=True)
    with Copies() as copies:
        ckpt.load(folder, model)
    return copies.made


def copies_while_casting(how: str, folder: str) -> list[str]:
    model = wrapped(how)
    ckpt.save(folder, model.double(), overwrite=True)
    with Copies() as copies:
        ckpt.load(folder, wrapped(how), dtype="target")
    return copies.made


@pytest.mark.parametrize("how", ["fully_shard", "flat", "original", "composable"])
def test_bytes_land_in_place_and_no_operation_of_torch_copies_them_again(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    assert clusters(2).run(copies_while_loading, how, str(tmp_path)) == [[], []]


def test_what_is_cast_is_copied(clusters: Callable[[int], Any], tmp_path: Path) -> None:
    """So that the test above sees copies where there are some."""
    assert all(clusters(2).run(copies_while_casting, "fully_shard", str(tmp_path)))


def bare_parameters(folder: str) -> None:
    model = wrapped("original")
    parameters = {name: p for name, p in model.named_parameters() if "blocks.0" in name}
    ckpt.save(folder, {"some": parameters, "block": model.module.blocks[1].module})
    for parameter in parameters.values():
        parameter.data.zero_()
    ckpt.load(folder, {"some": parameters, "block": model.module.blocks[1].module})
    ckpt.save(f"{folder}-again", model)


def test_original_parameters_outside_of_their_module_are_stored_as_parts_too(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(2).run(bare_parameters, str(tmp_path / "some"))
    plain = dict(network().named_parameters())
    again, some = ckpt.read(tmp_path / "some-again"), ckpt.read(tmp_path / "some")
    for name, parameter in plain.items():
        assert torch.equal(again[name], parameter), name
    assert torch.equal(some["block"]["up.weight"], plain["blocks.1.up.weight"])
    stored = [t for name, t in some["some"].items() if name.endswith("up.weight")]
    assert torch.equal(stored[0], plain["blocks.0.up.weight"])


def undividable(folder: str, odd: bool) -> None:
    """Save what LBFGS keeps, lists of vectors, or a tensor that has nothing to do with shards."""
    model = wrapped("flat")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(8)).square().mean()
        loss.backward()
        return loss

    if odd:
        optimizer.state[next(model.parameters())]["odd"] = torch.ones(3, 2)
    else:
        optimizer.step(closure)
    ckpt.save(folder, {"model": model, "optim": optimizer})


@pytest.mark.parametrize(("odd", "key", "shape"), [(True, "odd", r"\(3, 2\)"), (False, "d", "")])
def test_state_of_another_shape_than_its_parameter_is_refused(
    clusters: Callable[[int], Any], tmp_path: Path, odd: bool, key: str, shape: str
) -> None:
    with pytest.raises(Exception, match=f"the optimizer's '{key}' of .* has the shape {shape}"):
        clusters(2).run(undividable, str(tmp_path), odd)


def even_network(seed: int) -> Network:
    """A network of which two ranks can divide the first block evenly."""
    torch.manual_seed(seed)
    model = Network()
    model.blocks[0] = ScaledBlock(8)
    return model


def in_one_unit(model: nn.Module) -> dict[str, Any]:
    """A model and its optimizer, which can have no groups where all is one flat parameter."""
    return {"model": model, "optim": AdamW(model.parameters(), lr=0.01, weight_decay=0.1)}


def over_tensor_parallelism(how: str, folder: str, again: str | None) -> None:
    """Save, or load and save, what two ranks of each of two data-parallel groups divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: nn.Module = even_network(0 if again is None else 1)
    plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    model = FullyShardedDataParallel(
        model, mesh["data"].get_group(), use_orig_params=how == "original"
    )
    state = in_one_unit(model)
    if again is None:
        train(state, 0, 2)
        ckpt.save(folder, state)
    else:
        ckpt.load(folder, state)
        ckpt.save(again, state)


@pytest.mark.thorough
def test_parts_of_what_tensor_parallelism_divided_are_stored_as_parts_of_the_whole(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    state = in_one_unit(even_network(0))
    train(state, 0, 2)
    ckpt.save(tmp_path / "unsharded", state)
    for how in ("flat", "original"):
        folder, again = str(tmp_path / how), str(tmp_path / f"{how}-again")
        clusters(4).run(over_tensor_parallelism, how, folder, None)
        assert_alike(ckpt.read(folder), ckpt.read(tmp_path / "unsharded"), exact=False)
        clusters(4).run(over_tensor_parallelism, how, folder, again)
        assert_alike(ckpt.read(again), ckpt.read(folder), exact=True)


def groups_out_of_step(folder: str) -> None:
    shard = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    replicate = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    first = dist.get_rank() in (0, 3)
    group = shard[0 if first else 1], replicate[0 if dist.get_rank() < 2 else 1]
    strategy = ShardingStrategy.HYBRID_SHARD
    model = FullyShardedDataParallel(network(), group, sharding_strategy=strategy)
    ckpt.save(folder, model)


def test_groups_that_form_no_grid_are_refused_on_all_ranks(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="make the groups from one device mesh") as caught:
        clusters(4).run(groups_out_of_step, str(tmp_path))
    assert len(caught.value.errors) == 4  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def tied_across_units(how: str, folder: str) -> None:
    """Save a part of a model that shares a layer with a unit which is not in the part."""
    torch.manual_seed(0)
    model = nn.Module()
    model.first, model.second = nn.Linear(3, 5), nn.Linear(3, 5)
    model.second.weight = model.first.weight
    for name in ("first", "second"):
        inner = FullyShardedDataParallel(getattr(model, name), use_orig_params=how == "original")
        setattr(model, name, inner)
    ckpt.save(f"{folder}-whole", model)
    ckpt.save(f"{folder}-part", model.second)


@pytest.mark.parametrize("how", ["flat", "original"])
def test_a_parameter_shared_with_a_unit_outside_is_in_both(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    clusters(2).run(tied_across_units, how, str(tmp_path / "tied"))
    torch.manual_seed(0)
    first, second = nn.Linear(3, 5), nn.Linear(3, 5)
    whole, part = ckpt.read(tmp_path / "tied-whole"), ckpt.read(tmp_path / "tied-part")
    assert sorted(whole) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert sorted(part) == ["bias", "weight"]
    for found in (whole["first.weight"], whole["second.weight"], part["weight"]):
        assert torch.equal(found, first.weight)
    for found in (whole["second.bias"], part["bias"]):
        assert torch.equal(found, second.bias)
