"""State dicts of modules with flat parameters: every kind, form, wrapping and way to load them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sharding
from sharding import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from sharding.describe.members import LocalPart
from sharding.describe.own_members import FLAT_PARAMETERS, local_parts
from sharding.engine.parameter import UnshardedBuffer
from sharding.errors import CkptError
from sharding.wrap import ModuleWrapPolicy
from tests.conftest import RankFailed
from tests.networks import ScaledBlock
from tests.sharding.state_dict_forms import (
    FLAT_FORMS,
    FULL,
    LOCAL,
    SHARDED,
    WIDTH,
    in_form,
    whole,
)
from tests.sharding.test_redistribute import largest_file
from tests.traffic import received_while

FSDP = FullyShardedDataParallel
CPU = torch.device("cpu")


class Network(nn.Module):
    """Tied ends, two blocks, a frozen layer, a number, buffers of all kinds, an ignored layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([ScaledBlock(3, WIDTH), ScaledBlock(4, WIDTH)])
        self.turn = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.outside = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return self.head(self.norm(self.outside(self.turn(x)))) * self.gain


def network(seed: int = 0) -> Network:
    """A network with other values for every seed, in buffers too."""
    torch.manual_seed(seed)
    model = Network()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_()
    return model


def wrapped(form: str, seed: int = 0, **arguments: Any) -> Any:
    """A network in a form of the runtime; each block a unit, `outside` ignored."""
    return in_form(form, network(seed), **arguments)


def assert_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same names in the same order, and the same bits."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        mine = whole(found[name])
        assert mine.dtype == value.dtype, name
        assert torch.equal(mine, value), name


def forget(model: nn.Module) -> None:
    """Zero what is sharded: state dicts share the memory of what is ignored."""
    for name, parameter in model.named_parameters():
        if "outside" not in name:
            nn.init.zeros_(parameter)


def kind_of(kind: str) -> StateDictType:
    return StateDictType[f"{kind}_STATE_DICT"]


