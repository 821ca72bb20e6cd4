"""Folders of DeepSpeed, as DeepSpeed 0.19 wrote them on two ranks (tests/data/deepspeed)."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.dtypes import BY_NAME
from formats.pickles.machine import load
from formats.pickles.records import Opaque
from formats.pickles.writer import dump
from tests.data.deepspeed.make import BUFFERS, FROZEN, STATES, TRAINED, VARIANTS, value

DATA = Path(__file__).parent.parent / "data" / "deepspeed"
ZERO = [variant for variant in VARIANTS if variant != "stage0"]
UNIVERSAL = "stage1/global_step1_universal"
SHAPES = {**TRAINED, **FROZEN, **BUFFERS}
HALF = ("stage2", "stage3", "bf16")
"""Variants whose module computes with bfloat16."""


def tensor(name: str, key: str = "fp32") -> torch.Tensor:
    return torch.tensor(value(name, key)).view(SHAPES[name])


class Model(nn.Module):
    """The module of tests/data/deepspeed/make.py, without a forward."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.fixed = nn.Linear(3, 4).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))


@pytest.mark.parametrize("place", [*ZERO, *(f"{each}/global_step1" for each in ZERO), UNIVERSAL])
def test_weights_and_moments_are_those_that_were_saved(place: str) -> None:
    found = ckpt.read(DATA / place)
    for name in TRAINED:
        assert torch.equal(found["fp32"][name], tensor(name))
        for key in STATES[1:]:
            assert torch.equal(found["optimizer"]["state"][name][key], tensor(name, key))
        assert found["optimizer"]["state"][name]["step"] == 1
    for name in (*FROZEN, *BUFFERS):
        for section in ("module", "fp32"):
            assert torch.equal(found[section][name].float(), tensor(name))
    for section in ("module", "fp32"):
        assert torch.equal(found[section]["head.weight"], found[section]["embed.weight"])
    assert (found["note"], found["epoch"], found["global_steps"]) == ("by hand", 3, 1)
    groups = found["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [list(TRAINED)[:2], list(TRAINED)[2:]]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]


@pytest.mark.parametrize("place", [*ZERO, UNIVERSAL])
def test_the_module_is_whole_in_the_precision_that_computes(place: str) -> None:
    found = ckpt.read(DATA / place)["module"]
    assert set(found) == {*SHAPES, "head.weight"}
    dtype = torch.bfloat16 if place in ("stage2", "bf16") else torch.float32
    assert {found[name].dtype for name in TRAINED} == {dtype}


def test_without_zero_the_file_is_read_as_it_is() -> None:
    found = ckpt.read(DATA / "stage0")
    assert torch.equal(found["module"]["embed.weight"], tensor("embed.weight"))
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], tensor("embed.weight", "exp_avg"))


def universal_of_stage_3(folder: Path) -> Path:
    """The Universal checkpoint that DeepSpeed's converter makes of `stage3`.

    The step lies in rank 0's part of the optimizer alone, not beside each parameter.
    """
    found, step = ckpt.read(DATA / "stage3"), DATA / "stage3" / "global_step1"
    shutil.copytree(step, folder, ignore=shutil.ignore_patterns("*optim_states.pt"))
    for name in TRAINED:
        (folder / "zero" / name).mkdir(parents=True)
        state = found["optimizer"]["state"][name]
        whole = {"fp32": found["fp32"][name], **{key: state[key] for key in STATES[1:]}}
        for key, tensor in whole.items():
            torch.save({"param": tensor.clone()}, folder / "zero" / name / f"{key}.pt")

    def change(saved: Any) -> None:
        of_rank = saved.pop("optimizer_state_dict")
        saved.clear()
        saved |= {**of_rank, "param_groups": of_rank["optimizer_state_dict"]["param_groups"]}

    of_rank = step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(of_rank, folder / "zero" / "optimizer_state.pt")
    rewrite(folder / "zero" / "optimizer_state.pt", change)
    return folder


