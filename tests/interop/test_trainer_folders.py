"""A Trainer's folder goes on under our runtime, and ours under transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

import ckpt
from tests.ckpt.test_training_folders import DATA, TRAINER, script
from tests.old_torch import runs_fsdp2

pytestmark = [runs_fsdp2, pytest.mark.thorough]  # each rank imports transformers

RATES = (0.005, 0.0025)
"""The learning rates of the third and the fourth step, by Trainer's schedule."""


def sharded(model: Any) -> Any:
    """The model under our runtime."""
    from sharding import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def groups(model: Any) -> list[dict[str, Any]]:
    """The parameter groups that Trainer makes: with and without weight decay."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "norm" not in n]},
        {"params": [p for n, p in named if "norm" in n]},
    ]


def resumed() -> list[float]:
    """The losses of two further steps from the folder."""
    trainer = script("trainer")
    model = sharded(trainer.model())
    optimizer = torch.optim.AdamW(groups(model), lr=1.0)
    target = {"model": model, "optimizer": optimizer}
    ckpt.load(TRAINER, target, include=["model.*", "optimizer.*"])
    rows = torch.stack([each["input_ids"] for each in trainer.data()])
    losses = []
    for at, rate in zip((4, 6), RATES, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = model(input_ids=rows[at : at + 2], labels=rows[at : at + 2]).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_trainer_s_folder_resumes_with_its_optimizer_under_our_runtime(
    clusters: Callable[..., Any],
) -> None:
    expected = json.loads((DATA / "trainer" / "losses.json").read_text())[2:]
    for losses in clusters(2).run(resumed):
        assert losses == pytest.approx(expected, rel=1e-4)


def trained(folder: str) -> list[list[float]]:
    """The logits of a model that our runtime trained for a step, which is saved."""
    trainer = script("trainer")
    model = sharded(trainer.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.stack([each["input_ids"] for each in trainer.data()])
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    ckpt.save(folder, {"model": model, "optimizer": optimizer})
    found: list[list[float]] = trainer.logits(model)
    return found


def opened(folder: str) -> list[list[float]]:
    """The logits of a model under our runtime that is loaded from a folder of weights."""
    trainer = script("trainer")
    model = sharded(trainer.model())
    ckpt.load(folder, model)
    found: list[list[float]] = trainer.logits(model)
    return found


@pytest.mark.slow
def test_a_model_that_three_ranks_trained_opens_in_transformers_and_resumes_on_two(
    clusters: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    trainer = script("trainer")
    losses = clusters(3).run(trained, str(tmp_path / "run"))
    trainer.model().config.save_pretrained(tmp_path / "config")
    ckpt.convert(
        tmp_path / "run", tmp_path / "hf", to="hf", part="model", config=tmp_path / "config"
    )
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    expected = torch.tensor(trainer.logits(model))
    for found in losses:
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path / "again", max_shard_size="4KB")
    for found in clusters(2).run(opened, str(tmp_path / "again")):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


def test_the_logits_of_trainer_s_own_folder_are_those_of_transformers() -> None:
    trainer = script("trainer")
    model = trainer.model()
    ckpt.load(TRAINER, model)
    expected = json.loads((DATA / "trainer" / "logits.json").read_text())
    torch.testing.assert_close(torch.tensor(trainer.logits(model)), torch.tensor(expected))


OWN_SAVE = """
import sys, warnings
import torch
from transformers import Trainer, TrainingArguments
from ckpt.integrations.transformers import CkptTrainerMixin


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.layer(x).sum()}


class Own(Trainer):
    def _save(self, *args, **more):
        raise AssertionError("is not called")


class Mine(CkptTrainerMixin, Own):
    pass


class Plain(CkptTrainerMixin, Trainer):
    pass


for kind in (Mine, Plain):
    folder = f"{sys.argv[1]}/{kind.__name__}"
    arguments = TrainingArguments(
        folder, max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"x": torch.ones(2)}] * 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind(model=Net(), args=arguments, train_dataset=data).train()
    print(kind.__name__, sum("does not call Own._save:" in str(w.message) for w in caught))
"""


def test_a_save_of_a_trainer_says_which_methods_of_a_user_it_does_not_call(
    programs: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out, err = programs(OWN_SAVE, str(tmp_path)).communicate(timeout=200)
    assert "Mine 2" in out, err
    assert "Plain 0" in out
    assert list(ckpt.read(tmp_path / "Mine" / "checkpoint-2")["model"]) == [
        "layer.weight",
        "layer.bias",
    ]
