"""When a checkpoint is due, and when ranks talk about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.run.saves import EXCHANGE_SECONDS, Schedule, next_exchange


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.floats(0, 1e6))
def test_the_distance_between_exchanges_at_most_doubles_and_is_never_zero(
    last: int, taken: int, seconds: float
) -> None:
    step = last + taken
    distance = next_exchange(step, last, seconds) - step
    assert 1 <= distance <= 2 * max(1, taken)


@given(st.floats(1e-5, 100))
def test_exchanges_of_a_steady_run_come_about_once_in_a_second(seconds_per_step: float) -> None:
    step = last = 0
    for _ in range(60):
        step, last = next_exchange(step, last, (step - last) * seconds_per_step), step
    distance = (step - last) * seconds_per_step
    assert distance <= max(EXCHANGE_SECONDS, seconds_per_step) * 1.001
    assert distance >= EXCHANGE_SECONDS / 2 or seconds_per_step * 2 > EXCHANGE_SECONDS


def test_a_schedule_counts_steps_seconds_and_saves_that_ended() -> None:
    assert [step for step in range(9) if Schedule(every_steps=4).by_step(step)] == [0, 4, 8]
    assert not Schedule(every_steps=4).by_clock(1e9, is_saving=False)
    timed = Schedule(every_seconds=10.0)
    assert [timed.by_clock(seconds, is_saving=True) for seconds in (9.9, 10.0)] == [False, True]
    always = Schedule(continuously=True)
    assert always.by_clock(0.0, is_saving=False)
    assert not always.by_clock(1e9, is_saving=True)
    assert not Schedule().by_step(0)


@pytest.mark.parametrize(
    "arguments", [{"every_steps": 0}, {"every_seconds": 0.0}, {"every_seconds": "5"}], ids=str
)
def test_a_schedule_that_means_nothing_is_an_error(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"every_steps|every_seconds"):
        Schedule(**arguments)  # type: ignore[arg-type]
