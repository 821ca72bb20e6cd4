"""Folders that Trainer, Accelerate and Lightning wrote: tests/data has them, with their scripts."""

from __future__ import annotations

import importlib.util
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt
from ckpt.dcp.hf_storage import HuggingFaceStorageReader
from ckpt.dcp.storage_reader import CkptStorageReader
from ckpt.errors import MismatchError
from formats.errors import CorruptError, HostileError, UnsupportedError
from tests.old_torch import needs

DATA = Path(__file__).parents[1] / "data"
TRAINER = DATA / "trainer" / "checkpoint-2"
ACCELERATE = DATA / "accelerate"
LIGHTNING = DATA / "lightning"
WEIGHT = torch.arange(12.0).reshape(4, 3)
BIAS = torch.arange(4.0) + 100
BESIDE = ("optimizer", "scheduler", "training_args", "rng", "trainer_state")
EMBEDDINGS = "model.embed_tokens.weight"


def script(kind: str) -> ModuleType:
    """The script that wrote the files of a kind."""
    found = importlib.util.spec_from_file_location(f"write_{kind}", DATA / kind / "write.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def torch_load(file: Path) -> Any:
    return torch.load(file, weights_only=False)


# Trainer.


def test_a_folder_of_trainer_is_one_checkpoint_with_a_place_for_each_part() -> None:
    found = ckpt.open(TRAINER)
    assert list(found.catalog.tree) == ["model", *BESIDE]
    theirs = torch_load(TRAINER / "optimizer.pt")
    state = ckpt.read(TRAINER)
    assert state["optimizer"]["param_groups"] == theirs["param_groups"]
    for number, entries in theirs["state"].items():
        for key, value in entries.items():
            assert torch.equal(state["optimizer"]["state"][number][key], value)
    assert state["scheduler"] == torch_load(TRAINER / "scheduler.pt")
    assert state["trainer_state"] == json.loads((TRAINER / "trainer_state.json").read_text())
    assert torch.equal(state["rng"]["cpu"], torch_load(TRAINER / "rng_state.pth")["cpu"])
    assert set(state["model"]) == set(ckpt.read(TRAINER / "model.safetensors"))


def test_verify_looks_at_every_file_of_a_trainer_s_folder_or_names_it() -> None:
    report = ckpt.verify(TRAINER)
    assert report.sound
    assert report.format == "trainer"
    assert report.notes == ("not checked: config.json, generation_config.json",)
    there = {path.name for path in TRAINER.iterdir()}
    named = report.notes[0].removeprefix("not checked: ").split(", ")
    checked = {file.name for file in ckpt.open(TRAINER).catalog.files}
    assert there == checked | set(named)


@pytest.mark.parametrize(
    ("file", "inside"),
    [("optimizer.pt", b"exp_avg"), ("scheduler.pt", b"last_epoch"), ("rng_state.pth", b"MT19937")],
)
def test_damage_of_any_file_is_found_and_named(tmp_path: Path, file: str, inside: bytes) -> None:
    shutil.copytree(TRAINER, tmp_path / "c")
    data = bytearray((tmp_path / "c" / file).read_bytes())
    data[data.index(inside)] ^= 1
    (tmp_path / "c" / file).write_bytes(data)
    report = ckpt.verify(tmp_path / "c")
    assert any(file in problem.message for problem in report.problems)


def test_a_model_takes_the_weights_of_a_trainer_s_folder() -> None:
    weights = ckpt.read(TRAINER / "model.safetensors")
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    ckpt.load(TRAINER, target)
    assert all(torch.equal(target[name], weights[name]) for name in weights)

    class Holder(nn.Module):
        """A module whose first names are those of the folder's keys, as of transformers."""

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(16, 8)

    module = Holder()
    ckpt.load(TRAINER, module, include=EMBEDDINGS)
    assert torch.equal(module.model.embed_tokens.weight, weights[EMBEDDINGS])
    named = {"model": {EMBEDDINGS: torch.zeros(16, 8)}}
    with pytest.raises(MismatchError, match="is in the checkpoint and not in the target"):
        ckpt.load(TRAINER, named)
    ckpt.load(TRAINER, named, include=f"model.{EMBEDDINGS}")
    assert torch.equal(named["model"][EMBEDDINGS], module.model.embed_tokens.weight)


@needs((2, 8), "dcp.load of torch 2.6 has no no_dist=")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_s_reader_of_hugging_face_folders_reads_the_weights_of_a_trainer_s() -> None:
    weights = ckpt.read(TRAINER / "model.safetensors")
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(TRAINER), no_dist=True)
    assert all(torch.equal(target[name], weights[name]) for name in weights)
    whole = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
    dcp.load(whole, storage_reader=CkptStorageReader(TRAINER), no_dist=True)
    assert all(torch.equal(whole["model"][name], weights[name]) for name in weights)


