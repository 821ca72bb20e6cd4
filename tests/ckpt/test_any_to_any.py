"""What any runtime saved on any number of ranks, any other loads on any other and trains on.

A run trains two steps, saves, and trains three more. Every target is made from another seed with
other options, loads, and trains those three steps.

* What was loaded is what was saved, bit for bit, in every pair: parameters, buffers, moments, steps
  and options; frozen stays frozen, tied stays tied. It is read by the target's own runtime.
* What comes of the three steps is equal bit for bit where both compute alike, which is nearly
  everywhere; the note in `trainers` says where not and why. Elsewhere it is as close as `ROUNDING`.

`make test-slow` runs this. The first table has each kind as a target of four others and as a source
of four, as a target at one world size and as a source at another; the second every pair of both.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.ckpt.trainers import (
    KINDS,
    Snapshot,
    Trainer,
    arithmetic,
    is_tied,
    snapshot,
    train,
    trainer,
    worlds,
)

ROUNDING = 2e-6
"""How far an element may be off, as a part of its tensor's largest, where sums were made in another
order: some units in the last place of float32."""

Run = tuple[str, int]
"""A kind of trainer and its number of ranks."""


# What runs on the ranks.


def train_and_save(kind: str, folder: str) -> None:
    """Save after two steps, with the run itself beside it: what was saved and what came of it."""
    source = trainer(kind, seed=0)
    train(source, 0, 2)
    source.optimizer.param_groups[0]["lr"] = 0.015  # as a schedule would have it
    ckpt.save(f"{folder}/checkpoint", {"model": source.model, "optim": source.optimizer, "step": 2})
    run = {"saved": snapshot(source), "options": options(source)}
    run |= {"losses": train(source, 2, 3), "final": snapshot(source)}
    if dist.get_rank() == 0:
        torch.save(run, f"{folder}/run.pt")


def load_and_train(kind: str, runs: list[tuple[Run, str]]) -> list[str]:
    """What differs after loading each of these runs and training on, on this rank."""
    here = arithmetic(kind, dist.get_world_size())
    problems = []
    for source, folder in runs:
        try:
            found = load_and_train_one(kind, folder, exact=arithmetic(*source) == here)
        except Exception as error:
            raise AssertionError(f"{source} does not load into {kind}") from error
        problems += [f"{source}: {problem}" for problem in found]
    return problems


def load_and_train_one(kind: str, folder: str, exact: bool) -> list[str]:
    """What differs after loading one run, and after training on."""
    run = torch.load(f"{folder}/run.pt")
    target = trainer(kind, seed=1)
    for group in target.optimizer.param_groups:
        group.update(lr=9.0, betas=(0.1, 0.2), weight_decay=0.9, eps=1.0)
    trained = [p.requires_grad for p in target.model.parameters()]
    state = {"model": target.model, "optim": target.optimizer, "step": 0}
    ckpt.load(f"{folder}/checkpoint", state)
    found = unlike(snapshot(target), run["saved"], exact=True)
    if options(target) != run["options"]:
        found.append(f"options {options(target)}")
    if state["step"] != 2:
        found.append(f"step {state['step']}")
    if trained != [p.requires_grad for p in target.model.parameters()]:
        found.append("another parameter is frozen")
    if not is_tied(target):
        found.append("the embedding is not the head's weight any more")
    losses = torch.tensor(train(target, 2, 3), dtype=torch.float64)
    wanted = torch.tensor(run["losses"], dtype=torch.float64)
    after = unlike({"losses": losses}, {"losses": wanted}, exact)
    after += unlike(snapshot(target), run["final"], exact)
    return found + [f"after training on, {problem}" for problem in after]


def options(this: Trainer) -> list[dict[str, Any]]:
    """The options of the optimizer's groups."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in this.optimizer.param_groups
    ]