def save_and_load(form: str, kind: str, strategy: str) -> None:
    how = {"strategy" if form == "composable" else "sharding_strategy": ShardingStrategy[strategy]}
    model, plain = wrapped(form, **how), network()
    FSDP.set_state_dict_type(model, kind_of(kind))
    state = model.state_dict()
    if kind != "LOCAL":
        assert_state(state, plain.state_dict())
        tied = state["embedding.weight"], state["head.weight"]
        assert tied[0].data_ptr() == tied[1].data_ptr() if kind == "FULL" else tied[0] is tied[1]
        divided = dist.get_world_size() > 1 and strategy != "NO_SHARD"
        assert isinstance(tied[0], DTensor) == (kind == "SHARDED" and divided)
    other = wrapped(form, seed=1, **how)
    FSDP.set_state_dict_type(other, kind_of(kind))
    assert other.load_state_dict(state) == ([], [])
    assert list(other.state_dict()) == list(state)
    FSDP.set_state_dict_type(other, FULL)
    assert_state(other.state_dict(), plain.state_dict())
    loaded = network(2)
    if kind == "FULL":
        loaded.load_state_dict(state)
        assert_state(loaded.state_dict(), plain.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("form", FLAT_FORMS)
def test_a_state_dict_is_the_plain_modules_and_loads_into_another(
    clusters: Any, form: str, kind: str, world_size: int
) -> None:
    clusters(world_size).run(save_and_load, form, kind, "FULL_SHARD")


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("form", FLAT_FORMS)
def test_so_it_is_where_nothing_is_divided(clusters: Any, form: str, kind: str) -> None:
    clusters(2).run(save_and_load, form, kind, "NO_SHARD")


class Drawn(nn.Module):
    """Parameters of shapes drawn from a seed: empty, without dimensions, odd."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        for index in range(2 + draw(5)):
            shape = [draw(6) for _ in range(draw(4))]
            values = torch.randn(shape, generator=generator)
            self.register_parameter(f"p{index}", nn.Parameter(values))
        if not sum(parameter.numel() for parameter in self.parameters()):
            self.last = nn.Parameter(torch.ones(3))


def received_by(module: Any) -> tuple[dict[str, Any], int]:
    """A sharded state dict, and the bytes of messages that this rank got for it."""
    with FSDP.state_dict_type(module, SHARDED):
        return received_while(module.state_dict)


def drawn_shapes(seeds: range) -> None:
    for seed in seeds:
        plain = Drawn(seed)
        model = FSDP(Drawn(seed), use_orig_params=bool(seed % 2))
        state, received = received_by(model)
        assert_state(state, plain.state_dict())
        needed = 0
        for name, part in local_parts(local_of(model)).items():
            lo, hi = part.layout.span(dist.get_rank())
            value, inner = state[name], 0
            first, last = 0, part.layout.numel
            if isinstance(value, DTensor):
                inner = value.shape[1:].numel() if value.shape[0] else 0
                step = -(-value.shape[0] // dist.get_world_size())
                first = min(value.shape[0], step * dist.get_rank()) * inner
                last = first + value.to_local().numel()
            needed += max(0, last - first) - max(0, min(hi, last) - max(lo, first))
        assert received == 4 * needed
        forget(model)
        with FSDP.state_dict_type(model, SHARDED):
            model.load_state_dict(state)
        assert_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_shapes_go_to_rows_and_back_and_only_what_changes_hands_travels(
    clusters: Any, world_size: int
) -> None:
    clusters(world_size).run(drawn_shapes, range(12))


def differing_names() -> None:
    model = wrapped("flat")
    FSDP.set_state_dict_type(model, SHARDED)
    state = model.state_dict()
    if dist.get_rank() == 1:
        del state["blocks.1.down.weight"]
    model.load_state_dict(state, strict=False)


def test_ranks_that_load_other_names_are_told_so(clusters: Any) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(differing_names)
    for name, message, _ in failed.value.errors.values():
        assert name == "ShardingError"
        assert "other names, dtypes or placements" in message


def differing_placements(form: str) -> None:
    model = wrapped(form)
    FSDP.set_state_dict_type(model, SHARDED)
    state = model.state_dict()
    name = "blocks.1.down.weight"
    if dist.get_rank() == 1:
        mesh = state[name].device_mesh
        state[name] = DTensor.from_local(torch.zeros(state[name].shape), mesh, [Replicate()])
    model.load_state_dict(state)


@pytest.mark.parametrize("form", ["flat", "original"])
def test_ranks_that_load_other_placements_are_told_so_and_where(clusters: Any, form: str) -> None:
    with pytest.raises(RankFailed) as failed:
        clusters(2).run(differing_placements, form)
    for name, message, _ in failed.value.errors.values():
        assert name == "ShardingError"
        assert message.startswith("blocks.1: the ranks load sharded state dicts with other")


# --- Where instances are --------------------------------------------------------------------------


def partial_wrapping() -> None:
    plain = network()
    for build in ("blocks alone", "one block", "the root alone", "three deep"):
        for use_orig_params in (False, True):
            model = network()
            if build == "blocks alone":
                for index, block in enumerate(model.blocks):
                    model.blocks[index] = FSDP(block, use_orig_params=use_orig_params)
            elif build == "one block":
                model.blocks[1] = FSDP(model.blocks[1], use_orig_params=use_orig_params)
            elif build == "the root alone":
                model = FSDP(model, use_orig_params=use_orig_params)
            else:
                for index, block in enumerate(model.blocks):
                    block.up = FSDP(block.up, use_orig_params=use_orig_params)
                    model.blocks[index] = FSDP(block, use_orig_params=use_orig_params)
                model = FSDP(model, use_orig_params=use_orig_params)
            for kind in (FULL, SHARDED):
                FSDP.set_state_dict_type(model, kind)
                state = copy.deepcopy(model.state_dict())
                assert_state(state, plain.state_dict())
                forget(model)
                model.load_state_dict(state)
                assert_state(model.state_dict(), plain.state_dict())
            if build == "the root alone":  # which has the parameters of the blocks
                continue
            inside = model.blocks[1].state_dict()
            assert_state(inside, plain.blocks[1].state_dict())
            prefixed = model.blocks[1].state_dict(prefix="x.")
            assert_state(prefixed, {f"x.{name}": whole(v) for name, v in inside.items()})


@pytest.mark.thorough
def test_instances_may_be_anywhere_and_be_asked_alone(clusters: Any) -> None:
    clusters(2).run(partial_wrapping)


class Apart(nn.Module):
    """A weight that two units have, neither inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def tied_across_units(form: str) -> None:
    torch.manual_seed(0)
    plain = Apart()
    wanted = plain.state_dict()
    model = copy.deepcopy(plain)
    for name in ("first", "second"):
        part = getattr(model, name)
        if form == "composable":
            sharding.composable.fully_shard(part)
        else:
            setattr(model, name, FSDP(part, use_orig_params=form == "original"))
    for kind in (FULL, SHARDED):
        FSDP.set_state_dict_type(model, kind)
        state = model.state_dict()
        assert_state({name: state[name] for name in wanted}, wanted)
        forget(model)
        model.load_state_dict(state)
        state = model.state_dict()
        assert_state({name: state[name] for name in wanted}, wanted)


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_a_weight_that_two_units_have_is_in_both_places(clusters: Any, form: str) -> None:
    clusters(2).run(tied_across_units, form)


class TiedToRoot(Apart):
    """The root has the second layer, and a third one with a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(3, 3)
        self.third.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def tied_to_the_root(form: str) -> None:
    torch.manual_seed(0)
    plain = TiedToRoot()
    wanted = plain.state_dict()
    model = copy.deepcopy(plain)
    if form == "composable":
        sharding.composable.fully_shard(model.first)
        sharding.composable.fully_shard(model)
    else:
        model.first = FSDP(model.first, use_orig_params=form == "original")
        model = FSDP(model, use_orig_params=form == "original")
        with FSDP.summon_full_params(model):
            names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()]
    for kind in (FULL, SHARDED):
        FSDP.set_state_dict_type(model, kind)
        state = model.state_dict()
        assert_state(state, wanted)
        forget(model)
        assert model.load_state_dict(state) == ([], [])
        assert_state(model.state_dict(), wanted)
    FSDP.set_state_dict_type(model, LOCAL)
    state = copy.deepcopy(model.state_dict())
    names = set(wanted) - ({"second.weight"} if form == "flat" else set())
    assert set(local_parts(state)) == names
    forget(model)
    assert model.load_state_dict(state) == ([], [])
    FSDP.set_state_dict_type(model, FULL)
    assert_state(model.state_dict(), wanted)


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_a_weight_that_a_unit_and_the_root_have_is_loaded_into_both_and_in_its_order(
    clusters: Any, form: str
) -> None:
    clusters(2).run(tied_to_the_root, form)


def checkpoint_wrapped(where: str, use_orig_params: bool) -> None:
    plain, model = network(), network()
    for index, block in enumerate(model.blocks):
        if where == "outside":
            model.blocks[index] = checkpoint_wrapper(FSDP(block, use_orig_params=use_orig_params))
        elif where == "inside":
            model.blocks[index] = FSDP(checkpoint_wrapper(block), use_orig_params=use_orig_params)
        else:
            block.up = checkpoint_wrapper(block.up)
            model.blocks[index] = FSDP(block, use_orig_params=use_orig_params)
    model = FSDP(model, use_orig_params=use_orig_params)
    for kind in (FULL, SHARDED, LOCAL):
        FSDP.set_state_dict_type(model, kind)
        state = copy.deepcopy(model.state_dict())
        assert not any("wrapped_module" in name for name in state)
        if kind is LOCAL:
            assert set(local_parts(state)) == set(plain.state_dict())
        else:
            assert_state(state, plain.state_dict())
        forget(model)
        assert model.load_state_dict(state) == ([], [])
        FSDP.set_state_dict_type(model, FULL)
        assert_state(model.state_dict(), plain.state_dict())
        found = model.load_state_dict({}, strict=False).missing_keys
        assert set(found) == set(network().load_state_dict({}, strict=False).missing_keys)


@pytest.mark.thorough
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside", "deep inside"])
def test_names_are_without_what_activation_checkpointing_adds(
    clusters: Any, where: str, use_orig_params: bool
) -> None:
    clusters(2).run(checkpoint_wrapped, where, use_orig_params)


def after_training(form: str) -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model, replica = wrapped(form, mixed_precision=precision, ignored_states=[]), network()
    model(torch.arange(4)).sum().backward()
    assert {b.dtype for n, b in model.named_buffers() if n.endswith("scale")} == {torch.bfloat16}
    for kind in (FULL, SHARDED):
        FSDP.set_state_dict_type(model, kind)
        state = model.state_dict()
        for name, value in replica.state_dict().items():
            assert state[name].dtype == value.dtype, name
            if name in dict(replica.named_parameters()):
                assert torch.equal(whole(state[name]), value)


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_mixed_precision_shows_in_no_state_dict(clusters: Any, form: str) -> None:
    clusters(2).run(after_training, form)


def while_summoned(form: str) -> None:
    model, plain = wrapped(form), network()
    for kind in (FULL, SHARDED):
        FSDP.set_state_dict_type(model, kind)
        with FSDP.summon_full_params(model):
            assert_state(model.state_dict(), plain.state_dict())
        assert_state(model.state_dict(), plain.state_dict())
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        assert_state(model.state_dict(), plain.state_dict())
    with FSDP.summon_full_params(model):
        model.get_parameter(next(n for n, _ in model.named_parameters() if "gain" in n)).data += 1
        assert whole(model.state_dict()["gain"]).item() == 1.75


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_they_are_the_same_inside_summon_full_params(clusters: Any, form: str) -> None:
    clusters(2).run(while_summoned, form)


# --- What is complained of ------------------------------------------------------------------------


def complaints(form: str, kind: str) -> list[tuple[str, str]]:
    model, plain = wrapped(form), network()
    FSDP.set_state_dict_type(model, kind_of(kind))
    found = []
    full = plain.state_dict()
    bigger = {**full, "blocks.1.up.weight": torch.zeros(9, WIDTH)}
    less = {k: v for k, v in full.items() if k not in ("blocks.0.up.bias", "gain", "calls")}
    more = {**full, "blocks.0.extra": torch.zeros(2), "strange": torch.zeros(2)}
    for state in (bigger, less, more):
        for target in (model, network(1)):
            try:
                target.load_state_dict(dict(state))
            except RuntimeError as error:
                found.append(str(error).partition("\n")[2])
    outcome = model.load_state_dict(less, strict=False)
    assert set(outcome.missing_keys) == {"blocks.0.up.bias", "gain", "calls"}
    outcome = model.load_state_dict(more, strict=False)
    assert set(outcome.unexpected_keys) == {"strange", "blocks.0.extra"}
    FSDP.set_state_dict_type(model, FULL)
    assert_state(model.state_dict(), full)
    return found


def lines_of(complaint: str) -> set[str]:
    """What is named in a complaint, in no order."""
    return {word for word in complaint.replace('"', " ").split() if "." in word or "gain" in word}


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("form", FLAT_FORMS)
def test_it_complains_as_the_plain_module_does(clusters: Any, form: str, kind: str) -> None:
    for found in clusters(2).run(complaints, form, kind):
        assert len(found) == 6
        for mine, theirs in zip(found[::2], found[1::2], strict=True):
            assert "_fsdp_wrapped_module" not in mine.partition("size mismatch")[0]
            assert lines_of(mine.replace("_fsdp_wrapped_module.", "")) == lines_of(theirs)


class Renaming(nn.Module):
    """A module whose state dicts have another name for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self._register_state_dict_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}old"] = state.pop(f"{prefix}layer.weight")

    @staticmethod
    def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}layer.weight"] = state.pop(f"{prefix}old")


