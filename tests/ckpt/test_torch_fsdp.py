"""Torch's FSDP1, saved and loaded by its pieces: into every other wrapping, and from it.

All ranks train on the same batch, so every wrapping computes what one process does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ckpt
import sharding
from sharding.wrap import ModuleWrapPolicy

WORDS, WIDTH = 11, 6
CPU = torch.device("cpu")


class Block(nn.Module):
    """Two layers around a bend, and a buffer: a unit inside."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x * self.scale)))


class Frozen(nn.Linear):
    """A unit that is not trained."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Network(nn.Module):
    """An embedding shared with the head, two blocks of odd sizes, a frozen layer, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(9), Block(7)])
        self.turn = Frozen()
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return self.head(self.turn(x))


def wrapped(how: str, seed: int = 0) -> nn.Module:
    """A network wrapped for this process group."""
    torch.manual_seed(seed)
    model: nn.Module = Network()
    kind, _, strategy = how.partition(" ")
    if kind == "unsharded":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    units = (Block, Frozen)
    if kind in ("fsdp2", "fully_shard"):
        function = torch_fsdp.fully_shard if kind == "fsdp2" else sharding.fully_shard
        for part in model.modules():
            if isinstance(part, units):
                function(part)
        return function(model)
    if kind == "composable":
        return sharding.composable.fully_shard(model, policy=ModuleWrapPolicy(units))
    original = kind.endswith("original")
    if not kind.startswith("torch"):
        return sharding.FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy(units), use_orig_params=original
        )
    mesh = None
    if "HYBRID" in strategy:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return TorchFSDP(
        model,
        auto_wrap_policy=TorchWrapPolicy(units),
        device_id=CPU,
        device_mesh=mesh,
        sharding_strategy=torch_fsdp.ShardingStrategy[strategy or "FULL_SHARD"],
        use_orig_params=original,
    )


def state_of(how: str, seed: int = 0) -> dict[str, Any]:
    """A wrapped network with its optimizer, the blocks in a group of their own."""
    model = wrapped(how, seed)
    inside = [p for name, p in model.named_parameters() if "blocks" in name]
    outside = [p for name, p in model.named_parameters() if "blocks" not in name]
    groups = [{"params": outside, "lr": 0.02}, {"params": inside, "betas": (0.8, 0.9)}]
    return {"model": model, "optim": AdamW(groups, lr=0.01, weight_decay=0.1)}


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


TORCHS = [
    ("torch-flat", 2),
    ("torch-original", 3),
    ("torch-original SHARD_GRAD_OP", 2),
    ("torch-flat NO_SHARD", 2),
    ("torch-original NO_SHARD", 2),
    ("torch-flat HYBRID_SHARD", 4),
    ("torch-original HYBRID_SHARD", 4),
]
OTHERS = [("unsharded", 1), ("ddp", 2), ("fsdp2", 2), ("fully_shard", 3)]
OTHERS += [("flat", 3), ("original", 2), ("composable", 2)]
PAIRS = [
    *((into, source) for into in OTHERS for source in (TORCHS[0], TORCHS[1], TORCHS[6])),
    *((into, source) for into in TORCHS for source in (TORCHS[0], TORCHS[1])),
    *((into, OTHERS[index % 7]) for index, into in enumerate(TORCHS)),
    *((into, OTHERS[(index + 3) % 7]) for index, into in enumerate(TORCHS)),
    (("torch-flat", 3), TORCHS[6]),
    (("torch-original", 1), TORCHS[5]),
    (("torch-original", 2), TORCHS[2]),
]
"""Target and source."""
KEEPING = ["torch-flat", "torch-original", "torch-flat SHARD_GRAD_OP"]
KEEPING += ["torch-original SHARD_GRAD_OP", "torch-original NO_SHARD"]
"""Ways of which torch keeps something whole after a forward, and one of which it does not."""


def named(how: str, ranks: int) -> str:
    return f"{how} on {ranks}".replace(" ", "-")


@pytest.fixture(scope="module")
def saved(
    clusters: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[float]]]:
    """A folder with what every way of wrapping saved, and the losses each trained with."""
    folder = tmp_path_factory.mktemp("saved")
    losses = {}
    for how, ranks in [*TORCHS, *OTHERS]:
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


def assert_alike(found: Path, wanted: Path, exact: bool) -> None:
    """The same names, shapes, types and values: bit for bit, or but for rounding."""
    one, other = flat_dict(ckpt.read(found)), flat_dict(ckpt.read(wanted))
    assert one.keys() == other.keys()
    for name, value in other.items():
        if isinstance(value, torch.Tensor) and exact:
            assert one[name].dtype == value.dtype, name
            assert torch.equal(one[name], value), name
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(one[name], value, msg=lambda m, name=name: f"{name}: {m}")
        elif name.endswith("param_groups"):
            for group, wanted_group in zip(one[name], value, strict=True):
                assert sorted(group.pop("params")) == sorted(wanted_group.pop("params"))
                assert group == wanted_group
        else:
            assert one[name] == value, name


