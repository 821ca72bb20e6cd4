"""What does not fit or is damaged is an error that names it, on every rank, and touches nothing.

Every case meets targets of several runtimes, fresh ones and ones that have stepped. On each rank
all that it holds is compared with what it held before, bit for bit: its parts of parameters,
buffers and optimizer state, the options of the groups, the values beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import ckpt
from tests.ckpt.trainers import KINDS, Block, Network, Trainer, train, trainer

TARGETS = tuple(
    kind
    for kind in (
        "ddp",
        "torch-fsdp1-flat",
        "torch-fsdp1-original",
        "torch-fsdp2",
        "wrapper-flat",
        "wrapper-original",
        "composable",
        "fully_shard",
    )
    if kind in KINDS
)
RANKS = 2


class Other(Network):
    """Another architecture: a block of another size, one more, and no frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), Block(10), Block(5)])
        self.frozen = nn.Identity()


class Deeper(Network):
    """The same with one more block, which the optimizer knows too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block(5))


def in_one_group(this: Trainer) -> Trainer:
    """The same, all of its parameters in one group of the optimizer."""
    parameters = [p for group in this.optimizer.param_groups for p in group["params"]]
    return replace(this, optimizer=AdamW(parameters, lr=0.01))


def with_another_model_s_optimizer(this: Trainer) -> Trainer:
    """The same model with an optimizer that also has a parameter of no module in the state."""
    parameters = [p for group in this.optimizer.param_groups for p in group["params"]]
    return replace(this, optimizer=AdamW([*parameters, nn.Parameter(torch.ones(3))], lr=0.01))


MADE: dict[str, Callable[[str], Trainer]] = {
    "alike": lambda kind: trainer(kind, seed=1),
    "another architecture": lambda kind: trainer(kind, seed=1, model=Other),
    "one more block": lambda kind: trainer(kind, seed=1, model=Deeper),
    "one group": lambda kind: in_one_group(trainer(kind, seed=1)),
    "a stranger": lambda kind: with_another_model_s_optimizer(trainer(kind, seed=1)),
}
"""Targets, by what they are beside what was saved."""


# What runs on the ranks.

Outcome = tuple[str, str, list[str]]
"""The error's class, its message, and what of the target was touched."""


def save(kind: str, folder: str) -> None:
    source = trainer(kind, seed=0)
    train(source, 0, 2)
    ckpt.save(folder, {"model": source.model, "optim": source.optimizer, "step": 2})


def save_what_differs(made: str, kinds: tuple[str, ...], folder: str) -> dict[str, Outcome]:
    """What becomes of saves in which the last rank has something else than the others."""
    found: dict[str, Outcome] = {}
    for kind in kinds:
        last = dist.get_rank() == dist.get_world_size() - 1
        source = MADE[made if last else "alike"](kind)
        state = {"model": source.model, "optim": source.optimizer, "step": 7}
        found[kind] = outcome(state, lambda state=state: ckpt.save(folder, state))
    return found


def load(
    made: str, folder: str, include: str | None, kinds: Sequence[str] = TARGETS
) -> dict[str, Outcome]:
    """What becomes of targets of each kind, fresh and stepped, on this rank."""
    found: dict[str, Outcome] = {}
    for kind in kinds:
        for stepped in (False, True):
            target = MADE[made](kind)
            train(target, 7, int(stepped))
            target.optimizer.zero_grad()
            state = {"model": target.model, "optim": target.optimizer, "step": 7}
            found[f"{kind}, {'stepped' if stepped else 'fresh'}"] = outcome(
                state, lambda state=state: ckpt.load(folder, state, include=include)
            )
    return found


def outcome(state: dict[str, Any], action: Callable[[], object]) -> Outcome:
    """What an action raises, and what it does to a state."""
    before = dict(held(state))
    error = ("nothing", "")
    try:
        action()
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    after = dict(held(state))
    return (*error, [name for name in before | after if before.get(name) != after.get(name)])


