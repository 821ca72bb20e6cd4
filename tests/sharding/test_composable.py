"""K: the flat-parameter runtime without a wrapper class, and checkpoints of what it shards.

`sharding.composable.fully_shard` leaves a module's class and names as they are, so everything is
compared with the module that was never sharded.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import sharding
from sharding import FullyShardedDataParallel, ShardingStrategy, StateDictType
from sharding.composable import fully_shard
from sharding.wrap import ModuleWrapPolicy
from tests.sharding.wrapper_models import (
    CPU,
    STRATEGIES,
    Block,
    Frozen,
    Network,
    assert_equal,
    loss_of,
    network,
    train,
)

LAYERS = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}


class Unit(nn.Module):
    """A layer, a small unit within, and a layer, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)
        self.within = nn.Sequential(nn.ReLU(), nn.Linear(5, 7), nn.ReLU())
        self.after = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.within(self.before(x)))


class Composite(nn.Module):
    """Two units between layers and parameters that belong to the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.u1 = Unit()
        self.u2 = Unit()
        self.own = nn.Parameter(torch.randn(3, 5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.u2(torch.relu(self.u1(self.first(x))))) @ self.own


class Translator(nn.Module):
    """A transformer whose output layer is its embedding, with buffers in several places."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(
            8, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=6, dropout=0.0
        )
        self.output = nn.Linear(8, 11)
        self.output.weight = self.embedding.weight
        self.register_buffer("word_bias", torch.randn(8))
        self.register_buffer("calls", torch.tensor(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        source, target = (self.embedding(t) + self.word_bias for t in (source, target))
        source = self.norm(source.transpose(1, 2)).transpose(1, 2)
        return self.output(self.transformer(source, target))


def composite(seed: int = 0) -> Composite:
    """A `Composite` drawn from a seed."""
    torch.manual_seed(seed)
    return Composite()


def shard_by_policy(model: nn.Module, **arguments: Any) -> nn.Module:
    """K-01: by a policy, the root included."""
    return fully_shard(model, policy=ModuleWrapPolicy({Unit}), **arguments)


def shard_parts(model: nn.Module, **arguments: Any) -> nn.Module:
    """K-02: two parts only, the rest stays as it is."""
    fully_shard(model.u1, **arguments)
    fully_shard(model.u2, **arguments)
    return model


def shard_mixed(model: nn.Module, **arguments: Any) -> nn.Module:
    """K-03: one part sharded, the rest replicated."""
    fully_shard(model.u1, **arguments)
    return fully_shard(model, strategy=ShardingStrategy.NO_SHARD, **arguments)


WAYS = {"policy": shard_by_policy, "parts": shard_parts, "mixed": shard_mixed}


def zero(model: nn.Module, *, buffers: bool = False) -> None:
    """Every parameter becomes zero in place, as it lies there."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *(model.buffers() if buffers else ())]:
            tensor.zero_()


def whole(value: Any) -> torch.Tensor:
    """The whole tensor that an entry of a state dict stands for. Communicates."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, ShardedTensor):
        found = torch.zeros(value.size(), dtype=value.dtype)
        for shard in value.local_shards():
            place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            found[tuple(slice(start, start + size) for start, size in place)] = shard.tensor
        dist.all_reduce(found)
        return found
    return value


def local_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of each parameter."""
    return {
        name: p.detach().to_local() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


def save_and_load(way: str, device_id: torch.device | None) -> None:
    local = composite()
    place = {} if device_id is None else {"device_id": device_id}
    saved = WAYS[way](copy.deepcopy(local), **place)
    state = saved.state_dict()
    assert list(state) == list(local.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    assert_equal(state, local.state_dict(), rtol=0, atol=0)

    loaded = WAYS[way](copy.deepcopy(local), **place)
    assert [name for name, _ in loaded.named_parameters()] == list(local.state_dict())
    zero(loaded)
    assert all(p.sum() == 0 for p in loaded.parameters())
    assert all(value.count_nonzero() == 0 for value in loaded.state_dict().values())
    loaded.load_state_dict({name: value.clone() for name, value in state.items()})
    assert_equal(local_values(loaded), local_values(saved), rtol=0, atol=0)
    assert_equal(loaded.state_dict(), local.state_dict(), rtol=0, atol=0)
    held = torch.tensor(sum(p.numel() for p in loaded.u1.parameters()))
    dist.all_reduce(held)
    assert held == sum(p.numel() for p in local.u1.parameters())


@pytest.mark.parametrize("way", list(WAYS))
def test_k_01_k_02_k_03_a_state_dict_is_the_local_one_and_loads_again(
    clusters: Callable[..., Any], way: str
) -> None:
    clusters(2).run(save_and_load, way, CPU)


@pytest.mark.parametrize("way", list(WAYS))
def test_k_09_without_a_device_the_same_holds_on_the_cpu(
    clusters: Callable[..., Any], way: str
) -> None:
    clusters(2).run(save_and_load, way, None)


def shard_translator(model: Translator, ignoring: bool) -> Translator:
    return fully_shard(
        model,
        policy=ModuleWrapPolicy(LAYERS),
        ignored_modules=[model.transformer] if ignoring else [],
        device_id=CPU,
    )


def translate(kind: str, ignoring: bool) -> None:
    local = Translator(0)
    with torch.no_grad():
        for tensor in [*local.parameters(), *local.buffers()]:
            if tensor.count_nonzero() == 0:
                tensor.add_(1)
    saved = shard_translator(copy.deepcopy(local), ignoring)
    FullyShardedDataParallel.set_state_dict_type(saved, StateDictType[kind])
    state = saved.state_dict()
    gathered = {name: whole(value) for name, value in state.items()}
    assert_equal(gathered, local.state_dict(), rtol=0, atol=0)
    if kind == "SHARDED_STATE_DICT":
        assert not all(type(value) is torch.Tensor for value in state.values())

    loaded = Translator(1)
    zero(loaded, buffers=True)
    shard_translator(loaded, ignoring)
    FullyShardedDataParallel.set_state_dict_type(loaded, StateDictType[kind])
    loaded.load_state_dict(state)
    assert_equal(local_values(loaded), local_values(saved), rtol=0, atol=0)
    assert_equal(dict(loaded.named_buffers()), dict(local.named_buffers()), rtol=0, atol=0)
    tokens = torch.arange(8).reshape(2, 4)
    for model in (local, saved, loaded):
        model.eval()
    torch.testing.assert_close(loaded(tokens, tokens + 3), local(tokens, tokens + 3))


@pytest.mark.parametrize("ignoring", [False, True], ids=["all", "transformer ignored"])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_k_04_a_transformer_with_shared_parameters_is_saved_and_loaded(
    clusters: Callable[..., Any], kind: str, ignoring: bool
) -> None:
    clusters(2).run(translate, kind, ignoring)


def shard_translator_per_parameter(model: Translator, ignoring: bool) -> Translator:
    if ignoring:
        return sharding.fully_shard(model, ignored_params=set(model.transformer.parameters()))
    for module in model.modules():
        if type(module) in LAYERS:
            sharding.fully_shard(module)
    return sharding.fully_shard(model)


def translate_per_parameter(ignoring: bool) -> None:
    local = Translator(0)
    saved = shard_translator_per_parameter(copy.deepcopy(local), ignoring)
    state = saved.state_dict()
    gathered = {name: whole(value) for name, value in state.items()}
    assert_equal(gathered, local.state_dict(), rtol=0, atol=0)
    loaded = Translator(1)
    zero(loaded, buffers=True)
    shard_translator_per_parameter(loaded, ignoring)
    loaded.load_state_dict(state)
    assert_equal(local_values(loaded), local_values(saved), rtol=0, atol=0)
    assert_equal(dict(loaded.named_buffers()), dict(local.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("ignoring", [False, True], ids=["all", "transformer ignored"])
def test_k_05_the_same_transformer_is_saved_and_loaded_per_parameter(
    clusters: Callable[..., Any], ignoring: bool
) -> None:
    clusters(2).run(translate_per_parameter, ignoring)


def shard_composites_per_parameter() -> None:
    for parts in (("u1", "u2", ""), ("u1", "u2")):
        local = composite()
        pair = [copy.deepcopy(local) for _ in range(2)]
        for model in pair:
            for name in parts:
                sharding.fully_shard(model.get_submodule(name))
        saved, loaded = pair
        gathered = {name: whole(value) for name, value in saved.state_dict().items()}
        assert_equal(gathered, local.state_dict(), rtol=0, atol=0)
        zero(loaded)
        assert all(whole(p).count_nonzero() == 0 for p in loaded.parameters())
        loaded.load_state_dict({name: v.clone() for name, v in saved.state_dict().items()})
        assert_equal(local_values(loaded), local_values(saved), rtol=0, atol=0)


def test_k_05_units_and_parts_are_saved_and_loaded_per_parameter(
    clusters: Callable[..., Any],
) -> None:
    clusters(2).run(shard_composites_per_parameter)


def train_composable(strategy: str, by_hand: bool) -> None:
    model, replica = network(), network()
    names = [name for name, _ in replica.named_parameters()]
    classes = [type(module) for module in replica.modules()]
    chosen = {"strategy": ShardingStrategy[strategy], "device_id": CPU}
    if by_hand:
        for part in (*model.blocks, model.frozen):
            assert fully_shard(part, **chosen) is part
        assert fully_shard(model, **chosen) is model
    else:
        policy = ModuleWrapPolicy({Block, Frozen})
        assert fully_shard(model, policy=policy, **chosen) is model
    assert type(model) is Network
    assert [type(module) for module in model.modules()] == classes
    assert [name for name, _ in model.named_parameters()] == names
    losses = train(model, 5)
    torch.testing.assert_close(losses, train(replica, 5, replica=True))
    assert [name for name, _ in model.named_parameters()] == names
    assert_equal(model.state_dict(), replica.state_dict())
    assert model.head.weight is model.embedding.weight
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, 9), loss_of(replica, 9))


@pytest.mark.parametrize("by_hand", [False, True], ids=["policy", "by hand"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_k_06_a_composable_module_trains_like_the_replica_and_keeps_its_names(
    clusters: Callable[..., Any], strategy: str, by_hand: bool
) -> None:
    clusters(2).run(train_composable, strategy, by_hand)


def synchronize() -> None:
    local = network(0)
    model = network(dist.get_rank())
    with torch.no_grad():
        model.scale.add_(dist.get_rank())
    fully_shard(
        model,
        policy=ModuleWrapPolicy({Block, Frozen}),
        sync_module_states=True,
        device_id=CPU,
    )
    assert_equal(model.state_dict(), local.state_dict(), rtol=0, atol=0)


def test_k_07_sync_module_states_gives_every_rank_what_rank_0_has(
    clusters: Callable[..., Any],
) -> None:
    clusters(2).run(synchronize)


def materialize() -> list[str]:
    initialized = []

    def initialize(module: nn.Module) -> None:
        initialized.append(type(module).__name__)
        module.to_empty(device=CPU, recurse=False)
        with torch.no_grad():
            for number, tensor in enumerate(module.parameters(recurse=False)):
                tensor.fill_(number + 0.5)

    with torch.device("meta"):
        model = Composite()
    assert shard_by_policy(model, param_init_fn=initialize, device_id=CPU) is model
    state = model.state_dict()
    assert list(state) == list(composite().state_dict())
    for name, value in state.items():
        assert value.device == CPU
        wanted = 1.5 if name.endswith("bias") else 0.5
        assert torch.equal(value, torch.full_like(composite().state_dict()[name], wanted))
    loss = model(torch.ones(2, 5)).sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())
    return initialized


def test_k_08_param_init_fn_fills_a_meta_model_module_by_module(
    clusters: Callable[..., Any],
) -> None:
    for names in clusters(2).run(materialize):
        assert names.count("Linear") == 8
        assert names.count("Composite") == 1


def clip_composable(strategy: str) -> None:
    model, replica = network(), network()
    policy = ModuleWrapPolicy({Block, Frozen})
    fully_shard(model, policy=policy, strategy=ShardingStrategy[strategy])
    for each in (model, replica):
        loss_of(each, 0).backward()
    for parameter in replica.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    wanted = nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
    torch.testing.assert_close(sharding.composable.clip_grad_norm_(model, 0.1), wanted)
    with pytest.raises(ValueError, match="was not given to"):
        sharding.composable.clip_grad_norm_(replica, 0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_sees_all_ranks_gradients(clusters: Callable[..., Any], strategy: str) -> None:
    clusters(2).run(clip_composable, strategy)


def copy_composable() -> None:
    model = fully_shard(network())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Network cannot be pickled or copied.*state_dict\(\)"):
            attempt(model)


def test_copying_and_pickling_are_refused_with_a_reason(clusters: Callable[..., Any]) -> None:
    clusters(2).run(copy_composable)