@pytest.mark.parametrize("place", [*ZERO, "universal of stage3"])
def test_a_run_goes_on_with_its_optimizer(place: str, tmp_path: Path) -> None:
    folder = DATA / place
    if place == "universal of stage3":
        folder, place = universal_of_stage_3(tmp_path / "u"), "stage3"
    model = Model().to(torch.bfloat16 if place == "stage3" else torch.float32).float()
    named = dict(model.named_parameters())
    decayed = [named[name] for name in list(TRAINED)[:2]]
    others = [named[name] for name in list(TRAINED)[2:]]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.5}], lr=1.0
    )
    state = {"fp32": model, "optimizer": optimizer}
    ckpt.load(folder, state, include=["fp32.*", "optimizer*"], dtype="target")
    for name in TRAINED:
        assert torch.equal(named[name].detach(), tensor(name))
        held = optimizer.state[named[name]]
        assert torch.equal(held["exp_avg_sq"], tensor(name, "exp_avg_sq"))
        assert float(held["step"]) == 1
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("place", ["stage2", "stage3"])
def test_a_conversion_keeps_every_tensor(place: str, tmp_path: Path) -> None:
    ckpt.convert(DATA / place, tmp_path / "a.pt", include=["fp32.*"])
    found = torch.load(tmp_path / "a.pt", weights_only=True)["fp32"]
    assert set(found) == {*SHAPES, "head.weight"}
    for name in TRAINED:
        assert torch.equal(found[name], tensor(name))


@pytest.mark.parametrize("place", ["stage1", "stage3", UNIVERSAL])
def test_who_asks_for_weights_gets_the_master_weights(place: str, tmp_path: Path) -> None:
    model = Model()
    ckpt.load(DATA / place, model, dtype="target")  # frozen parameters have 16 bits
    ckpt.convert(DATA / place, tmp_path / "w.safetensors")
    found = ckpt.read(tmp_path / "w.safetensors")
    for name in TRAINED:
        assert torch.equal(found[name], tensor(name))
        assert torch.equal(model.get_parameter(name).detach(), tensor(name))


@pytest.mark.parametrize("place", [*VARIANTS, UNIVERSAL])
def test_verify_checks_every_file(place: str) -> None:
    report = ckpt.verify(DATA / place)
    assert report.sound, report


@pytest.mark.parametrize("trainer", ["trainer/checkpoint-2", "accelerate/plain"])
def test_a_trainers_folder_has_it_beside_its_own_parts(trainer: str, tmp_path: Path) -> None:
    shutil.copytree(DATA.parent / trainer, tmp_path / "run")
    shutil.copytree(DATA / "stage1", tmp_path / "run", dirs_exist_ok=True)
    found = ckpt.read(tmp_path / "run")
    assert "model" in found
    assert torch.equal(found["deepspeed"]["fp32"]["inner.bias"], tensor("inner.bias"))
    assert ckpt.verify(tmp_path / "run").sound


def test_a_trainers_folder_shows_that_it_was_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(DATA.parent / "trainer" / "checkpoint-2", folder)
    (folder / "optimizer.pt").unlink()
    shutil.copytree(DATA / "stage1", folder, dirs_exist_ok=True)
    found = ckpt.read(folder)
    assert "model" in found
    assert torch.equal(found["deepspeed"]["fp32"]["inner.bias"], tensor("inner.bias"))
    shutil.rmtree(folder / "global_step1")
    notes = ckpt.verify(folder).notes
    assert any("DeepSpeed was not read" in note for note in notes)


# Folders that cannot be read.


def changed(folder: Path, place: str, *removed: str, **renamed: str) -> Path:
    """A copy of a step's folder without these files; `new=old` renames `old`."""
    target = folder / "step"
    shutil.copytree(DATA / place / "global_step1", target)
    for name in removed:
        (target / name).unlink()
    for new, old in renamed.items():
        shutil.copy(target / old, target / f"{new}.pt")
    return target


