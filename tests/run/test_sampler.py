"""`ElasticSampler`: one order of samples, whatever the number of ranks and wherever a run stops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

import ckpt

SIZES = st.integers(1, 40)
RANKS = st.integers(1, 5)
PARTS = st.lists(st.tuples(RANKS, RANKS, st.integers(0, 9)))
"""The ranks, the batch of each, and the batches until the run stops."""


def samplers(size: int, ranks: int, state: dict[str, Any] | None, **how: Any) -> list[Any]:
    """The samplers of all ranks, at a saved position."""
    found = [ckpt.ElasticSampler(range(size), ranks, rank, **how) for rank in range(ranks)]
    for one in found:
        if state is not None:
            one.load_state_dict(state)
    return found


def stream(size: int, **how: Any) -> Iterator[int]:
    """The samples of all epochs as one process takes them."""
    whole = ckpt.ElasticSampler(range(size), 1, 0, **how)
    while True:
        for index in whole:
            whole.advance(1)
            yield index


@settings(max_examples=30, deadline=None)
@given(
    SIZES, st.booleans(), st.integers(0, 3), st.lists(st.tuples(RANKS, RANKS, st.integers(0, 9)))
)
def test_ranks_of_any_number_take_what_one_process_takes(
    size: int, shuffle: bool, seed: int, parts: list[tuple[int, int, int]]
) -> None:
    how: dict[str, Any] = {"shuffle": shuffle, "seed": seed}
    expected, state = stream(size, **how), None
    for ranks, batch, batches in parts:
        here = samplers(size, ranks, state, **how)
        loaders = [DataLoader(range(size), batch, sampler=one) for one in here]
        left = batches
        while left:
            count = 0
            loops = [one.batches(two) for one, two in zip(here, loaders, strict=True)]
            for of_ranks in itertools.islice(zip(*loops, strict=True), left):
                taken = torch.stack(list(of_ranks), 1).flatten().tolist()
                assert taken == [*itertools.islice(expected, len(taken))]
                count += 1
            left -= count
        [state] = {tuple(one.state_dict().items()): one.state_dict() for one in here}.values()


@settings(max_examples=40, deadline=None)
@given(SIZES, RANKS, st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_its_order_is_that_of_a_distributed_sampler(
    size: int, ranks: int, shuffle: bool, seed: int, epoch: int
) -> None:
    size *= ranks
    for rank in range(ranks):
        one = ckpt.ElasticSampler(range(size), ranks, rank, shuffle, seed)
        torchs = DistributedSampler(range(size), ranks, rank, shuffle, seed)  # type: ignore[arg-type]
        one.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert [*one] == [*torchs]


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 40), RANKS, RANKS)
def test_with_drop_last_an_epoch_ends_with_the_samples_for_all_ranks(
    size: int, ranks: int, batch: int
) -> None:
    here = samplers(size, ranks, None, drop_last=True)
    taken = [[*one] for one in here]
    assert {len(one) for one in taken} == {size // ranks} == {len(here[0])}
    whole = [*itertools.islice(stream(size), size)]
    assert [*itertools.chain(*zip(*taken, strict=True))] == whole[: size // ranks * ranks]
    for one in samplers(size, ranks, None, drop_last=True):
        assert sum(map(len, one.batches(DataLoader(range(size), batch, sampler=one)))) == len(
            taken[0]
        )
        assert (one.epoch, one.state_dict()["position"]) == (1, 0)


def loader_of(kind: str) -> Any:
    """The class of loaders."""
    if kind == "torch":
        return DataLoader
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.filterwarnings("ignore:.*deprecated")  # torchdata asks torch for all its names
@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_batches_that_a_loader_has_fetched_in_advance_do_not_count(kind: str, workers: int) -> None:
    one = ckpt.ElasticSampler(range(40))
    seen: list[int] = []
    state = one.state_dict()
    while len(seen) < 60:
        one = ckpt.ElasticSampler(range(40))
        one.load_state_dict(state)
        loader = loader_of(kind)(range(40), batch_size=4, sampler=one, num_workers=workers)
        for batch in itertools.islice(one.batches(loader), 3):
            seen += batch.tolist()
            state = one.state_dict()
    assert seen == [*itertools.islice(stream(40), len(seen))]


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_a_run_that_goes_on_within_an_epoch_has_the_random_numbers_of_an_undisturbed_one(
    kind: str,
) -> None:
    def draws(state: dict[str, Any] | None, steps: int) -> tuple[list[float], dict[str, Any]]:
        """What each step draws, and the state after some of them."""
        sampler, found = ckpt.ElasticSampler(range(10), seed=3), []
        loader = loader_of(kind)(range(10), batch_size=2, sampler=sampler)
        if state is not None:
            sampler.load_state_dict(state["sampler"])
            torch.set_rng_state(state["rng"])
        while True:
            for _ in sampler.batches(loader):
                found.append(float(torch.rand(())))
                if len(found) == steps:
                    return found, {"sampler": sampler.state_dict(), "rng": torch.get_rng_state()}

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        begin = torch.get_rng_state()
        undisturbed, _ = draws(None, 8)
        for stop in (1, 3, 4, 5, 7):
            torch.set_rng_state(begin)
            before, state = draws(None, stop)
            torch.manual_seed(6)
            after, _ = draws(state, 8 - stop)
            assert before + after == undisturbed


def test_it_is_an_entry_of_a_state(tmp_path: Path) -> None:
    one = ckpt.ElasticSampler(range(10), 4, 1)
    one.advance(2)
    ckpt.save(tmp_path / "c", {"data": one})
    other = ckpt.ElasticSampler(range(10), 3, 0)
    ckpt.load(tmp_path / "c", {"data": other})
    assert other.state_dict() == one.state_dict()
    assert len(other) == 1


@pytest.mark.parametrize("how", [{"seed": 1}, {"shuffle": False}, {"size": 11}])
def test_a_position_in_another_order_is_an_error_with_both(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    ckpt.save(tmp_path / "c", {"data": ckpt.ElasticSampler(range(10)), "w": torch.ones(2)})
    other = ckpt.ElasticSampler(range(how.pop("size", 10)), **how)
    target = {"data": other, "w": torch.zeros(2)}
    with pytest.raises(ckpt.CkptError, match=r"another order of samples: .* \(here .*of data"):
        ckpt.load(tmp_path / "c", target)


def test_samples_that_nobody_counts_are_an_error_in_the_next_epoch() -> None:
    one = ckpt.ElasticSampler(range(4))
    assert sorted(one) == [0, 1, 2, 3]
    with pytest.raises(ckpt.MisuseError, match=r"read from sample 0 .*batches\(loader\)"):
        next(iter(one))
    one.set_epoch(1)
    assert sorted(one) == [0, 1, 2, 3]


def test_what_cannot_be_shared_is_refused() -> None:
    one, other = ckpt.ElasticSampler(range(4)), ckpt.ElasticSampler(range(4))
    for loader in (
        DataLoader(range(4), 2, sampler=other),  # type: ignore[arg-type]
        DataLoader(range(4), batch_sampler=torch.utils.data.BatchSampler(one, 2, False)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ckpt.ArgumentError, match=r"advance\(samples\)"):
            next(one.batches(loader))
    for how in ({"num_replicas": 2, "rank": 2}, {"num_replicas": 0}, {"seed": -1}, {"seed": 1.0}):
        with pytest.raises(ckpt.ArgumentError):
            ckpt.ElasticSampler(range(4), **how)  # type: ignore[arg-type]
    for size, drop_last in ((0, False), (1, True)):
        with pytest.raises(ckpt.ArgumentError, match="give nothing to 2 ranks"):
            ckpt.ElasticSampler(range(size), 2, 0, drop_last=drop_last)