@pytest.mark.parametrize(("how", "ranks"), TORCHS)
def test_a_checkpoint_of_torchs_fsdp_is_that_of_the_model_that_is_not_sharded(
    saved: tuple[Path, dict[str, list[float]]], how: str, ranks: int
) -> None:
    folder, losses = saved
    name = named(how, ranks)
    assert losses[name] == pytest.approx(losses["unsharded-on-1"], rel=1e-6)
    assert_alike(folder / name, folder / "unsharded-on-1", exact=False)


@pytest.mark.parametrize(("how", "ranks"), list(dict.fromkeys(into for into, _ in PAIRS)))
def test_training_goes_on_in_another_wrapping_as_it_would_have(
    clusters: Callable[[int], Any],
    saved: tuple[Path, dict[str, list[float]]],
    tmp_path: Path,
    how: str,
    ranks: int,
) -> None:
    folder, losses = saved
    sources = [named(*source) for into, source in PAIRS if into == (how, ranks)]
    folders = [(str(folder / name), str(tmp_path / name)) for name in sources]
    found = clusters(ranks).run(load_and_train, how, folders)
    for name, after in zip(sources, found[0], strict=True):
        assert after == pytest.approx(losses[name][2:], rel=1e-6), name
        assert_alike(tmp_path / name, folder / name, exact=True)
        if name == named(how, ranks):
            assert after == losses[name][2:]


def saved_without_steps(how: str, folder: str) -> list[list[tuple[int, ...]]]:
    """Save a module that has not run, load it into one that has not either."""
    ckpt.save(folder, state_of(how))
    other = state_of(how, seed=1)
    ckpt.load(folder, other)
    ckpt.save(f"{folder}-again", other)
    return [sorted(map(tuple, (p.shape for p in other["model"].parameters())))]


