"""Trainers of other libraries stop and go on by checkpoints of ckpt, on as many or more ranks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIRST, LAST = 6, 10
PROGRAM = """
import importlib, json, os, shutil, sys
examples, name, options, then, folder, first, last, worlds = sys.argv[1:]
sys.path.insert(0, examples)
import warnings
warnings.simplefilter("ignore")
example = importlib.import_module(name)
from tests.integrations.as_torchrun import as_torchrun
def run(world_size, place, steps, options, *more):
    out = os.path.join(folder, f"out-{place}-{world_size}-{steps}")
    os.mkdir(out)
    given = ["--folder", os.path.join(folder, place), "--steps", steps, *json.loads(options), *more]
    as_torchrun(world_size, example.main, given, out)
    return json.loads(open(os.path.join(out, "rank0")).read().splitlines()[-1])
answers = {"first": run(2, "run", first, options), "whole": run(2, "whole", last, options)}
for world_size in json.loads(worlds):
    place = f"on-{world_size}"
    shutil.copytree(os.path.join(folder, "run"), os.path.join(folder, place))
    answers[place] = run(world_size, place, last, then, "--resume")
print(json.dumps(answers))
"""
"""Trains six steps, and ten at once; goes on from the six by each number of ranks."""


SLOW = pytest.mark.slow
"""Each library has a case that is not slow."""


def losses_of(
    programs: Callable[..., Any],
    name: str,
    options: list[str],
    then: list[str],
    folder: Path,
    worlds: list[int],
) -> dict[str, list[float]]:
    """The losses of each run: `options` are those of the first, `then` of those that resume it."""
    given = map(json.dumps, (options, then))
    arguments = [str(EXAMPLES), name, *given, str(folder), str(FIRST), str(LAST)]
    program = programs(PROGRAM, *arguments, json.dumps(worlds))
    out, err = program.communicate(timeout=280)
    assert program.returncode == 0, err
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("library", "name", "options", "worlds"),
    [
        pytest.param("lightning", "with_lightning", ["--how", "fsdp2"], [3], marks=SLOW),
        pytest.param("lightning", "with_lightning", ["--how", "fsdp2"], [2], marks=SLOW),
        pytest.param("lightning", "with_lightning", ["--how", "ddp"], [3], marks=SLOW),
        pytest.param("lightning", "with_lightning", ["--how", "plugin"], [2], marks=SLOW),
        ("accelerate", "with_accelerate", [], [3]),
        pytest.param("accelerate", "with_accelerate", ["--dropout", "0.3"], [2], marks=SLOW),
        pytest.param("transformers", "with_trainer", [], [3], marks=SLOW),
        pytest.param("transformers", "with_trainer", ["--dropout", "0.3"], [2], marks=SLOW),
        ("peft", "with_trainer", ["--lora"], [3]),
        pytest.param("peft", "with_trainer", ["--lora"], [2], marks=SLOW),
        ("torch", "with_dataloader", [], [3, 2]),
        ("torchtitan", "with_torchtitan", [], [3]),
        pytest.param("torchtitan", "with_torchtitan", [], [2], marks=SLOW),
        pytest.param("torchtitan", "with_torchtitan", ["--how", "disabled"], [3], marks=SLOW),
    ],
)
@pytest.mark.thorough
def test_a_trainer_of_another_library_goes_on_where_it_stopped(
    programs: Callable[..., Any],
    library: str,
    name: str,
    options: list[str],
    worlds: list[int],
    tmp_path: Path,
) -> None:
    """To the bit on as many ranks, within the order of additions on more."""
    needed = {library, "accelerate"} if name == "with_trainer" else {library}
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the example needs {package}, which is not installed")
    losses = losses_of(programs, name, options, options, tmp_path, worlds)
    assert losses["first"] == losses["whole"][:FIRST]
    for world_size in worlds:
        resumed, whole = losses[f"on-{world_size}"], losses["whole"][FIRST:]
        assert resumed == (whole if world_size == 2 else pytest.approx(whole, rel=1e-4))
    kept = {place.parent for place in tmp_path.glob("run/**/manifest.json")}
    assert 2 <= len(kept) <= 3
    if "--lora" in options:
        for place in kept:
            with ckpt.open(place) as stored:
                weights = [tensor for tensor in stored if tensor.startswith("model.")]
            assert weights
            assert all("lora" in tensor for tensor in weights)


@pytest.mark.parametrize(("first", "then"), [("fsdp2", "ddp"), ("ddp", "fsdp2")])
@SLOW
def test_each_strategy_of_lightning_resumes_what_the_other_saved(
    programs: Callable[..., Any], first: str, then: str, tmp_path: Path
) -> None:
    pytest.importorskip("lightning", reason="the example needs lightning")
    hows = ["--how", first], ["--how", then]
    losses = losses_of(programs, "with_lightning", *hows, tmp_path, [2])
    assert losses["on-2"] == losses["whole"][FIRST:]
