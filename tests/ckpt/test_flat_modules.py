"""Modules with flat parameters, saved and loaded by their pieces: every wrapping into every other.

All ranks train on the same batch, so every wrapping computes what one process does; that, without
any of them, is what everything is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW

import ckpt
import sharding
from sharding import FullyShardedDataParallel, ShardingStrategy
from sharding.wrap import ModuleWrapPolicy

WORDS, WIDTH = 11, 6


class Block(nn.Module):
    """Two layers around a bend, a buffer and state of its own: a unit inside."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x * self.scale)))


class Network(nn.Module):
    """An embedding shared with the head, two blocks, a frozen layer, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(9), Block(7)])
        self.turn = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return self.head(self.turn(x))


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def wrapped(how: str, seed: int = 0, make: Callable[[int], nn.Module] = network) -> nn.Module:
    """A network wrapped for this process group."""
    model = make(seed)
    policy = ModuleWrapPolicy({Block})
    kind, _, strategy = how.partition(" ")
    if kind == "unsharded":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind in ("fsdp2", "fully_shard"):
        function = torch_fsdp.fully_shard if kind == "fsdp2" else sharding.fully_shard
        for block in model.modules():
            if isinstance(block, Block):
                function(block)
        return function(model)
    arguments: dict[str, Any] = {}
    if "HYBRID" in strategy:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        arguments["process_group"] = (mesh.get_group(1), mesh.get_group(0))
    chosen = ShardingStrategy[strategy or "FULL_SHARD"]
    if kind == "composable":
        return sharding.composable.fully_shard(model, policy=policy, strategy=chosen, **arguments)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=chosen,
        auto_wrap_policy=policy,
        use_orig_params=kind == "original",
        **arguments,
    )


def state_of(how: str, seed: int = 0) -> dict[str, Any]:
    """A wrapped network with its optimizer."""
    model = wrapped(how, seed)
    return {"model": model, "optim": AdamW(model.parameters(), lr=0.01, weight_decay=0.1)}


def train(state: dict[str, Any], first: int, steps: int) -> list[float]:
    """Train on the batches of these steps, the same on all ranks; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(WORDS, (4, 5), generator=generator)
        following = torch.randint(WORDS, (4, 5), generator=generator)
        scores = state["model"](tokens).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, following.flatten())
        state["optim"].zero_grad()
        loss.backward()
        state["optim"].step()
        losses.append(loss.item())
    return losses


def train_and_save(how: str, folder: str) -> list[float]:
    """Save after two steps; the losses of these and of two more."""
    state = state_of(how)
    losses = train(state, 0, 2)
    ckpt.save(folder, state)
    return losses + train(state, 2, 2)


def load_and_train(how: str, folders: list[tuple[str, str]]) -> list[list[float]]:
    """For each pair: load one folder into fresh objects, save them in the other, train on."""
    losses = []
    for folder, again in folders:
        state = state_of(how, seed=1)
        ckpt.load(folder, state)
        ckpt.save(again, state)
        losses.append(train(state, 2, 2))
    return losses


WAYS = [
    ("ddp", 2),
    ("fsdp2", 2),
    ("fully_shard", 2),
    ("fully_shard", 3),
    ("flat", 2),
    ("flat SHARD_GRAD_OP", 3),
    ("flat NO_SHARD", 2),
    ("original", 2),
    ("original NO_SHARD", 2),
    ("original", 4),
    ("composable SHARD_GRAD_OP", 2),
    ("flat HYBRID_SHARD", 4),
    ("original HYBRID_SHARD", 4),
]


def named(how: str, ranks: int) -> str:
    return f"{how} on {ranks}".replace(" ", "-")


@pytest.fixture(scope="module")
def saved(
    clusters: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[float]]]:
    """A folder with what every way of wrapping saved, and the losses each trained with."""
    folder = tmp_path_factory.mktemp("saved")
    losses = {"unsharded-on-1": train_and_save("unsharded", str(folder / "unsharded-on-1"))}
    for how, ranks in WAYS:
        name = named(how, ranks)
        losses[name] = clusters(ranks).run(train_and_save, how, str(folder / name))[0]
    return folder, losses