def rewrite(file: Path, change: Callable[[Any], None]) -> None:
    """Changes the content of a file; objects that only DeepSpeed can make become None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(plain, value))
        return None if isinstance(value, Opaque) else value

    with zipfile.ZipFile(file) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(file, "w") as new:
        for name, data in records.items():
            if name.endswith("/data.pkl"):
                content = plain(load(data, name))
                change(content)
                data = dump(content)
            new.writestr(name, data)


def test_a_rank_whose_file_is_missing_is_named(tmp_path: Path) -> None:
    first = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    second = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with pytest.raises(CorruptError, match="none of rank 0"):
        ckpt.read(changed(tmp_path / "a", "stage1", first))
    with pytest.raises(CorruptError, match=r"2 ranks saved .*, files of 1 are there"):
        ckpt.read(changed(tmp_path / "b", "stage1", second))


def test_a_buffer_without_elements_is_no_part_of_a_parameter(tmp_path: Path) -> None:
    def change(saved: Any) -> None:
        saved["module"]["cache"] = replace(saved["module"]["scale"], shape=(0,), strides=(1,))
        saved["buffer_names"].append("cache")

    folder = changed(tmp_path, "stage3")
    rewrite(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", change)
    found = ckpt.read(folder)
    assert found["module"]["cache"].shape == found["fp32"]["cache"].shape == (0,)


def test_stage_3_needs_the_files_of_the_optimizer(tmp_path: Path) -> None:
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    with pytest.raises(CorruptError, match="data of the parameter 'embed"):
        ckpt.read(changed(tmp_path, "stage3", *names))


def test_stage_2_without_the_files_of_the_optimizer_is_the_module(tmp_path: Path) -> None:
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    found = ckpt.read(changed(tmp_path, "stage2", *names))
    assert "fp32" not in found
    assert set(found["module"]) == {*SHAPES, "head.weight"}


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("mp_rank_01_model_states", "tensor-parallel"),
        ("zero_pp_rank_0_mp_rank_01_optim_states", "tensor-parallel"),
        ("layer_0_expert_1_mp_rank_00_model_states", "experts"),
        ("layer_03-model_00-model_states", "layers of a pipeline"),
    ],
)
def test_a_model_in_parts_is_refused_with_the_way_out(tmp_path: Path, file: str, part: str) -> None:
    folder = changed(tmp_path, "stage1", **{file: "mp_rank_00_model_states.pt"})
    with pytest.raises(UnsupportedError, match=part) as refused:
        ckpt.read(folder)
    assert "ds_to_universal.py" in str(refused.value)


def test_one_of_the_parallel_ranks_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    def change(saved: Any) -> None:
        saved["mp_world_size"] = 2

    folder = changed(tmp_path, "stage1")
    rewrite(folder / "mp_rank_00_model_states.pt", change)
    with pytest.raises(UnsupportedError, match="2 saved it"):
        ckpt.read(folder)


def test_a_universal_folder_without_the_file_of_rank_0_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / UNIVERSAL, tmp_path / "u")
    file = tmp_path / "u" / "mp_rank_00_model_states.pt"
    file.rename(tmp_path / "u" / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    with pytest.raises(CorruptError, match="none of rank 0"):
        ckpt.read(tmp_path / "u")


def test_a_buffer_of_a_universal_folder_has_the_dtype_of_the_module(tmp_path: Path) -> None:
    """DeepSpeed's converter makes 32-bit floats of buffers."""
    shutil.copytree(DATA / UNIVERSAL, tmp_path / "u")

    def change(saved: Any) -> None:
        scale, dtype = saved["module"]["scale"], BY_NAME["I32"]
        storage = replace(scale.storage, dtype=dtype)
        saved["module"]["scale"] = replace(scale, storage=storage, dtype=dtype)

    rewrite(tmp_path / "u" / "mp_rank_00_model_states.pt", change)
    found = ckpt.read(tmp_path / "u")
    for section in ("module", "fp32"):
        assert found[section]["scale"].dtype == torch.int32
    assert ckpt.verify(tmp_path / "u").sound


def states_of(saved: Any) -> Any:
    """The state of the optimizer in a rank's file, by the numbers of its partitions."""
    found = saved["optimizer_state_dict"]
    return (found.get("base_optimizer_state") or found["optimizer_state_dict"])["state"]


