"""Inference engines that load by pairs of a name and a tensor: the lines of docs/live.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import ckpt
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
def lines(tmp_path: Path) -> dict[str, Any]:
    """What the page's module defines."""
    (code,) = re.findall(r'```python title="engine_weights.py"\n(.*?)```', PAGE.read_text(), re.S)
    (tmp_path / "engine_weights.py").write_text(code)
    return run_path(str(tmp_path / "engine_weights.py"))


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Trained, Any]]:
    """A model, and its published state."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(RUNTIME, str(tmp_path / "runtime"))
    model = Trained()
    with ckpt.publish({"model": model}, "engines") as found:
        yield model, found


@pytest.mark.thorough
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_loader_that_fuses_and_splits_gets_each_version_one_tensor_at_a_time(
    live: tuple[Trained, Any],
    lines: dict[str, Any],
    is_elsewhere: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, published = live
    engines = [Engine(rank) for rank in range(RANKS)]
    for version in (1, 2):
        if version == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1
            published.update().wait(60)
        with monkeypatch.context() as patch:
            if is_elsewhere:
                patch.setenv(RUNTIME, str(tmp_path / "another host"))
            for engine in engines:
                worker = lines["LiveWorker"]()
                worker.model_runner, worker.device = SimpleNamespace(model=engine), "cpu"
                worker.load_live(published.url)
        names = [name for name, _ in lines["weights"](published.url)]
        assert sorted(names) == sorted(model.state_dict())
        check(engines, model)
    assert [engine.most_alive for engine in engines] == [1] * RANKS


def check(engines: list[Engine], model: Trained) -> None:
    """Fails unless the parts of the engines are the weights of the model."""
    rows = [engine.qkv_proj.unflatten(0, (3, -1)) for engine in engines]
    layers = [getattr(model, name).weight for name in Engine.FUSED]
    assert torch.equal(torch.cat(rows, dim=1).flatten(0, 1), torch.cat(layers).bfloat16())
    columns = torch.cat([engine.o_proj for engine in engines], dim=1)
    assert torch.equal(columns, model.o_proj.weight.bfloat16())
    for engine in engines:
        assert torch.equal(engine.norm.bias, model.norm.bias.bfloat16())
