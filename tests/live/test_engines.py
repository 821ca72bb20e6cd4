"""Inference engines that load by pairs of a name and a tensor: the lines of docs/live.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import ckpt
from ckpt.integrations.engines import EngineWeights
from ckpt.live.store import LiveStore
from tests.live.offered import RUNTIME

PAGE = Path(__file__).resolve().parents[2] / "docs" / "live.md"
WIDTH, RANKS = 8, 2


class Trained(nn.Module):
    """A block of the trainer: q, k and v are layers of their own, in float32."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.norm = nn.LayerNorm(WIDTH)


class Engine(nn.Module):
    """A rank's part of the same block as vLLM has it: q, k and v in one parameter, in bfloat16."""

    FUSED = ("q_proj", "k_proj", "v_proj")

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.most_alive = rank, 0
        rows = WIDTH // RANKS
        self.qkv_proj = nn.Parameter(torch.zeros(3 * rows, WIDTH, dtype=torch.bfloat16))
        self.o_proj = nn.Parameter(torch.zeros(WIDTH, rows, dtype=torch.bfloat16))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        rows, seen, loaded = WIDTH // RANKS, [], set()
        for name, tensor in weights:
            seen.append(ref(tensor))
            self.most_alive = max(self.most_alive, sum(one() is not None for one in seen))
            layer, _, rest = name.partition(".")
            if layer in self.FUSED:
                at = self.FUSED.index(layer) * rows
                part = tensor.narrow(0, self.rank * rows, rows)
                self.qkv_proj.data.narrow(0, at, rows).copy_(part)
            elif layer == "o_proj":
                self.o_proj.data.copy_(tensor.narrow(1, self.rank * rows, rows))
            else:
                getattr(self.norm, rest).data.copy_(tensor)
            loaded.add(name)
            del tensor
        return loaded


@pytest.fixture
def worker(tmp_path: Path) -> type[Any]:
    """The class of the page's module."""
    (code,) = re.findall(r'```python title="engine_weights.py"\n(.*?)```', PAGE.read_text(), re.S)
    (tmp_path / "engine_weights.py").write_text(code)
    found: type[Any] = run_path(str(tmp_path / "engine_weights.py"))["LiveWorker"]
    return found


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Trained, Any]]:
    """A model, and its published state."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME, str(tmp_path / "runtime"))
    model = Trained()
    with ckpt.publish({"model": model, "step": 1}, "engines") as found:
        yield model, found


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] += 1


@pytest.mark.thorough
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_each_worker_loads_each_version_and_says_what_it_has(
    live: tuple[Trained, Any],
    worker: type[Any],
    is_elsewhere: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, published = live
    workers = [worker() for _ in range(RANKS)]
    for rank, one in enumerate(workers):
        one.model_runner, one.device = SimpleNamespace(model=Engine(rank)), "cpu"
    for version in (1, 2, 3):
        if version > 1:
            train(model)
            published.update().wait(60)
        with monkeypatch.context() as patch:
            if is_elsewhere:
                patch.setenv(RUNTIME, str(tmp_path / "another host"))
            for one in workers:
                assert one.load_live(published.url) == (version, ckpt.id(model).digest)
        check([one.model_runner.model for one in workers], model)


@pytest.mark.thorough
def test_one_tensor_is_in_memory_at_a_time_and_buckets_have_their_bytes(
    live: tuple[Trained, Any],
) -> None:
    model, published = live
    weights, engine = EngineWeights(published.url, select="model"), Engine(0)
    engine.load_weights(weights)
    assert engine.most_alive == 1
    buckets = list(weights.buckets(WIDTH * WIDTH * 4))
    assert [len(pairs) for pairs in buckets] == [1, 1, 1, 1, 2]
    found = dict(pair for pairs in buckets for pair in pairs)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], one) for name, one in model.state_dict().items())


@pytest.mark.thorough
def test_a_bucket_at_a_time_fills_an_engine_that_takes_named_tensors(
    live: tuple[Trained, Any],
) -> None:
    """As SGLang's `update_weights_from_tensor`, which hands the pairs to `load_weights`."""
    model, published = live
    engines = [Engine(rank) for rank in range(RANKS)]

    def update_weights_from_tensor(
        named_tensors: list[tuple[str, Tensor]], load_format: None = None, flush_cache: bool = True
    ) -> None:
        for engine in engines:
            engine.load_weights(named_tensors)

    for pairs in EngineWeights(published.url, select="model").buckets(300):
        update_weights_from_tensor(pairs, flush_cache=False)
    check(engines, model)