def held(state: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Everything that this rank holds, by name: bits of tensors and values."""
    yield "step", state["step"]
    model, optimizer = state["model"], state["optim"]
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        yield f"parameter {name}", (bits(parameter), parameter.requires_grad)
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", bits(buffer)
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            yield f"{key} of {names[parameter]}", bits(value)
    for position, group in enumerate(optimizer.param_groups):
        yield f"members of group {position}", [id(p) for p in group["params"]]
        options = {key: value for key, value in group.items() if key != "params"}
        yield f"options of group {position}", options


def bits(tensor: torch.Tensor) -> tuple[int, str, bytes]:
    """Where this rank's elements of a tensor lie, and what they are."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return local.data_ptr(), str(local.dtype), local.contiguous().numpy().tobytes()


def check(outcomes: list[dict[str, Outcome]], error: str | tuple[str, ...], *named: str) -> None:
    """Every rank has raised, one of them this error or all; each message has these words."""
    errors = (error,) if isinstance(error, str) else error
    assert all(outcome.keys() == outcomes[0].keys() for outcome in outcomes)
    for target in outcomes[0]:
        raised = [outcome[target] for outcome in outcomes]
        assert all(name in (*errors, "RankError") for name, _, _ in raised), (target, raised)
        assert any(name in errors for name, _, _ in raised), (target, raised)
        for _, message, touched in raised:
            assert all(word in message for word in named), (target, message)
            assert not touched, target


# Checkpoints.


@pytest.fixture(scope="module")
def sound(clusters: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks saved."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoint"
    clusters(RANKS).run(save, "fully_shard", str(folder))
    return folder


def copied(folder: Path, to: Path) -> tuple[Path, list[str]]:
    """A copy to damage, and the names of its shard files by rank."""
    shutil.copytree(folder, to)
    manifest = json.loads((to / "manifest.json").read_bytes())
    return to, [entry[0] for entry in manifest["files"]]


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and give it the digest that belongs to it."""
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())
    del content["digest"]
    change(content)
    body = json.dumps(content, separators=(",", ":")).encode()
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    path.write_bytes(b'{"digest":"' + digest + b'",' + body[1:])


@pytest.mark.thorough
def test_the_checkpoint_is_sound_as_it_is_and_as_it_is_signed_here(
    clusters: Callable[[int], Any], sound: Path, tmp_path: Path
) -> None:
    folder, _ = copied(sound, tmp_path / "signed")
    rewritten(folder, lambda content: None)
    for outcomes in clusters(RANKS).run(load, "alike", str(folder), None):
        for target, (error, message, touched) in outcomes.items():
            assert error == "nothing", (target, message)
            kinds = {name.split()[0] for name in touched}
            assert {"step", "parameter", "buffer", "exp_avg", "exp_avg_sq"} <= kinds, target


# What does not fit.


@pytest.mark.thorough
def test_another_architecture_is_named_with_all_that_differs(
    clusters: Callable[[int], Any], sound: Path
) -> None:
    outcomes = clusters(RANKS).run(load, "another architecture", str(sound), "model.*")
    check(
        outcomes,
        "MismatchError",
        "model.blocks.1.up.weight: the checkpoint has shape (9, 7), the target has (10, 7)",
        "model.blocks.2.down.bias: is in the target and not in the checkpoint",
        "model.frozen.turn.bias: is in the checkpoint and not in the target",
    )


@pytest.mark.thorough
def test_a_parameter_that_the_saved_optimizer_did_not_have_is_named(
    clusters: Callable[[int], Any], sound: Path
) -> None:
    outcomes = clusters(RANKS).run(load, "one more block", str(sound), "optim.*")
    check(
        outcomes,
        "MismatchError",
        "optim.param_groups.0: 4 of its 12 parameters are in no group of the checkpoint, the first "
        "is blocks.2.up.weight",
    )


def test_an_entry_that_was_not_saved_of_one_parameter_is_named(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    source = trainer("plain", seed=0)
    train(source, 0, 2)
    del source.optimizer.state[source.model.get_parameter("blocks.0.up.weight")]["exp_avg_sq"]
    ckpt.save(tmp_path, {"model": source.model, "optim": source.optimizer, "step": 2})
    check(
        clusters(RANKS).run(load, "alike", str(tmp_path), None),
        "MismatchError",
        "optim.state.blocks.0.up.weight.exp_avg_sq: is not in the checkpoint, which has exp_avg_sq "
        "of blocks.0.down.weight",
    )


@pytest.mark.thorough
def test_parameters_that_were_in_several_groups_and_now_in_one_are_named(
    clusters: Callable[[int], Any], sound: Path
) -> None:
    check(
        clusters(RANKS).run(load, "one group", str(sound), None),
        "MismatchError",
        "optim.param_groups.0: its parameters are in the groups [0, 1] of the checkpoint",
    )


def test_an_optimizer_of_another_model_is_refused(
    clusters: Callable[[int], Any], sound: Path
) -> None:
    check(
        clusters(RANKS).run(load, "a stranger", str(sound), None),
        "StateError",
        "of shape (3,) belongs to no module of the state",
    )


DIFFERENT: dict[str, tuple[tuple[str, ...], str]] = {
    "a stranger": (TARGETS, "of shape (3,) belongs to no module of the state"),
    "another architecture": (("plain",), "model.blocks.1.up.weight: rank 0 has float32 [9, 7]"),
}
"""What the last rank has that cannot be saved beside the others': of which kinds, and the words."""


@pytest.mark.parametrize("made", DIFFERENT)
def test_what_one_rank_cannot_save_is_an_error_on_all_and_nothing_is_written(
    clusters: Callable[[int], Any], tmp_path: Path, made: str
) -> None:
    kinds, words = DIFFERENT[made]
    folder = tmp_path / "checkpoint"
    outcomes = clusters(RANKS).run(save_what_differs, made, kinds, str(folder))
    check(outcomes, "StateError", words)
    assert not folder.exists()


# What lies about who wrote it.


def put(value: object, *path: str | int) -> Callable[[dict[str, Any]], None]:
    """A change of a manifest: this value at this place."""

    def change(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return change


def swapped_ranks(content: dict[str, Any]) -> None:
    first, second = content["files"]
    first[1], second[1] = second[1], first[1]


WORLDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "one rank fewer": put([1], "meshes", 0, "sizes"),
    "one rank more": put([3], "meshes", 0, "sizes"),
    "many more": put([2**20], "meshes", 0, "sizes"),
    "ranks from one on": put(1, "meshes", 0, "offset"),
    "a rank that is not there": put(2, "files", 1, 1),
    "a file fewer": lambda content: content["files"].pop(),
    "each the other's rank": swapped_ranks,
}
"""Changes of a manifest so that its ranks are not those that saved."""


EVERY_TARGET = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
"""A checkpoint that no target can load: one target by turns, and every target."""


def some(number: int, every: bool) -> Sequence[str]:
    """The kinds of targets: one by this number, or every one."""
    return TARGETS if every else (TARGETS[number % len(TARGETS)],)


@EVERY_TARGET
@pytest.mark.parametrize("lie", WORLDS)
def test_another_world_size_than_that_of_the_shards_is_refused(
    clusters: Callable[[int], Any], sound: Path, tmp_path: Path, lie: str, every: bool
) -> None:
    folder, _ = copied(sound, tmp_path / "broken")
    rewritten(folder, WORLDS[lie])
    kinds = some([*WORLDS].index(lie), every)
    outcomes = clusters(RANKS).run(load, "alike", str(folder), None, kinds)
    check(outcomes, ("FormatError", "CorruptError", "HostileError"), str(folder))


# What is missing of a file.


@pytest.mark.costly
@EVERY_TARGET
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 1.0])
def test_a_shard_file_that_was_cut_short_is_named(
    clusters: Callable[[int], Any],
    sound: Path,
    tmp_path: Path,
    rank: int,
    part: float,
    every: bool,
) -> None:
    folder, files = copied(sound, tmp_path / "broken")
    data = (folder / files[rank]).read_bytes()
    (folder / files[rank]).write_bytes(data[: int(part * (len(data) - 1))])
    kinds = some(rank + 2 * int(10 * part), every)
    outcomes = clusters(RANKS).run(load, "alike", str(folder), None, kinds)
    check(outcomes, "SizeError", files[rank], "bytes")