def renamed(form: str) -> None:
    torch.manual_seed(0)
    plain = Renaming()
    wanted = plain.state_dict()
    model = copy.deepcopy(plain)
    if form == "composable":
        sharding.composable.fully_shard(model)
    else:
        model = FSDP(model, use_orig_params=form == "original")
    state = model.state_dict()
    assert set(state) == set(wanted)
    assert torch.equal(state["old"], wanted["old"])
    forget(model)
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()["old"], wanted["old"])


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_hooks_of_modules_may_rename_what_a_full_state_dict_has(clusters: Any, form: str) -> None:
    clusters(2).run(renamed, form)


# --- Memory ---------------------------------------------------------------------------------------


class Buffers:
    """The buffers of whole units that are made inside, and how many live at once."""

    def __enter__(self) -> Buffers:
        self.made = self.most = self._alive = 0
        self._init = UnshardedBuffer.__init__
        self._del = getattr(UnshardedBuffer, "__del__", None)
        watch = self

        def made(buffer: UnshardedBuffer, *arguments: Any, **keywords: Any) -> None:
            watch._init(buffer, *arguments, **keywords)
            watch.made += 1
            watch._alive += 1
            watch.most = max(watch.most, watch._alive)

        def gone(buffer: UnshardedBuffer) -> None:
            watch._alive -= 1

        UnshardedBuffer.__init__ = made  # type: ignore[method-assign]
        UnshardedBuffer.__del__ = gone  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        UnshardedBuffer.__init__ = self._init  # type: ignore[method-assign]
        del UnshardedBuffer.__del__


