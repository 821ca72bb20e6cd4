"""Trainings by Lightning whose hooks change a checkpoint, with `ddp` and with our strategy.

The checkpoint of each must have the same values, and so must the module after a resume.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.integrations.lightning import (
    CkptDDPStrategy,
    CkptModelParallelStrategy,
    CkptStrategyMixin,
)

FIRST, LAST = 4, 6
RESUMES = "LIGHTNING_TEST_RESUMES"
"""A variable of the environment while a training goes on."""


class Model(pl.LightningModule):
    """A module with a head, a frozen layer and a buffer, and an optimizer with moments."""

    def __init__(self, width: int = 3, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, width)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.body(batch)))).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.SGD(trained, self.hparams["rate"], momentum=0.9)


class LeavesOut(Model):
    """Stores no frozen layer, and so loads without it."""

    strict_loading = False  # type: ignore[assignment]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [one for one in checkpoint["state_dict"] if "frozen" in one]:
            del checkpoint["state_dict"][name]


class Replaces(Model):
    """Stores other values under the same names, more names, and a value of another dtype."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["head.weight"] = state["head.weight"] * 2
        state["body.weight"] = state["body.weight"].double()
        state["added"] = torch.arange(3)
        checkpoint["note"] = {"added": "yes"}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["added"]


class KeepsCopies(Model):
    """Stores its own tensors under more names, beside others of this hook."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["whole"] = dict(checkpoint["state_dict"])
        checkpoint["some"] = [1, self.head.weight, torch.ones(2)]
        checkpoint["moments"] = [dict(one) for one in self.trainer.optimizers[0].state.values()]


class NoWeights(Model):
    """Stores its weights elsewhere, and puts them back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["elsewhere"] = checkpoint.pop("state_dict")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = checkpoint.pop("elsewhere")


class Swaps(Model):
    """Loads biases into each other's place, and half of a weight."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["body.bias"], state["head.bias"] = state["head.bias"], state["body.bias"]
        state["head.weight"] = state["head.weight"] / 2


class Renames(Model):
    """Stores other names, and loads them."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{k}": v for k, v in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {key.removeprefix("old."): state[key] for key in state}


class FreshHead(Model):
    """Goes on with another head, whose first values and moments are its own."""

    def __init__(self) -> None:
        super().__init__(width=5 if os.environ.get(RESUMES) else 3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state, own = checkpoint["state_dict"], self.state_dict()
        for name in state:
            if state[name].shape != own[name].shape:
                state[name] = own[name]
        checkpoint["optimizer_states"] = [one.state_dict() for one in self.trainer.optimizers]


class Rates(Model):
    """Stores another rate and moments, and loads again another rate."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "optimizer_states" in checkpoint:
            [state] = checkpoint["optimizer_states"]
            state["param_groups"][0]["lr"] = 0.25
            state["state"][0] = {"momentum_buffer": torch.ones(3, 4)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        [state] = checkpoint["optimizer_states"]
        state["param_groups"][0]["lr"] /= 2
        state["state"][1] = {"momentum_buffer": -state["state"][1]["momentum_buffer"]}


class OwnLoad(Model):
    """Has a `load_state_dict` of its own."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *more: Any, **options: Any) -> Any:
        halves = {name: value / 2 for name, value in state_dict.items()}
        return super().load_state_dict(halves, *more, **options)


class OwnStateDict(Model):
    """Has a `state_dict` of its own, without its frozen layer."""

    strict_loading = False  # type: ignore[assignment]

    def state_dict(self, *more: Any, **options: Any) -> Any:
        found = super().state_dict(*more, **options)
        return {name: value for name, value in found.items() if "frozen" not in name}


class Looks(Callback):
    """A callback whose own state has the module's tensors, and which looks at a loaded dict."""

    def __init__(self) -> None:
        self.module: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.module = pl_module

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self.module.state_dict()), "other": torch.ones(2), "n": 3}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for name, value in pl_module.state_dict().items():
            assert torch.equal(value, checkpoint["state_dict"][name])
        assert checkpoint["optimizer_states"][0]["state"]