def unlike(found: Snapshot, wanted: Snapshot, exact: bool) -> list[str]:
    """The tensors that one side lacks, or that differ: in a bit, or by more than `ROUNDING`."""
    if found.keys() != wanted.keys():
        return [f"only one of the two has {sorted(found.keys() ^ wanted.keys())}"]
    return [
        f"{name} is off by {(found[name] - tensor).abs().max()}"
        for name, tensor in wanted.items()
        if not (same_bits if exact else close)(found[name], tensor)
    ]


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and (
        found.numpy().tobytes() == wanted.numpy().tobytes()
    )


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    scale = float(wanted.nan_to_num().abs().max())  # NaN: a frozen parameter has no moments
    return torch.allclose(found, wanted, rtol=0, atol=ROUNDING * scale, equal_nan=True)


# Which pairs.


RUNS = [(kind, ranks) for kind in KINDS for ranks in worlds(kind)]


def ranks_of(kind: str, turn: int) -> int:
    """One of the world sizes that a kind can have."""
    return worlds(kind)[turn % len(worlds(kind))]


def covering() -> dict[Run, list[Run]]:
    """The pairs that are run: by target, the sources."""
    pairs: dict[Run, list[Run]] = {}
    for (i, source), (j, target) in product(enumerate(KINDS), repeat=2):
        if (i + j) % 3 == 0:
            loading = (target, ranks_of(target, j))
            pairs.setdefault(loading, []).append((source, ranks_of(source, i + 2)))
    return pairs


def test_the_selection_has_each_kind_on_either_side_and_all_numbers_of_ranks() -> None:
    pairs = [(source, target) for target, sources in covering().items() for source in sources]
    for side in zip(*pairs, strict=True):
        assert {kind for kind, _ in side} == {*KINDS}
        assert {ranks for _, ranks in side} == {1, 2, 3, 4}
    assert len({(s[1], t[1]) for s, t in pairs}) >= 10


# The table.


@pytest.fixture(scope="module")
def saved(
    clusters: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Run], str]:
    """A function from a run to the folder of it; it is made when it is first asked for."""
    folders: dict[Run, str] = {}

    def folder_of(run: Run) -> str:
        if run not in folders:
            kind, ranks = run
            folder = str(tmp_path_factory.mktemp(f"{kind}-on-{ranks}"))
            clusters(ranks).run(train_and_save, kind, folder)
            folders[run] = folder
        return folders[run]

    return folder_of


def check(
    clusters: Callable[[int], Any],
    saved: Callable[[Run], str],
    target: Run,
    sources: list[Run],
) -> None:
    kind, ranks = target
    runs = [(source, saved(source)) for source in sources]
    for rank, problems in enumerate(clusters(ranks).run(load_and_train, kind, runs)):
        assert not problems, f"rank {rank} of {target}\n" + "\n".join(problems)


@pytest.mark.slow
def test_runs_that_compute_alike_are_equal_and_all_others_close(
    saved: Callable[[Run], str],
) -> None:
    one = torch.load(f"{saved(('plain', 1))}/run.pt")
    for run in sorted({source for sources in covering().values() for source in sources}):
        found = torch.load(f"{saved(run)}/run.pt")
        exact = arithmetic(*run) == arithmetic("plain", 1)
        for moment in ("saved", "final"):
            assert not unlike(found[moment], one[moment], exact), run


def named(run: Run) -> str:
    return f"{run[0]}-on-{run[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("target", covering(), ids=named)
def test_any_trainer_loads_what_any_other_saved_and_goes_on_as_it_would_have(
    clusters: Callable[[int], Any], saved: Callable[[Run], str], target: Run
) -> None:
    check(clusters, saved, target, covering()[target])


@pytest.mark.slow
@pytest.mark.parametrize("target", RUNS, ids=named)
def test_every_trainer_at_every_world_size_loads_what_every_other_saved(
    clusters: Callable[[int], Any], saved: Callable[[Run], str], target: Run
) -> None:
    check(clusters, saved, target, RUNS)