def memory(form: str) -> list[tuple[int, int]]:
    model = wrapped(form)
    model.state_dict()  # whatever is made once is there
    counts = []
    for kind, config in (
        (FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)),
        (SHARDED, None),
        (LOCAL, None),
    ):
        with FSDP.state_dict_type(model, kind, config), Buffers() as buffers:
            state = model.state_dict()
            if kind is not FULL:
                model.load_state_dict(state)
            else:
                assert bool(state) == (dist.get_rank() == 0)
        counts.append((buffers.made, buffers.most))
    return counts


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_other_ranks_have_one_unit_whole_at_a_time_and_sharded_ones_none(
    clusters: Any, form: str
) -> None:
    first, second = clusters(2).run(memory, form)
    assert second == [(4, 1), (0, 0), (0, 0)]
    assert first[1:] == [(0, 0), (0, 0)]


def own_memory(form: str) -> None:
    model = wrapped(form)
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for kind, config in (
        (FULL, FullStateDictConfig(offload_to_cpu=True)),
        (SHARDED, ShardedStateDictConfig(offload_to_cpu=True)),
    ):
        with FSDP.state_dict_type(model, kind, config):
            state = model.state_dict()
        locals_ = {n: v.to_local() if isinstance(v, DTensor) else v for n, v in state.items()}
        before = {name: value.clone() for name, value in locals_.items()}
        model(torch.arange(4)).sum().backward()
        optim.step()
        optim.zero_grad()
        for name, _ in network().named_parameters():
            value = locals_[name]
            assert value.untyped_storage().nbytes() == value.numel() * value.itemsize, name
            assert name.startswith("outside") or torch.equal(value, before[name]), name


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_values_are_in_memory_of_their_own_that_training_does_not_touch(
    clusters: Any, form: str
) -> None:
    clusters(2).run(own_memory, form)


