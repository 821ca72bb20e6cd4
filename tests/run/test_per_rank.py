"""State of each rank: random numbers, loaders, and the answer where the ranks are others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt

ANSWERS = ("refuse", "keep", "divide")


class Loader:
    """The samples of one rank, each seen once."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"samples": {"left": self.samples}, "buffer": torch.tensor(self.samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples = state["samples"]["left"]
        assert state["buffer"].tolist() == self.samples


def divided(states: Mapping[int, Any], rank: int, world_size: int) -> dict[str, Any]:
    """The samples of all ranks, dealt out to so many."""
    left = [one for rank in sorted(states) for one in states[rank]["samples"]["left"]]
    mine = left[rank::world_size]
    return {"samples": {"left": mine}, "buffer": torch.tensor(mine)}


def answer(name: str) -> Any:
    return divided if name == "divide" else name


def drawn() -> list[object]:
    """Random numbers of every kind."""
    numbers = [random.random(), random.gauss(0, 1), random.getrandbits(64)]
    return [*numbers, *np.random.rand(3), np.random.randn(), *torch.randn(3).tolist()]


def saved(folder: str) -> list[object]:
    """The numbers that a rank draws after a save."""
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    drawn()  # an odd number of Gaussians: one is left over in Python's state and in numpy's
    loader = Loader(list(range(10 * rank, 10 * rank + 4)))
    ckpt.save(folder, {"rng": ckpt.rng(), "loader": ckpt.per_rank(loader), "step": 7})
    return drawn()


def loaded(folder: str, on_resize: str) -> tuple[list[object], list[int], list[str]]:
    """The numbers that a rank draws after a load, its samples, and its loader's calls."""
    random.seed(100)
    np.random.seed(100)
    torch.manual_seed(100)
    loader = Loader([-1])
    state = {"rng": ckpt.rng(), "loader": ckpt.per_rank(loader, on_resize=answer(on_resize))}
    ckpt.load(folder, {**state, "step": 0})
    return drawn(), loader.samples, loader.calls


def refused(folder: str) -> tuple[str, bool]:
    """The error of a load by other ranks, and whether the loader is what it was."""
    loader = Loader([-1])
    before = torch.get_rng_state()
    state = {"rng": ckpt.rng(), "loader": ckpt.per_rank(loader), "step": 0}
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(folder, state)
    return error.value.reason, loader.samples == [-1] and torch.equal(before, torch.get_rng_state())


def test_as_many_ranks_go_on_to_the_bit(clusters: Callable[[int], Any], tmp_path: Path) -> None:
    drawn_on = clusters(2).run(saved, str(tmp_path / "c"))
    assert drawn_on[0] != drawn_on[1]
    for name in ANSWERS:
        found = clusters(2).run(loaded, str(tmp_path / "c"), name)
        assert [numbers for numbers, _, _ in found] == drawn_on
        assert [samples for _, samples, _ in found] == [[0, 1, 2, 3], [10, 11, 12, 13]]
        assert [calls for _, _, calls in found] == [[], []]


def test_the_names_of_ranks_are_seen_in_a_checkpoint(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(2).run(saved, str(tmp_path / "c"))
    found: Any = ckpt.read(tmp_path / "c")
    assert found["loader"]["rank1"]["samples"] == {"left": [10, 11, 12, 13]}
    assert sorted(found["rng"]) == ["rank0", "rank1"]
    assert sorted(found["rng"]["rank0"]) == ["numpy", "python", "torch"]
    with ckpt.open(tmp_path / "c") as checkpoint:
        assert "rng.rank0.python.state" in checkpoint
        assert checkpoint["rng.rank1.numpy.state.key"].shape == (624,)


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (2, 3), (3, 2)])
def test_other_ranks_are_refused_kept_or_divided(
    clusters: Callable[[int], Any], tmp_path: Path, saving: int, loading: int
) -> None:
    drawn_on = clusters(saving).run(saved, str(tmp_path / "c"))
    for text, is_untouched in clusters(loading).run(refused, str(tmp_path / "c")):
        assert f"loader: ranks {'0, 1' if saving == 2 else '0 to 2'} saved a state each" in text
        assert "on_resize" in text
        assert "rng" not in text
        assert is_untouched
    kept = clusters(loading).run(loaded, str(tmp_path / "c"), "keep")
    samples, fresh = [list(range(10 * rank, 10 * rank + 4)) for rank in range(saving)], [-1]
    assert [own for _, own, _ in kept] == [*samples, fresh][:loading]
    both = min(saving, loading)
    assert [numbers for numbers, _, _ in kept][:both] == drawn_on[:both]
    divided = clusters(loading).run(loaded, str(tmp_path / "c"), "divide")
    assert sorted(one for _, own, _ in divided for one in own) == sorted(chain(*samples))