class FiltersOnRank0(Callback):
    """Changes the dict on rank 0 alone."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.is_global_zero:
            checkpoint["only"] = torch.ones(3)


def filtered(base: type[Strategy]) -> type[Strategy]:
    """A strategy of a user, which stores other values."""

    class Mine(base):  # type: ignore[misc, valid-type]
        def lightning_module_state_dict(self) -> dict[str, Any]:
            state = super().lightning_module_state_dict()
            return {**state, "head.bias": state["head.bias"] + 1}

    return Mine


def below(base: type[Strategy]) -> type[Strategy]:
    """A strategy of a user, below our mixin."""
    users = filtered(DDPStrategy)
    if not issubclass(base, CkptStrategyMixin):
        return users
    return type("Below", (CkptStrategyMixin, users), {})


@dataclass(frozen=True)
class Case:
    model: Callable[[], Model] = Model
    callbacks: Callable[[], list[Callback]] = list
    strategy: Callable[[type[Strategy]], type[Strategy]] = lambda base: base


CASES = {
    "plain": Case(),
    "ema": Case(callbacks=lambda: [EMAWeightAveraging(decay=0.5)]),
    "swa": Case(callbacks=lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)]),
    "pruning": Case(LeavesOut, lambda: [ModelPruning("l1_unstructured", amount=0.5)]),
    "leaves out": Case(LeavesOut),
    "replaces": Case(Replaces),
    "keeps copies": Case(KeepsCopies),
    "no weights": Case(NoWeights),
    "swaps": Case(Swaps),
    "renames": Case(Renames),
    "fresh head": Case(FreshHead),
    "rates": Case(Rates),
    "own load": Case(OwnLoad),
    "own state dict": Case(OwnStateDict),
    "looks": Case(callbacks=lambda: [Looks()]),
    "rank 0": Case(callbacks=lambda: [FiltersOnRank0()]),
    "users strategy": Case(strategy=filtered),
    "strategy below": Case(strategy=below),
}


def fit(
    case: Case, base: type[Strategy], world_size: int, folder: str, steps: int, resume: bool
) -> dict[str, Any]:
    """Trains to a step; returns the module's state and the optimizer's after the last step."""
    pl.seed_everything(0, verbose=False)
    model = case.model()
    at_end: dict[str, Any] = {}

    class Notes(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
            found = model.state_dict(), [one.state_dict() for one in trainer.optimizers]
            at_end.update(module=deepcopy(found[0]), optimizers=deepcopy(found[1]))

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=case.strategy(base)(),
        callbacks=[
            *case.callbacks(),
            Notes(),
            ModelCheckpoint(folder, every_n_train_steps=2, save_last=True),
        ],
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(model, loader, ckpt_path=f"{folder}/last.ckpt" if resume else None)
    return at_end


def numbered(state: Any) -> Any:
    names = [name for group in state["param_groups"] for name in group["params"]]
    groups = [
        {**group, "params": [names.index(one) for one in group["params"]]}
        for group in state["param_groups"]
    ]
    return {"state": {names.index(k): v for k, v in state["state"].items()}, "param_groups": groups}


def stored(folder: str) -> dict[str, Any]:
    """The content of a checkpoint, in Lightning's form."""
    place = f"{folder}/last.ckpt"
    if os.path.isfile(place):
        found: Any = torch.load(place, weights_only=False)
    else:
        found = ckpt.read(place)
        if "optimizer_states" in found:
            found["optimizer_states"] = [*map(numbered, found["optimizer_states"])]
    del found["callbacks"][next(one for one in found["callbacks"] if "ModelCheckpoint" in one)]
    return found  # type: ignore[no-any-return]


def loaded(case: Case, folder: str) -> Any:
    """The state of a module that `load_from_checkpoint` makes, or the class of its error."""
    try:
        model = type(case.model()).load_from_checkpoint(f"{folder}/last.ckpt", weights_only=False)
    except Exception as error:
        return type(error).__name__
    return model.state_dict()


def differences(one: Any, other: Any, path: str) -> list[str]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [f"{path}: {one} is not {other}"]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{path}: the keys {sorted(one, key=str)} are not {sorted(other, key=str)}"]
        return [text for key in one for text in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for index, two in pairs for text in differences(*two, f"{path}.{index}")]
    return [] if one == other else [f"{path}: {one} is not {other}"]


def main(arguments: Sequence[str]) -> None:
    """Compares the strategies in the cases of the arguments; prints the differences."""
    folder, *names = arguments
    names = names or list(CASES)
    world_size = int(os.environ["WORLD_SIZE"])  # Lightning removes it
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    told = list[str]()
    for name in names:
        case, found = CASES[name], dict[type[Strategy], Any]()
        for base in (DDPStrategy, CkptDDPStrategy):
            os.environ.pop(RESUMES, None)
            place = f"{folder}/{name}/{base.__name__}"
            first = fit(case, base, world_size, place, FIRST, resume=False)
            file = stored(place), loaded(case, place)
            if world_size > 1:
                torch.distributed.barrier()
            os.environ[RESUMES] = "yes"
            last = fit(case, base, world_size, place, LAST, resume=True)
            found[base] = first, file, last, stored(place)
        told += differences(found[DDPStrategy], found[CkptDDPStrategy], name)
    sys.stdout.write(f"different: {told}\n")


class Sharded(pl.LightningModule):
    """A module whose layer FSDP2 shards, and whose hooks change values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def configure_model(self) -> None:
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["current"] = dict(state)
        state["layer.bias"] = state["layer.bias"] * 2
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.5

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["layer.bias"] = state["layer.bias"] / 4

    def on_train_start(self) -> None:
        self.first = self.layer.bias.full_tensor().detach().clone()  # type: ignore[operator]


def sharded(arguments: Sequence[str]) -> None:
    """Trains the sharded module on all ranks, and goes on; writes the values that differ."""
    [folder] = arguments
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for steps, resume in ((2, None), (4, f"{folder}/last.ckpt")):
        model = Sharded()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=CkptModelParallelStrategy(
                data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
            ),
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)],
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resume)
        found.append((model, trainer, ckpt.read(f"{folder}/last.ckpt")))
    (first, _, stored), (second, trainer, _) = found
    bias = first.layer.bias.full_tensor().detach()  # type: ignore[operator]
    told = differences(stored["current"]["layer.bias"], bias, "current")
    told += differences(stored["state_dict"]["layer.bias"], bias * 2, "stored")
    told += differences(second.first, bias / 2, "loaded")
    told += differences(trainer.optimizers[0].param_groups[0]["lr"], 0.5, "lr")
    sys.stdout.write(f"different: {told}\n")