# --- Local state dicts ----------------------------------------------------------------------------


def local_alone(form: str) -> list[str] | None:
    """One rank makes, reads and loads one; the other does nothing."""
    model = wrapped(form)
    FSDP.set_state_dict_type(model, LOCAL)
    if dist.get_rank() == 0:
        return None
    state = model.state_dict()
    memory = {p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()}
    plain = network()
    for name, value in state.items():
        if value.numel() and (name in dict(plain.named_parameters()) or "_flat_param" in name):
            assert value.untyped_storage().data_ptr() in memory
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    wanted = plain.state_dict()
    for each in (state, loaded):
        parts = local_parts(each, rank=1, world_size=2)
        assert set(parts) == set(wanted)
        for name, part in parts.items():
            if isinstance(part, LocalPart):
                lo, hi = part.layout.span(1)
                assert part.layout.shape == tuple(wanted[name].shape)
                assert torch.equal(part.local, wanted[name].reshape(-1)[lo:hi]), name
            else:
                assert torch.equal(part, wanted[name])
    forget(model)
    model.load_state_dict(loaded)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded[name])
    return list(state)


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_a_local_one_is_the_shards_themselves_says_what_they_are_and_asks_nobody(
    clusters: Any, form: str
) -> None:
    _, names = clusters(2).run(local_alone, form)
    plain = list(network().state_dict())
    if form == "flat":
        assert [name for name in names if name not in plain] == [
            "_flat_param",
            "_flat_param_1",
            "blocks.0._flat_param",
            "blocks.1._flat_param",
        ]
    else:
        assert names == plain


