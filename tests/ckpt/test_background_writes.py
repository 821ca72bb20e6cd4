"""Nothing that is written after a save in the background began gets into its checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.ckpt.late_copies import SECONDS, late_copies
from tests.ckpt.writes import UNSEEN, ways


def same(one: Any, other: Any) -> bool:
    """Whether two nests are equal bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    return bool(one == other)


def write_to_all(folder: str) -> tuple[int, list[str]]:
    """How many ways there are, and by which of them a write got into one save of all subjects."""
    torch.manual_seed(dist.get_rank())
    mine, found = f"rank{dist.get_rank()}", ways()
    state = {mine: {name: subject.state for name, (subject, _) in found.items()}}
    ckpt.save(f"{folder}/before", state)
    with late_copies() as go:
        handle = ckpt.save(f"{folder}/after", state, blocking=False)
        for subject, write in found.values():
            write(subject)
        go.set()
        handle.wait(SECONDS)
    ckpt.save(f"{folder}/written", state)
    before, after, written = (
        ckpt.read(f"{folder}/{name}")[mine]  # type: ignore[index]
        for name in ("before", "after", "written")
    )
    idle = [name for name in found if same(before[name], written[name])]
    assert not idle, idle
    return len(found), [name for name in found if not same(before[name], after[name])]


@pytest.mark.thorough
def test_no_way_of_writing_changes_a_checkpoint_that_is_copied_in_the_call(
    clusters: Callable, tmp_path: Path
) -> None:
    for count, wrong in clusters(2).run(write_to_all, str(tmp_path)):
        assert count >= 80
        assert not wrong


def write_to_each(folder: str) -> dict[str, str]:
    """What came of a save of each subject with overlapped copies: exact, an error, or silence."""
    torch.manual_seed(dist.get_rank())
    mine, found = f"rank{dist.get_rank()}", ways()
    ckpt.save(f"{folder}/before", {mine: {name: s.state for name, (s, _) in found.items()}})
    before: Any = ckpt.read(f"{folder}/before")[mine]  # type: ignore[index]
    outcomes = {}
    for name, (subject, write) in found.items():
        with late_copies() as go:
            handle = ckpt.save(
                f"{folder}/after",
                {mine: {name: subject.state}},
                blocking=False,
                staging="overlapped",
                overwrite=True,
            )
            write(subject)
            go.set()
            try:
                handle.wait(SECONDS)
            except (ckpt.StateChangedError, ckpt.RankError) as error:
                said = f"{type(error).__name__} {error}"
                outcomes[name] = "error" if "StateChangedError" in said else said
                continue
        after: Any = ckpt.read(f"{folder}/after")[mine]  # type: ignore[index]
        outcomes[name] = "exact" if same(before[name], after[name]) else "silent"
    return outcomes


@pytest.mark.thorough
def test_overlapped_copies_are_exact_or_an_error_but_for_what_a_sample_misses(
    clusters: Callable, tmp_path: Path
) -> None:
    for outcomes in clusters(2).run(write_to_each, str(tmp_path)):
        wrong = {name: o for name, o in outcomes.items() if o not in ("exact", "error")}
        assert set(wrong.values()) <= {"silent"}, wrong
        assert wrong.keys() <= UNSEEN.keys()
        steps = {name: found for name, found in outcomes.items() if name.startswith("optimizer ")}
        assert set(steps.values()) == {"exact"}, steps
        assert outcomes[".data.mul_"] == outcomes["all_reduce"] == outcomes["numpy"] == "error"