@pytest.mark.thorough
def test_weights_that_are_held_get_the_differences_alone(
    live: tuple[Trained, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"w": torch.randn(300, 400).bfloat16()}, "step": 1}
    held: dict[str, Tensor] = {}
    monkeypatch.setenv(RUNTIME, str(tmp_path / "runtime"))
    with ckpt.publish(state, "held") as published:
        for version in (1, 2, 3):
            monkeypatch.setenv(RUNTIME, str(tmp_path / "another host"))
            weights = EngineWeights(published.url, select="model", held=held)
            with patch.object(LiveStore, "fetch", autospec=True, side_effect=LiveStore.fetch) as f:
                assert torch.equal(dict(weights)["w"], state["model"]["w"])
            sizes = [sum(map(len, call.args[3])) for call in f.call_args_list]
            assert (max(sizes) > 60_000) == (version == 1)
            monkeypatch.setenv(RUNTIME, str(tmp_path / "runtime"))
            state["model"]["w"][::50] += 1
            published.update().wait(60)


def megatron(model: Trained, kv_heads: int) -> dict[str, Tensor]:
    """The attention of a model as Megatron-core names and fuses it."""
    rows = [getattr(model, name).weight.detach() for name in Engine.FUSED]
    groups = [one.unflatten(0, (kv_heads, -1)) for one in rows]
    return {
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.cat(groups, 1).flatten(0, 1),
        "decoder.layers.0.self_attention.linear_proj.weight": model.o_proj.weight.detach(),
    }


def test_fused_tensors_of_a_trainer_need_the_mapping_that_the_error_has(tmp_path: Path) -> None:
    model, folder = Trained(), tmp_path / "megatron"
    others = {
        "embedding.word_embeddings.weight": torch.ones(3, WIDTH),
        "decoder.final_layernorm.weight": torch.ones(WIDTH),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": torch.ones(WIDTH),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": torch.ones(WIDTH),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.arange(6.0 * WIDTH).reshape(6, WIDTH),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(WIDTH, 3),
    }
    ckpt.save(folder, {"model": {**megatron(model, 4), **others}, "optimizer": torch.ones(2)})
    with pytest.raises(ckpt.ArgumentError, match=r"linear_qkv.* pass mapping=") as raised:
        next(iter(EngineWeights(folder, select="model")))
    assert "'llama-megatron-hf'" in str(raised.value)
    assert "parameters={'heads': NUMBER, 'kv_heads': NUMBER}" in str(raised.value)
    found = dict(
        EngineWeights(
            folder,
            select="model",
            mapping="llama-megatron-hf",
            parameters={"heads": 4, "kv_heads": 4},
        )
    )
    for name in Engine.FUSED:
        wanted = getattr(model, name).weight
        assert torch.equal(found[f"model.layers.0.self_attn.{name}.weight"], wanted)
    gate, up = (found[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(torch.cat([gate, up]), others["decoder.layers.0.mlp.linear_fc1.weight"])
    assert "optimizer" not in found


@pytest.mark.thorough
def test_a_whole_fused_target_gets_its_tensors_by_the_mapping_that_the_error_names(
    live: tuple[Trained, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, published = live
    fused = {"qkv_proj.weight": torch.zeros(3 * WIDTH, WIDTH)}
    others = {"o_proj": nn.Linear(WIDTH, WIDTH, bias=False), "norm": nn.LayerNorm(WIDTH)}
    state = {"model": {**fused, **nn.ModuleDict(others).state_dict()}}
    monkeypatch.setenv(RUNTIME, str(tmp_path / "another host"))
    with pytest.raises(ckpt.MismatchError, match=r"gets mapping='any-hf-fused'"):
        ckpt.load(published.url, state, exclude="step")
    ckpt.load(published.url, state, exclude="step", mapping="any-hf-fused")
    wanted = torch.cat([getattr(model, name).weight for name in Engine.FUSED])
    assert torch.equal(state["model"]["qkv_proj.weight"], wanted)


@pytest.mark.thorough
def test_a_version_that_is_replaced_meanwhile_is_an_error_in_the_middle(
    live: tuple[Trained, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = live
    monkeypatch.setenv(RUNTIME, str(tmp_path / "runtime"))
    with ckpt.publish({"model": model}, "brief", lease_seconds=0.1) as published:
        pairs = iter(EngineWeights(published.url, select="model"))
        next(pairs)
        for _ in range(2):
            published.update().wait(60)
        with pytest.raises(ckpt.VersionGoneError):
            list(pairs)


def check(engines: list[Engine], model: Trained) -> None:
    """Fails unless the parts of the engines are the weights of the model."""
    rows = [engine.qkv_proj.unflatten(0, (3, -1)) for engine in engines]
    layers = [getattr(model, name).weight for name in Engine.FUSED]
    assert torch.equal(torch.cat(rows, dim=1).flatten(0, 1), torch.cat(layers).bfloat16())
    columns = torch.cat([engine.o_proj for engine in engines], dim=1)
    assert torch.equal(columns, model.o_proj.weight.bfloat16())
    for engine in engines:
        assert torch.equal(engine.norm.bias, model.norm.bias.bfloat16())