@pytest.mark.parametrize("target", ["x.safetensors", "hf"])
def test_a_conversion_to_weights_takes_the_weights(tmp_path: Path, target: str) -> None:
    to = None if "." in target else target
    report = ckpt.convert(TRAINER, tmp_path / target, to=to)
    assert report.beside == BESIDE
    assert report.left_out == ()
    assert ckpt.diff(tmp_path / target, TRAINER / "model.safetensors").equal
    assert ckpt.diff(tmp_path / target, TRAINER).equal
    assert ckpt.diff(TRAINER, tmp_path / target).equal


@pytest.mark.parametrize("target", ["whole", "whole.pt"])
def test_a_conversion_to_a_nest_takes_everything(tmp_path: Path, target: str) -> None:
    report = ckpt.convert(TRAINER, tmp_path / target)
    assert (report.beside, report.left_out) == ((), ("training_args",))
    assert ckpt.diff(TRAINER, tmp_path / target, exclude="training_args").equal
    ckpt.convert(TRAINER, tmp_path / "o.pt", select="optimizer")
    assert torch.load(tmp_path / "o.pt")["param_groups"][0]["weight_decay"] == 0.1


@pytest.mark.slow
def test_trainer_still_writes_this_folder(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    run = script("trainer").trainer("run", 4)
    run.train()
    same = ckpt.diff(TRAINER, "run/checkpoint-2", include=["model.*", "optimizer.*"], atol=1e-3)
    assert same.equal
    assert list(ckpt.open("run/checkpoint-2").catalog.tree) == list(ckpt.open(TRAINER).catalog.tree)


class Two(nn.Module):
    """Parameters of one shape, so that a wrong order would show only in values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(2)) for _ in range(3))


def stepped(model: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer after a step in which parameter number n has the gradient n."""
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return optimizer


def test_an_optimizer_saved_with_numbers_resumes_by_the_order_of_its_groups(tmp_path: Path) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": [model.c], "lr": 0.5}, {"params": [model.a, model.b]}]

    one, other = Two(), Two()
    saved = stepped(one, groups(one))
    torch.save({"model": one.state_dict(), "optimizer": saved.state_dict()}, tmp_path / "c.pt")
    fresh = torch.optim.AdamW(groups(other), lr=0.0)
    ckpt.load(tmp_path / "c.pt", {"model": other, "optimizer": fresh})
    assert [group["lr"] for group in fresh.param_groups] == [0.5, 0.1]
    for name, number in (("c", 0), ("a", 1), ("b", 2)):
        found = fresh.state[getattr(other, name)]["exp_avg"]
        assert torch.allclose(found, torch.full((2,), 0.1 * number))


@pytest.mark.parametrize("by", ["count", "group"])
def test_an_optimizer_saved_with_numbers_needs_the_same_groups(tmp_path: Path, by: str) -> None:
    one, other = Two(), Two()
    saved = stepped(one, [{"params": [one.a, one.b, one.c]}])
    torch.save({"model": one.state_dict(), "optimizer": saved.state_dict()}, tmp_path / "c.pt")
    parts = [[other.a], [other.b, other.c]] if by == "group" else [[other.a, other.b]]
    fresh = torch.optim.AdamW([{"params": part} for part in parts])
    with pytest.raises(MismatchError, match="numbers the parameters of its groups"):
        ckpt.load(tmp_path / "c.pt", {"model": other, "optimizer": fresh})


# Accelerate.


@pytest.mark.parametrize("name", ["plain", "fsdp2", "fsdp2-full"])
def test_a_folder_of_accelerate_is_one_checkpoint(name: str) -> None:
    state = ckpt.read(ACCELERATE / name)
    assert torch.equal(state["model"]["weight"], WEIGHT)
    assert torch.equal(state["model"]["bias"], BIAS)
    moments = state["optimizer"]["state"]
    weight = moments["weight" if name != "plain" else 0]
    assert torch.equal(weight["exp_avg"], torch.full((4, 3), 0.1))
    assert ckpt.verify(ACCELERATE / name).sound
    module = nn.Linear(3, 4)
    ckpt.load(ACCELERATE / name, module)
    assert torch.equal(module.weight, WEIGHT)
    assert sorted(state["rng"]) == (["0", "1"] if name == "fsdp2" else ["0"])


def test_the_second_model_has_a_place_of_its_own() -> None:
    state = ckpt.read(ACCELERATE / "plain")
    assert torch.equal(state["model_1"]["weight"], WEIGHT + 50)
    assert set(state) >= {"optimizer", "optimizer_1", "scheduler", "scheduler_1"}
    assert state["scheduler_1"]["last_epoch"] == 0


def test_the_two_folders_of_fsdp2_are_read_through_the_outer_folder(tmp_path: Path) -> None:
    found = ckpt.open(ACCELERATE / "fsdp2")
    files = {file.name for file in found.catalog.files}
    assert {"optimizer_0/.metadata", "pytorch_model_fsdp_0/__1_0.distcp"} <= files
    assert torch.equal(found["model.weight"][2:], WEIGHT[2:])
    ckpt.convert(ACCELERATE / "fsdp2", tmp_path / "c")
    assert ckpt.diff(ACCELERATE / "fsdp2", tmp_path / "c").equal


def test_the_folders_of_fsdp2_are_read_from_a_bucket() -> None:
    memory = fsspec.filesystem("memory")
    try:
        memory.put(f"{ACCELERATE / 'fsdp2'}/", "/training/fsdp2/", recursive=True)
        assert ckpt.verify("memory://training/fsdp2").sound
        module = nn.Linear(3, 4)
        ckpt.load("memory://training/fsdp2", module)
        assert torch.equal(module.weight, WEIGHT)
    finally:
        memory.rm("/training", recursive=True)


def test_damage_in_a_folder_of_fsdp2_is_named_with_the_folder(tmp_path: Path) -> None:
    shutil.copytree(ACCELERATE / "fsdp2", tmp_path / "c")
    file = tmp_path / "c" / "optimizer_0" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(torch.full((6,), 0.1).numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    (problem,) = ckpt.verify(tmp_path / "c").problems
    assert problem.file == "optimizer_0/__0_0.distcp"
    with pytest.raises(CorruptError, match=r"optimizer_0/__0_0\.distcp"):
        ckpt.read(tmp_path / "c")
    (tmp_path / "c" / "optimizer_0" / ".metadata").unlink()
    with pytest.raises((CorruptError, FileNotFoundError, ckpt.NotACheckpointError)):
        ckpt.open(tmp_path / "c")


# Hostile and unreadable files.


def with_file(tmp_path: Path, name: str, data: bytes) -> Path:
    shutil.copytree(ACCELERATE / "plain", tmp_path / "c")
    (tmp_path / "c" / name).write_bytes(data)
    return tmp_path / "c"


class Opens:
    """A call that a pickle asks for."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, ("/nowhere/at/all", "w")


def test_a_hostile_file_beside_the_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"a": Opens()}, tmp_path / "x")
    folder = with_file(tmp_path, "random_states_1.pkl", (tmp_path / "x").read_bytes())
    with pytest.raises(HostileError, match=r"random_states_1\.pkl"):
        ckpt.open(folder)


def test_a_part_that_cannot_be_read_is_left_out_and_told(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x") as found, zipfile.ZipFile(tmp_path / "y", "w") as packed:
        for name in found.namelist():
            packed.writestr(name, found.read(name), zipfile.ZIP_DEFLATED)
    compressed = (tmp_path / "y").read_bytes()
    folder = with_file(tmp_path, "custom_checkpoint_0.pkl", compressed)
    assert "custom" not in ckpt.open(folder).catalog.tree
    assert ckpt.verify(folder).notes[0].startswith("custom_checkpoint_0.pkl was not read: ")
    (folder / "optimizer.bin").write_bytes(compressed)
    with pytest.raises(UnsupportedError, match=r"optimizer\.bin"):
        ckpt.open(folder)


def test_files_of_single_ranks_are_told(tmp_path: Path) -> None:
    name = "pytorch_model_fsdp_0_rank1.bin"
    folder = with_file(tmp_path, name, b"")
    (note,) = ckpt.verify(folder).notes
    assert note.startswith(f"{name} was not read: each rank saved a file of its own")


def test_weights_in_two_forms_are_read_once(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "x")
    folder = with_file(tmp_path, "pytorch_model_fsdp.bin", (tmp_path / "x").read_bytes())
    assert torch.equal(ckpt.read(folder)["model"]["weight"], WEIGHT)
    told = "pytorch_model_fsdp.bin was not read: model is in model.safetensors"
    assert ckpt.verify(folder).notes[0] == told


def test_a_trainer_s_folder_without_weights_of_its_own_gives_those_of_deepspeed(
    tmp_path: Path,
) -> None:
    shutil.copytree(DATA / "deepspeed" / "stage1", tmp_path / "c")
    for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth"):
        shutil.copy(TRAINER / name, tmp_path / "c")
    found = ckpt.open(tmp_path / "c").catalog
    inner = ckpt.open(DATA / "deepspeed" / "stage1").catalog
    assert found.format == "trainer"
    assert found.weights == f"deepspeed.{inner.weights}" != "deepspeed."
    for folder in ("c", "inner"):
        source = tmp_path / "c" if folder == "c" else DATA / "deepspeed" / "stage1"
        ckpt.convert(source, tmp_path / f"{folder}.safetensors")
    assert ckpt.diff(tmp_path / "c.safetensors", tmp_path / "inner.safetensors").equal
    assert ckpt.verify(tmp_path / "c").sound


# Lightning.


@pytest.mark.parametrize("name", ["one.ckpt", "sharded"])
def test_a_checkpoint_of_lightning_is_one_checkpoint(name: str) -> None:
    state = ckpt.read(LIGHTNING / name)
    assert (state["epoch"], state["global_step"]) == (1, 2)
    assert state["state_dict"]["layer.weight"].shape == (4, 3)
    assert state["hyper_parameters"]["rate"] == 0.5
    assert ckpt.verify(LIGHTNING / name).sound


def test_both_forms_of_lightning_hold_the_same_weights() -> None:
    one, sharded = (ckpt.read(LIGHTNING / name) for name in ("one.ckpt", "sharded"))
    momentum = one["optimizer_states"][0]["state"]
    for number, name in enumerate(("layer.weight", "layer.bias")):
        assert torch.equal(one["state_dict"][name], sharded["state_dict"][name])
        theirs = sharded["optimizer_0"]["state"][name]["momentum_buffer"]
        assert torch.equal(momentum[number]["momentum_buffer"], theirs)


@pytest.mark.parametrize("name", ["one.ckpt", "sharded"])
def test_a_checkpoint_of_lightning_resumes_with_its_optimizer(name: str) -> None:
    module = nn.ModuleDict({"layer": nn.Linear(3, 4)})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
    held = {"optimizer_states": [optimizer]} if name == "one.ckpt" else {"optimizer_0": optimizer}
    target = {"state_dict": module, **held}
    ckpt.load(LIGHTNING / name, target, include=["state_dict.*", "optimizer*"])
    state = ckpt.read(LIGHTNING / name)
    assert torch.equal(module["layer"].weight, state["state_dict"]["layer.weight"])
    assert optimizer.param_groups[0]["momentum"] == 0.9
    saved = ckpt.read(LIGHTNING / "sharded")["optimizer_0"]["state"]["layer.bias"]
    found = optimizer.state[module["layer"].bias]["momentum_buffer"]
    assert torch.equal(found, saved["momentum_buffer"])


@pytest.mark.parametrize("name", ["one.ckpt", "sharded"])
def test_who_asks_for_weights_gets_those_of_lightning(tmp_path: Path, name: str) -> None:
    place = LIGHTNING / name
    state: Any = ckpt.read(place)
    report = ckpt.convert(place, tmp_path / "c.safetensors")
    assert set(report.beside) == set(state) - {"state_dict"}
    assert ckpt.diff(place, tmp_path / "c.safetensors").equal
    target = {name: torch.zeros_like(tensor) for name, tensor in state["state_dict"].items()}
    ckpt.load(place, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state["state_dict"].items())


def test_a_gguf_file_of_a_folder_s_weights_equals_them(tmp_path: Path) -> None:
    ckpt.convert(TRAINER, tmp_path / "c.gguf")
    assert ckpt.diff(TRAINER, tmp_path / "c.gguf").equal
