"""Jobs, readers and removals of one run at the same time: no order of their calls breaks a promise.

`stories.py` has the actors, `observer.py` the invariants. A failure prints its schedule, and the
variable CKPT_TESTS_SCHEDULE that runs this one again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.interleavings.bucket import Conditions
from tests.interleavings.scheduler import Exhaustive, Threads
from tests.interleavings.simulation import DISK, Store, simulation
from tests.interleavings.stories import STORIES, VARIABLE, Found, replayed, run_once, search

QUICK_RUNS = 6
"""Schedules of a story on one store in `make test`."""
ALL_RUNS = 100_000
"""Schedules of all stories in `make test-slow`."""
PROMISES = [name for name, told in STORIES.items() if not told.is_bound]
BOUNDS = [name for name, told in STORIES.items() if told.is_bound]
SHARES = sum(len(STORIES[name].stores) for name in PROMISES)


@pytest.fixture
def threads() -> Iterator[Threads]:
    logging.disable()  # a server that ignores conditions is told of
    with simulation() as made:
        yield made
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", PROMISES)
def test_random_schedules_keep_each_promise(name: str, threads: Threads) -> None:
    if (asked := os.environ.get(VARIABLE, "")).startswith(f"{name}|"):
        replayed(asked, threads)
        return
    for store in STORIES[name].stores:
        search(STORIES[name], store, range(QUICK_RUNS), threads)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PROMISES)
def test_a_hundred_thousand_random_schedules_keep_each_promise(name: str, threads: Threads) -> None:
    for store in STORIES[name].stores:
        search(STORIES[name], store, range(-(-ALL_RUNS // SHARES)), threads)


@pytest.mark.parametrize("store", [Conditions.HONOURED, pytest.param(DISK, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a_collection_beside_a_save", "saves_to_one_free_place"])
def test_every_order_of_two_actors_keeps_each_promise(
    name: str, store: Store, threads: Threads
) -> None:
    every = Exhaustive()
    for policy in every.policies():
        run_once(STORIES[name], store, policy, threads, 0)
    assert every.runs > 20


@pytest.mark.parametrize("name", BOUNDS)
def test_a_stated_bound_is_where_the_search_finds_it(name: str, threads: Threads) -> None:
    with pytest.raises(Found):
        search(STORIES[name], Conditions.HONOURED, range(200), threads)