@pytest.mark.parametrize("place", ["stage1", "stage3"])
@pytest.mark.parametrize("rank", [0, 1])
def test_state_that_a_rank_lacks_stays_with_the_ranks_that_have_it(
    place: str, rank: int, tmp_path: Path
) -> None:
    def change(saved: Any) -> None:
        for state in states_of(saved).values():
            del state["exp_avg"]

    folder = changed(tmp_path, place)
    rewrite(sorted(folder.glob("*optim_states.pt"))[rank], change)
    found = ckpt.read(folder)
    assert "exp_avg" not in found["optimizer"]["state"]["inner.bias"]
    kept = found["zero"]["state of ranks"]
    assert kept[rank][0]["exp_avg"] is None
    assert kept[1 - rank][0]["exp_avg"].numel()


@pytest.mark.parametrize("place", ["stage1", "stage3"])
def test_numbers_that_differ_between_ranks_stay_with_their_ranks(
    place: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, place)
    for rank, file in enumerate(sorted(folder.glob("*optim_states.pt"))):

        def change(saved: Any, rank: int = rank) -> None:
            for state in states_of(saved).values():
                state |= {"rms": 0.5 + rank, "same": 3}

        rewrite(file, change)
    found = ckpt.read(folder)
    assert found["optimizer"]["state"]["inner.bias"]["same"] == 3
    assert "rms" not in found["optimizer"]["state"]["inner.bias"]
    kept = found["zero"]["state of ranks"]
    assert [kept[rank][0]["rms"] for rank in (0, 1)] == [0.5, 1.5]


@pytest.mark.parametrize("place", ["stage1", "stage3"])
def test_a_rank_that_saved_no_state_is_named(place: str, tmp_path: Path) -> None:
    def change(saved: Any) -> None:
        key = "base_optimizer_state" if place == "stage1" else "optimizer_state_dict"
        saved["optimizer_state_dict"][key] = None

    folder = changed(tmp_path, place)
    rewrite(sorted(folder.glob("*optim_states.pt"))[1], change)
    with pytest.raises(FormatError, match=r"rank_1.*2 flat partitions and 0 states"):
        ckpt.read(folder)


def test_files_of_two_checkpoints_are_not_taken_for_one(tmp_path: Path) -> None:
    folder = changed(tmp_path, "stage2", "mp_rank_00_model_states.pt")
    saved = torch.load(DATA / "stage1/global_step1/mp_rank_00_model_states.pt", weights_only=True)
    saved["param_shapes"][0]["inner.weight"] = torch.Size([30, 3])
    torch.save(saved, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(FormatError, match="the flat partitions have 25 elements"):
        ckpt.read(folder)


def test_latest_must_name_a_step(tmp_path: Path) -> None:
    shutil.copytree(DATA / "stage1", tmp_path / "run")
    (tmp_path / "run" / "latest").write_text("../elsewhere")
    with pytest.raises(UnsupportedError, match="names the folder"):
        ckpt.read(tmp_path / "run")


def test_a_universal_parameter_without_weights_is_named(tmp_path: Path) -> None:
    shutil.copytree(DATA / UNIVERSAL, tmp_path / "u")
    (tmp_path / "u" / "zero" / "inner.bias" / "fp32.pt").unlink()
    with pytest.raises(CorruptError, match=r"zero/inner.bias: the file fp32.pt is missing"):
        ckpt.read(tmp_path / "u")


def test_limits_hold_for_the_files_of_universal_parameters(tmp_path: Path) -> None:
    shutil.copytree(DATA / UNIVERSAL, tmp_path / "u")
    file = tmp_path / "u" / "zero" / "inner.bias" / "fp32.pt"
    saved = torch.load(file, weights_only=True)
    torch.save({**saved, "note": "x" * 100_000}, file)
    with ckpt.limits(pickle_bytes=50_000), pytest.raises(HostileError, match="pickle_bytes would"):
        ckpt.read(tmp_path / "u")