@pytest.mark.parametrize("how", ["torch-flat", "torch-original"])
def test_a_module_that_has_never_run_is_saved_and_loaded(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    clusters(2).run(saved_without_steps, how, str(tmp_path / "new"))
    plain = wrapped("unsharded")
    for folder in ("new", "new-again"):
        read = ckpt.read(tmp_path / folder)["model"]
        assert sorted(read) == sorted(plain.state_dict())
        for name, tensor in plain.state_dict().items():
            assert torch.equal(read[name], tensor), name


def scores_after_loading(how: str, folder: str, grad: bool) -> tuple[list[float], list[float]]:
    """What a module that has just run without a backward computes, once it was loaded."""
    tokens = torch.arange(WORDS)
    state = state_of(how, seed=1)
    with torch.set_grad_enabled(grad):
        state["model"](tokens)
    ckpt.load(folder, state["model"])
    with torch.no_grad():
        return state["model"](tokens).sum(1).tolist(), wrapped("unsharded")(tokens).sum(1).tolist()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", KEEPING)
def test_what_torch_keeps_whole_after_a_forward_does_not_outlive_a_load(
    clusters: Callable[[int], Any], tmp_path: Path, how: str, grad: bool
) -> None:
    ckpt.save(tmp_path, wrapped("unsharded"))
    for found, wanted in clusters(2).run(scores_after_loading, how, str(tmp_path), grad):
        assert found == pytest.approx(wanted, rel=1e-5)


def saved_between(how: str, folder: str) -> tuple[list[float], list[float]]:
    """The losses of two runs, one of which is saved between forward and backward."""
    runs = []
    for saves in (False, True):
        state = state_of(how)
        losses = []
        for step in range(3):
            loss = state["model"](torch.arange(WORDS) % (step + 2)).square().mean()
            if saves:
                ckpt.save(folder, state, overwrite=True)
            state["optim"].zero_grad()
            loss.backward()
            state["optim"].step()
            losses.append(loss.item())
        runs.append(losses)
    return runs[0], runs[1]


@pytest.mark.parametrize("how", KEEPING)
def test_saving_between_forward_and_backward_changes_nothing(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    for one, other in clusters(2).run(saved_between, how, str(tmp_path)):
        assert one == other


def kept_for_empty_parts(folder: str) -> list[tuple[int, int]]:
    """For each parameter its elements here, and the entries that a loaded optimizer has for it."""
    state = state_of("torch-original", seed=1)
    ckpt.load(folder, state)
    held = state["optim"].state
    return [(p.numel(), len(held.get(p, {}))) for p in state["model"].parameters()]


def test_a_rank_without_elements_of_a_parameter_gets_no_optimizer_state_for_it(
    clusters: Callable[[int], Any], saved: tuple[Path, dict[str, list[float]]]
) -> None:
    found = clusters(3).run(kept_for_empty_parts, str(saved[0] / "ddp-on-2"))
    assert any(numel == 0 for rank in found for numel, _ in rank)
    frozen = 2
    for rank in found:
        assert all(entries == 0 for numel, entries in rank if numel == 0)
        assert sum(numel > 0 and entries == 0 for numel, entries in rank) <= frozen


def optimizer_alone(how: str, folder: str) -> None:
    state = state_of(how)
    train(state, 0, 1)
    ckpt.save(folder, {"optim": state["optim"]})


@pytest.mark.parametrize("how", ["torch-flat", "torch-original", "flat", "original"])
def test_an_optimizer_of_parts_without_its_module_is_refused(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    with pytest.raises(Exception, match="put the module into the state") as caught:
        clusters(2).run(optimizer_alone, how, str(tmp_path))
    assert len(caught.value.errors) == 2  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def torchs_state_dict(folder: str, kind: str) -> dict[str, Any]:
    """Save torch's state dict of a kind, and load it into another module's."""
    state = state_of("torch-flat")
    train(state, 0, 1)
    ckpt.save(f"{folder}-direct", state["model"])
    other = state_of("torch-flat", seed=1)["model"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TorchFSDP.state_dict_type(state["model"], StateDictType[kind]):
            ckpt.save(folder, state["model"].state_dict())
        with TorchFSDP.state_dict_type(other, StateDictType[kind]):
            target = other.state_dict()
            ckpt.load(folder, target)
            other.load_state_dict(target)
    ckpt.save(f"{folder}-again", other)
    return {name: type(value).__name__ for name, value in target.items()}


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_sharded_tensors_of_torchs_state_dicts_are_saved_and_filled_in_place(
    clusters: Callable[[int], Any], tmp_path: Path, kind: str
) -> None:
    found = clusters(3).run(torchs_state_dict, str(tmp_path / "dict"), kind)[0]
    assert "ShardedTensor" in found.values()
    direct, again = ckpt.read(tmp_path / "dict-direct"), ckpt.read(tmp_path / "dict-again")
    read = ckpt.read(tmp_path / "dict")
    for name, tensor in direct.items():
        assert torch.equal(again[name], tensor), name
        if kind == "SHARDED_STATE_DICT":
            assert torch.equal(read[name], tensor), name
    if kind == "LOCAL_STATE_DICT":
        unit = [direct[f"blocks.1.{name}"] for name in ("up.weight", "up.bias", "down.weight")]
        whole = torch.cat([tensor.reshape(-1) for tensor in (*unit, direct["blocks.1.down.bias"])])
        assert torch.equal(read["blocks.1._flat_param"], whole)


class Counting(nn.Module):
    """A layer with a buffer, and state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("scale", torch.linspace(0.1, 0.3, 3))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x * self.scale.to(x.dtype))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def counting(original: bool, folder: str) -> tuple[int, str, list[float], bool]:
    """What a unit under mixed precision has after it was saved, changed and loaded."""
    mixed = torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    arguments = {"device_id": CPU, "use_orig_params": original, "mixed_precision": mixed}
    model = TorchFSDP(nn.Sequential(TorchFSDP(Counting(), **arguments)), **arguments)
    model(torch.ones(2, 3)).float().sum().backward()
    ckpt.save(folder, model)
    inner = model.module[0].module
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    inner.seen = 0
    ckpt.load(folder, model)
    same = all(map(torch.equal, before, model.parameters()))
    return inner.seen, str(inner.scale.dtype), inner.scale.tolist(), same


@pytest.mark.parametrize("original", [False, True])
def test_extra_state_and_buffers_of_mixed_precision_are_loaded_by_the_module_itself(
    clusters: Callable[[int], Any], tmp_path: Path, original: bool
) -> None:
    wanted = torch.linspace(0.1, 0.3, 3).bfloat16()
    for seen, dtype, scale, same in clusters(2).run(counting, original, str(tmp_path)):
        assert (seen, dtype, scale, same) == (1, "torch.bfloat16", wanted.tolist(), True)
    assert ckpt.read(tmp_path)["0.scale"].dtype == torch.float32


def accumulated(how: str, folder: str) -> tuple[list[float], list[float]]:
    """The losses of two runs over two batches a step, one saved while gradients are summed."""
    runs = []
    for saves in (False, True):
        state = state_of(how)
        losses = []
        for step in range(2):
            with state["model"].no_sync():
                state["model"](torch.arange(WORDS)).square().mean().backward()
            if saves:
                ckpt.save(folder, state, overwrite=True)
            loss = state["model"](torch.arange(WORDS) % (step + 2)).square().mean()
            loss.backward()
            state["optim"].step()
            state["optim"].zero_grad()
            losses.append(loss.item())
        runs.append(losses)
    return runs[0], runs[1]


@pytest.mark.parametrize("how", KEEPING)
def test_saving_while_gradients_are_summed_changes_nothing(
    clusters: Callable[[int], Any], tmp_path: Path, how: str
) -> None:
    for one, other in clusters(2).run(accumulated, how, str(tmp_path)):
        assert one == other