def changed(state: Any, how: str) -> Any:
    """A local state dict with something wrong."""
    state = copy.deepcopy(state)
    key = "blocks.1._flat_param" if "blocks.1._flat_param" in state else "blocks.1.down.weight"
    records = [m[FLAT_PARAMETERS] for m in state._metadata.values() if FLAT_PARAMETERS in m]
    if how == "truncated":
        state[key] = state[key][:-1]
    for (record,) in (each[-1:] for each in records):
        if how == "another world":
            record["world_size"] = 3
        elif how == "another rank":
            record["rank"] = 1 - record["rank"]
        elif how == "another wrapping":
            record["offsets"] = (1, *record["offsets"])
    return state


def bad_local(form: str) -> dict[str, str]:
    model = wrapped(form)
    FSDP.set_state_dict_type(model, LOCAL)
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    other = wrapped(form, seed=1)
    FSDP.set_state_dict_type(other, LOCAL)
    found = {}
    for how in ("truncated", "another world", "another rank", "another wrapping"):
        try:
            model.load_state_dict(changed(other.state_dict(), how))
        except ValueError as error:
            found[how] = f"{type(error).__name__}: {error}"
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), (how, name)
    for how in ("truncated", "another world"):
        try:
            local_parts(changed(state, how), world_size=2)
        except ValueError as error:
            found[f"{how}, read"] = f"{type(error).__name__}: {error}"
    try:
        local_parts(dict(state), world_size=2)
    except ValueError as error:
        found["bare"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_a_local_one_that_does_not_fit_is_an_error_before_anything_is_changed(
    clusters: Any, form: str
) -> None:
    for rank, found in enumerate(clusters(2).run(bad_local, form)):
        assert found["truncated"].startswith("LocalShapeError: blocks.1.")
        assert f"rank {rank} has" in found["truncated"]
        assert found["another world"].startswith("WorldMismatchError")
        assert found["another rank"].startswith("WorldMismatchError")
        assert found["another wrapping"].startswith("LocalShapeError")
        assert found["truncated, read"].startswith("LocalShapeError: blocks.1.")
        assert found["another world, read"].startswith("WorldMismatchError")
        assert ("bare" in found) == (form == "flat")


# --- Meshes ---------------------------------------------------------------------------------------


def over_a_mesh(form: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    arguments: dict[str, Any] = {"device_mesh": mesh}
    if form in ("composable", "groups"):
        arguments = {"process_group": (mesh.get_group(1), mesh.get_group(0))}
    kind = "strategy" if form == "composable" else "sharding_strategy"
    arguments[kind] = ShardingStrategy.HYBRID_SHARD
    model, plain = wrapped(form, **arguments), network()
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
        assert_state(state, plain.state_dict())
        value = state["embedding.weight"]
        assert tuple(value.placements) == (Replicate(), Shard(0))
        assert value.device_mesh.mesh.tolist() == mesh.mesh.tolist()
        assert value.to_local().shape[0] == (4 if mesh.get_local_rank(1) == 0 else 3)
        forget(model)
        model.load_state_dict(state)
        assert_state(model.state_dict(), plain.state_dict())
        forget(model)
        world = init_device_mesh("cpu", (4,))
        columns = {
            n: distribute_tensor(v.detach(), world, [Shard(v.ndim - 1)]) if v.ndim else v
            for n, v in plain.state_dict().items()
        }
        for name in ("outside.weight", "outside.bias", "blocks.0.scale", "blocks.1.scale"):
            columns[name] = plain.state_dict()[name]
        for name in [name for name in columns if name.startswith("norm.running")]:
            columns[name] = plain.state_dict()[name]
        model.load_state_dict(columns)
        assert_state(model.state_dict(), plain.state_dict())
    parts = local_parts(local_of(model))
    assert parts["embedding.weight"].layout.mesh.sizes == (2, 2)
    assert_state(model.state_dict(), plain.state_dict())


def local_of(model: Any) -> Any:
    with FSDP.state_dict_type(model, LOCAL):
        return model.state_dict()


@pytest.mark.parametrize("form", [*FLAT_FORMS, "groups"])
def test_hybrid_ones_are_dtensors_over_both_dimensions(clusters: Any, form: str) -> None:
    clusters(4).run(over_a_mesh, form)


def after_tensor_parallelism(use_orig_params: bool, with_mesh: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model: Any = copy.deepcopy(plain)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    given = (
        {"device_mesh": mesh["data"]} if with_mesh else {"process_group": mesh["data"].get_group()}
    )
    model = FSDP(model, use_orig_params=use_orig_params, **given)
    for kind in (SHARDED, FULL):
        FSDP.set_state_dict_type(model, kind)
        with Buffers() as buffers:
            state = model.state_dict()
        assert (buffers.made == 0) == (kind is SHARDED)
        assert_state(state, plain.state_dict())
        if kind is SHARDED:
            assert state["0.weight"].device_mesh.ndim == 2
            assert state["0.weight"].to_local().shape == (2, 6)
        forget(model)
        model.load_state_dict(state)
        assert_state(model.state_dict(), plain.state_dict())
    FSDP.set_state_dict_type(model, SHARDED)
    model.load_state_dict(plain.state_dict())
    assert_state(model.state_dict(), plain.state_dict())


@pytest.mark.thorough
@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_over_tensor_parallelism_they_are_dtensors_over_the_grid(
    clusters: Any, use_orig_params: bool, with_mesh: bool
) -> None:
    clusters(4).run(after_tensor_parallelism, use_orig_params, with_mesh)


# --- torch's --------------------------------------------------------------------------------------


def of_torch(use_orig_params: bool) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.BatchNorm1d(7))

    plain = build(0)
    theirs = torch_fsdp.FullyShardedDataParallel(
        build(0), device_id=CPU, use_orig_params=use_orig_params
    )
    mine = FSDP(build(1), use_orig_params=use_orig_params)
    kinds, configs = torch_fsdp.StateDictType, torch_fsdp
    for kind, config in (
        (kinds.FULL_STATE_DICT, configs.FullStateDictConfig(rank0_only=False)),
        (kinds.SHARDED_STATE_DICT, configs.ShardedStateDictConfig()),
    ):
        torch_fsdp.FullyShardedDataParallel.set_state_dict_type(theirs, kind, config)
        FSDP.set_state_dict_type(mine, kind, config)
        settings = FSDP.get_state_dict_type(mine)
        assert settings.state_dict_type is StateDictType[kind.name]
        mine.load_state_dict(theirs.state_dict())
        FSDP.set_state_dict_type(mine, FULL)
        assert_state(mine.state_dict(), plain.state_dict())
        forget(mine)
    with pytest.raises(RuntimeError, match="Expected optim_state_dict_config of type"):
        FSDP.set_state_dict_type(mine, FULL, None, configs.ShardedOptimStateDictConfig())
    with pytest.raises(TypeError, match="expected a StateDictType"):
        FSDP.set_state_dict_type(mine, "full")


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torchs_settings_mean_ours_and_its_state_dicts_load(
    clusters: Any, use_orig_params: bool
) -> None:
    clusters(2).run(of_torch, use_orig_params)


def from_the_first_rank() -> None:
    saved = wrapped("flat")
    with FSDP.state_dict_type(saved, FULL, FullStateDictConfig(True, rank0_only=True)):
        state = saved.state_dict()
    plain = network(1 + dist.get_rank())
    if dist.get_rank() == 0:
        plain.load_state_dict(state)
    model = FSDP(plain, sync_module_states=True, auto_wrap_policy=ModuleWrapPolicy({ScaledBlock}))
    assert_state(model.state_dict(), network().state_dict())


def test_what_the_first_rank_loads_all_have_after_sync_module_states(clusters: Any) -> None:
    clusters(4).run(from_the_first_rank)


def interrupted(form: str) -> None:
    """An error in the middle of a state dict; training and the next state dict know nothing."""
    model = wrapped(form)

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    hook = model.blocks[1].up.register_state_dict_pre_hook(fail)
    with pytest.raises(KeyError):
        model.state_dict()
    hook.remove()
    assert_state(model.state_dict(), network().state_dict())


def failing_in_the_move(form: str) -> list[tuple[str, str]]:
    """The errors of sharded state dicts of which rank 1 cannot move its part."""
    models = [wrapped(form, seed) for seed in (0, 1)]
    is_it, found = dist.get_rank() == 1, []

    def noting(action: Callable[[], Any]) -> None:
        with pytest.raises(CkptError) as caught, largest_file(0 if is_it else 1 << 30):
            action()
        found.append((type(caught.value).__name__, str(caught.value)))

    with FSDP.state_dict_type(models[0], SHARDED), FSDP.state_dict_type(models[1], SHARDED):
        state = models[0].state_dict()
        noting(models[0].state_dict)
        noting(lambda: models[1].load_state_dict(state))
        if form == "original" and is_it:
            hook = models[0].blocks[1].up._register_state_dict_hook(drop)
        if form == "original":
            noting(models[0].state_dict)
        if form == "original" and is_it:
            hook.remove()
        assert_state(models[0].state_dict(), network().state_dict())  # the group is of use
        models[1].load_state_dict(models[0].state_dict())
        assert_state(models[1].state_dict(), network().state_dict())
    return found


def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[f"{prefix}weight"]


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_a_rank_that_fails_in_the_move_of_a_sharded_one_is_told_on_all_at_once(
    clusters: Any, form: str
) -> None:
    first, second = clusters(2).run(failing_in_the_move, form)
    for (name, text), (own, cause) in zip(first, second, strict=True):
        assert (name, own) == ("RankError", "ShardingError")
        assert "failed on rank 1 with ShardingError" in text
        assert cause in text


@pytest.mark.parametrize("form", FLAT_FORMS)
def test_after_an_error_in_the_middle_the_next_one_is_right(clusters: Any, form: str) -> None:
    clusters(2).run(interrupted, form)


def compiled_with_own_entries(form: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        module = torch.compile(nn.Sequential(nn.Linear(3, 2)))
        module.register_parameter("own", nn.Parameter(torch.rand(2)))
        module.register_buffer("count", torch.rand(2))
        return module

    plain, model = made(), made()
    if form == "composable":
        sharding.composable.fully_shard(model)
    else:
        model = FSDP(model, use_orig_params=form == "original")
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            assert_state(model.state_dict(), plain.state_dict())
            model.load_state_dict(model.state_dict())


@pytest.mark.thorough
@pytest.mark.parametrize("form", FLAT_FORMS)
def test_a_compiled_modules_own_entries_are_there_once(clusters: Any, form: str) -> None:
    clusters(2).run(compiled_with_own_entries, form)