def flat_dict(nest: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a nest by their names."""
    if isinstance(nest, dict):
        return {
            k: v for key, item in nest.items() for k, v in flat_dict(item, f"{path}.{key}").items()
        }
    return {path: nest}


def assert_close(found: Any, wanted: Any) -> None:
    """The same names, shapes, types and values, but for rounding."""
    found, wanted = flat_dict(found), flat_dict(wanted)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{name}: {m}")
        elif name.endswith("param_groups"):
            assert sorted(found[name][0].pop("params")) == sorted(value[0].pop("params"))
            assert found[name] == value
        else:
            assert found[name] == value, name


def assert_equal(found: Path, wanted: Path) -> None:
    """Two checkpoints hold the same bits under the same names."""
    one, other = flat_dict(ckpt.read(found)), flat_dict(ckpt.read(wanted))
    assert one.keys() == other.keys()
    for name, value in other.items():
        if isinstance(value, torch.Tensor):
            assert one[name].dtype == value.dtype, name
            assert torch.equal(one[name], value), name


@pytest.mark.parametrize(("how", "ranks"), WAYS)
def test_a_checkpoint_has_the_names_shapes_and_values_of_the_model_that_is_not_sharded(
    saved: tuple[Path, dict[str, list[float]]], how: str, ranks: int
) -> None:
    folder, losses = saved
    name = named(how, ranks)
    assert losses[name] == pytest.approx(losses["unsharded-on-1"], rel=1e-6)
    assert_close(ckpt.read(folder / name), ckpt.read(folder / "unsharded-on-1"))


@pytest.mark.parametrize(("how", "ranks"), [("unsharded", 1), *WAYS])
def test_every_checkpoint_loads_into_every_wrapping_bit_for_bit_and_trains_on(
    clusters: Callable[[int], Any],
    saved: tuple[Path, dict[str, list[float]]],
    tmp_path: Path,
    how: str,
    ranks: int,
) -> None:
    folder, losses = saved
    pairs = [(str(folder / name), str(tmp_path / name)) for name in losses]
    if ranks == 1:
        found = load_and_train(how, pairs)
    else:
        found = clusters(ranks).run(load_and_train, how, pairs)[0]
    for name, after in zip(losses, found, strict=True):
        assert_equal(tmp_path / name, folder / name)
        assert after == pytest.approx(losses["unsharded-on-1"][2:], rel=1e-6), name
    mine = named(how, ranks)
    assert found[list(losses).index(mine)] == losses[mine][2:]


# What does not fit, and what is left out.


class Other(Network):
    """A network with another size and another name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Block(8)
        self.extra = nn.Linear(2, 2)


def other(seed: int) -> Other:
    torch.manual_seed(seed)
    return Other()


Bits = dict[str, bytes]


def bits(model: nn.Module) -> Bits:
    """The bytes of what this rank's optimizer would see."""
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


def load_what_does_not_fit(how: str, folder: str) -> tuple[list[tuple[str, str]], bool]:
    model = wrapped(how, 1, other)
    before = bits(model)
    try:
        ckpt.load(folder, {"model": model}, include="model.*")
    except ckpt.MismatchError as error:
        found = sorted((d.name, d.problem) for d in error.differences)
        return found, bits(model) == before
    return [], False


@pytest.mark.parametrize("how", ["flat", "original", "composable"])
def test_all_differences_are_named_and_nothing_is_touched(
    clusters: Callable[[int], Any],
    saved: tuple[Path, dict[str, list[float]]],
    how: str,
) -> None:
    folder = str(saved[0] / "flat-on-2")
    for differences, untouched in clusters(2).run(load_what_does_not_fit, how, folder):
        assert differences == [
            ("model.blocks.1.down.weight", "shape"),
            ("model.blocks.1.up.bias", "shape"),
            ("model.blocks.1.up.weight", "shape"),
            ("model.extra.bias", "missing"),
            ("model.extra.weight", "missing"),
        ]
        assert untouched


def load_some(how: str, folder: str, again: str) -> None:
    state = state_of(how, seed=1)
    train(state, 7, 1)
    ckpt.save(f"{again}-before", state)
    ckpt.load(folder, state, exclude=["*blocks.0.up.bias*", "optim.state.blocks.1*"])
    ckpt.save(f"{again}-after", state)


@pytest.mark.parametrize("how", ["flat", "original"])
def test_what_is_not_selected_of_a_flat_parameter_stays_as_it_was(
    clusters: Callable[[int], Any],
    saved: tuple[Path, dict[str, list[float]]],
    tmp_path: Path,
    how: str,
) -> None:
    folder = saved[0] / "ddp-on-2"
    clusters(2).run(load_some, how, str(folder), str(tmp_path / "some"))
    before, after, given = (
        flat_dict(ckpt.read(place))
        for place in (tmp_path / "some-before", tmp_path / "some-after", folder)
    )
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
        return str(error), bits(state["model"]) == before
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


class Counting(nn.Module):
    """A layer with state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


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


def versions_after_loading(how: str, folder: str) -> list[int]:
    model = wrapped(how)
    ckpt.save(folder, model, overwrite=True)
    before = [p._version for p in model.parameters()]
    ckpt.load(folder, model)
    return [p._version - v for p, v in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("how", ["fully_shard", "flat", "original", "composable"])
def test_bytes_land_in_place_and_no_operation_of_torch_copies_them_again(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    for moved in clusters(2).run(versions_after_loading, how, str(tmp_path)):
        assert set(moved) == {0}


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


def two_groups(how: str, folder: str, again: str | None) -> None:
    """Save, or load and save, an optimizer with the blocks in a group of their own."""
    model = wrapped(how, seed=0 if again is None else 1)
    inside = [p for name, p in model.named_parameters() if "blocks" in name]
    outside = [p for name, p in model.named_parameters() if "blocks" not in name]
    groups = [{"params": outside, "lr": 0.1}, {"params": inside, "betas": (0.5, 0.9)}]
    state = {"model": model, "optim": Adam(groups)}
    if again is None:
        train(state, 0, 2)
        state["optim"].param_groups[1]["lr"] = 0.25
        ckpt.save(folder, state)
    else:
        ckpt.load(folder, state)
        ckpt.save(again, state)


def test_groups_are_known_by_the_names_in_their_flat_parameters(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    places = [str(tmp_path / name) for name in ("ddp", "flat", "original", "fully_shard")]
    clusters(2).run(two_groups, "ddp", places[0], None)
    for place, again in pairwise(places):
        clusters(2).run(two_groups, Path(again).name, place, again)
        assert_equal(Path(again), Path(place))
        read = ckpt.read(again)["optim"]["param_groups"]
        assert [(g["lr"], g["betas"]) for g in read] == [(0.1, (0.9, 0.999)), (0.25, (0.5, 0.9))]
        assert set(read[1]["params"]) == {
            name for name, _ in network().named_parameters() if "blocks" in name
        }


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
    model.blocks[0] = Block(8)
    return model


def over_tensor_parallelism(how: str, folder: str, again: str | None) -> None:
    """Save, or load and save, what two ranks of each of two data-parallel groups divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: nn.Module = even_network(0 if again is None else 1)
    plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    model = FullyShardedDataParallel(
        model, mesh["data"].get_group(), use_orig_params=how == "original"
    )
    state = {"model": model, "optim": AdamW(model.parameters(), lr=0.01, weight_decay=0.1)}
    if again is None:
        train(state, 0, 2)
        ckpt.save(folder, state)
    else:
        ckpt.load(folder, state)
        ckpt.save(again, state)


def test_parts_of_what_tensor_parallelism_divided_are_stored_as_parts_of_the_whole(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    model = even_network(0)
    state = {"model": model, "optim": AdamW(model.parameters(), lr=0.01, weight_decay=0.1)}
    train(state, 0, 2)
    ckpt.save(tmp_path / "unsharded", state)
    for how in ("flat", "original"):
        folder, again = str(tmp_path / how), str(tmp_path / f"{how}-again")
        clusters(4).run(over_tensor_parallelism, how, folder, None)
        assert_close(ckpt.read(folder), ckpt.read(tmp_path / "unsharded"))
        clusters(4).run(over_tensor_parallelism, how, folder, again)
        assert_equal(Path(again), Path(folder))


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


def by_torchs_wrapper(folder: str, again: str) -> None:
    """Load what is in a folder into torch's FSDP1, and save that."""
    model = network(1).requires_grad_(True)  # it refuses to flatten frozen ones with others
    model = torch_fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    ckpt.load(folder, {"model": model}, include="model.*")
    ckpt.save(again, {"model": model})


def by_our_wrapper(folder: str, again: str) -> None:
    model = wrapped("flat", 1)
    ckpt.load(folder, {"model": model})
    ckpt.save(again, {"model": model})


def test_torchs_wrapper_and_ours_load_each_others_models(
    clusters: Callable[[int], Any], saved: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    places = [str(saved[0] / "flat-on-2"), str(tmp_path / "torchs"), str(tmp_path / "ours")]
    clusters(2).run(by_torchs_wrapper, places[0], places[1])
    clusters(2).run(by_our_wrapper, places[1], places[2])
    given = ckpt.read(places[0])["model"]
    for place in places[1:]:
        found = ckpt.read(place)["model"]
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


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