def run_on(folder: str) -> list[object]:
    """What a rank draws in a run that is interrupted after step 3, and goes on to step 6."""
    torch.manual_seed(dist.get_rank())
    state = {"rng": ckpt.rng(), "w": torch.zeros(4)}
    with ckpt.Checkpointer(folder, every_steps=1, signals=()) as run:
        for step in (1, 2, 3):
            torch.rand(step)
            run.save(step, state)
        expected = [drawn() for _ in range(3)]
    with ckpt.Checkpointer(folder, every_steps=1, signals=()) as run:
        assert run.restore({"rng": ckpt.rng(), "w": torch.zeros(4)}) == 3
        assert [drawn() for _ in range(3)] == expected
    return expected[0]


def test_a_run_goes_on_with_its_random_numbers(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    first, second = clusters(2).run(run_on, str(tmp_path))
    assert first != second


def test_a_state_that_was_saved_otherwise_is_a_difference(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "c", {"loader": {"position": 3}})
    with pytest.raises(ckpt.MismatchError, match="loader: is a dict of 1 in the checkpoint, and a"):
        ckpt.load(tmp_path / "c", {"loader": ckpt.per_rank(Loader([]))})
    with pytest.raises(ckpt.MismatchError, match="rng: is in the target and not in"):
        ckpt.load(tmp_path / "c", {"loader": {"position": 0}, "rng": ckpt.rng()})
    kept = {"loader": {"position": 0}, "rng": ckpt.rng()}
    ckpt.load(tmp_path / "c", kept, include="loader*")
    assert kept["loader"] == {"position": 3}


def test_objects_that_cannot_be_of_a_rank_are_told() -> None:
    for held in ({"position": 3}, 3, Loader):
        with pytest.raises(TypeError, match="per_rank takes an object with state_dict"):
            ckpt.per_rank(held)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_resize='drop'"):
        ckpt.per_rank(Loader([]), on_resize="drop")  # type: ignore[arg-type]


def test_a_state_passes_through_programs_that_call_its_methods() -> None:
    loader = Loader([1, 2])
    entry = ckpt.per_rank(loader)
    stored = entry.state_dict()
    loader.samples = []
    entry.load_state_dict(stored)
    assert loader.samples == [1, 2]


def rows(workers: int) -> Any:
    """A loader of torchdata over 40 numbers, in a shuffled order."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="no torchdata here")
    torch.manual_seed(3)
    return stateful.StatefulDataLoader(
        torch.arange(40), batch_size=4, shuffle=True, num_workers=workers
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loader_of_torchdata_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, workers: int
) -> None:
    loader = rows(workers)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    ckpt.save(tmp_path / "c", {"loader": ckpt.per_rank(loader), "rng": ckpt.rng()})
    rest = [batch.tolist() for batch in batches]
    fresh = rows(workers)
    ckpt.load(tmp_path / "c", {"loader": ckpt.per_rank(fresh), "rng": ckpt.rng()})
    assert [batch.tolist() for batch in fresh] == rest
    assert sorted(one for batch in [*seen, *rest] for one in batch) == list(range(40))
