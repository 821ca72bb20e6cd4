"""Which checkpoints a policy keeps, against a model that asks each checkpoint by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import Keep, RunStep
from ckpt.loading.newest import Age, newest_first
from ckpt.run.policy import best_first, newest_steps, removable

NOW = 1_000.0

metrics = st.dictionaries(
    st.sampled_from(["loss", "accuracy"]), st.floats(allow_nan=True), max_size=2
)
steps = st.lists(
    st.builds(
        lambda step, time, metrics, nonfinite: RunStep(
            step, f"step-{step}", time, metrics, nonfinite=nonfinite
        ),
        st.integers(0, 40),
        st.integers(0, 999).map(float),
        metrics,
        st.sampled_from([None, 0, 0, 7]),
    ),
    max_size=12,
    unique_by=lambda one: one.step,
)
numbers = st.none() | st.integers(1, 5)
policies = st.builds(
    lambda last, every, best, younger, mode, period, finite: Keep(
        last, every, best, None if best is None else "loss", mode, younger, period, finite
    ),
    *(numbers, numbers, numbers),
    st.none() | st.floats(1, 2_000),
    st.sampled_from(["min", "max"]),
    st.sampled_from([None, 7.5, 300, "20", "2m"]),
    numbers,
)


def is_newer(one: RunStep, other: RunStep) -> bool:
    """Whether one was saved after the other; no two of these steps have one time."""
    return (one.time, one.step) > (other.time, other.step)


def stays(one: RunStep, steps: Sequence[RunStep], keep: Keep) -> bool:
    """Whether a checkpoint stays, counted by the checkpoints that come before it in each order."""
    newer = sum(is_newer(other, one) for other in steps)
    if newer < (keep.last or 1) or (keep.every is not None and one.step % keep.every == 0):
        return True
    if keep.younger_than is not None and one.time > NOW - keep.younger_than:
        return True
    if keep.one_per is not None:
        period = {"20": 20, "2m": 120}.get(str(keep.one_per)) or float(keep.one_per)
        here = [other for other in steps if other.time // period == one.time // period]
        if not any(is_newer(one, other) for other in here):
            return True
    if keep.last_finite is not None and one.nonfinite == 0:
        newer = sum(is_newer(other, one) for other in steps if other.nonfinite == 0)
        if newer < keep.last_finite:
            return True
    if keep.best is None or math.isnan(one.metrics.get("loss", math.nan)):
        return False
    sign = 1 if keep.mode == "min" else -1
    mine = sign * one.metrics["loss"]
    known = [other for other in steps if not math.isnan(other.metrics.get("loss", math.nan))]
    better = sum(
        sign * other.metrics["loss"] < mine
        or (sign * other.metrics["loss"] == mine and is_newer(other, one))
        for other in known
    )
    return better < keep.best


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(steps, policies)
def test_a_checkpoint_is_removable_where_no_rule_keeps_it(steps: list[RunStep], keep: Keep) -> None:
    gone = removable(steps, keep, NOW)
    if keep.keeps_all:
        assert gone == []
        return
    assert {one.name for one in gone} == {one.name for one in steps if not stays(one, steps, keep)}
    assert all(is_newer(*pair) for pair in pairwise(gone))


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(steps, st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_the_counter_of_a_run_decides_and_a_clock_only_where_there_is_none(
    steps: list[RunStep], places: list[int], uncounted: set[int]
) -> None:
    steps = [
        one if at in uncounted else replace(one, order=(1 + places[at] // 4, places[at] % 4))
        for at, one in enumerate(steps)
    ]
    newest = newest_steps(steps)
    assert sorted(newest, key=id) == sorted(steps, key=id)
    counted = [one.order for one in newest if one.order is not None]
    assert counted == sorted(counted, reverse=True)
    others = [one for one in newest if one.order is None]
    assert all(is_newer(*pair) for pair in pairwise(others))
    for at, one in enumerate(newest):  # an uncounted one is older than what the run saved after it
        if one.order is None:
            assert all(other.order is None or other.time <= one.time for other in newest[at + 1 :])


@settings(deadline=None)
@given(steps)
def test_a_counter_that_agrees_with_the_clock_changes_nothing(steps: list[RunStep]) -> None:
    by_clock = newest_steps(steps)
    number = {one.name: len(steps) - at for at, one in enumerate(by_clock)}
    some = [replace(one, order=(1, number[one.name])) if one.step % 2 else one for one in steps]
    assert [one.name for one in newest_steps(some)] == [one.name for one in by_clock]


def test_a_checkpoint_that_another_program_saved_later_is_newer_than_the_run() -> None:
    run = [Age(10.0, (1, 1), "step-1"), Age(4.0, (1, 2), "step-2")]
    mine = Age(11.0, None, "by-hand")
    assert newest_first([*run, mine], lambda one: one) == [mine, run[1], run[0]]


def names(steps: Sequence[RunStep]) -> list[int]:
    return [one.step for one in steps]


def test_a_checkpoint_at_the_age_limit_is_removable() -> None:
    steps = [RunStep(step, f"step-{step}", NOW - age) for step, age in ((1, 10), (2, 9), (3, 8))]
    assert names(removable(steps, Keep(younger_than=10.0), NOW)) == [1]
    assert names(removable(steps, Keep(younger_than="10s"), NOW)) == [1]


@pytest.mark.parametrize(("mode", "best"), [("min", math.inf), ("max", -math.inf)])
def test_a_metric_that_is_nan_is_worse_than_every_number(mode: Any, best: float) -> None:
    values = [best, math.nan, 0.0]
    steps = [RunStep(n, f"step-{n}", float(n), {"loss": one}) for n, one in enumerate(values)]
    keep = Keep(best=2, metric="loss", mode=mode)
    assert names(best_first(steps, "loss", mode)) == [2, 0]
    assert names(removable(steps, keep, NOW)) == [1]


def test_the_newest_of_equally_good_checkpoints_is_the_best() -> None:
    steps = [RunStep(n, f"step-{n}", float(n), {"loss": 1.0}) for n in (1, 3, 2)]
    assert names(best_first(steps, "loss", "min")) == [3, 2, 1]
    assert names(removable(steps, Keep(best=2, metric="loss"), NOW)) == [1]


def test_a_damaged_checkpoint_is_not_removed_and_takes_no_place() -> None:
    steps = [RunStep(n, f"step-{n}", float(n), is_damaged=n in (1, 4)) for n in (1, 2, 3, 4)]
    assert names(removable(steps, Keep(last=1), NOW)) == [2]


def test_a_policy_without_rules_keeps_everything() -> None:
    steps = [RunStep(step, f"step-{step}", float(step)) for step in range(100)]
    assert removable(steps, Keep(), NOW) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"last": 0},
        {"every": -1},
        {"best": True, "metric": "loss"},
        {"best": 2},
        {"metric": "loss"},
        {"younger_than": 0.0},
        {"younger_than": "soon"},
        {"one_per": 0},
        {"one_per": "0h"},
        {"one_per": "soon"},
        {"one_per": "-1h"},
        {"best": 1, "metric": 5},
        {"last": 2, "mode": "median"},
    ],
    ids=str,
)
def test_a_policy_that_means_nothing_is_an_error(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Keep"):
        Keep(**arguments)  # type: ignore[arg-type]
