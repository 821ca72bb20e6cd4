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
from tests.selection import examples

RUNS = 6
"""Schedules of a story on one store in `make test-all`; `make test` has half of them."""
LATE_RUNS = 40
ALL_RUNS = 100_000
"""Schedules of all stories in `make test-slow`."""
PROMISES = [name for name, told in STORIES.items() if not told.is_bound]
BOUNDS = [name for name, told in STORIES.items() if told.is_bound]
SHARES = sum(len(STORIES[name].stores) * STORIES[name].share for name in PROMISES)


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
        search(STORIES[name], store, range(examples(RUNS, RUNS // 2)), threads)


@pytest.mark.parametrize(
    "name",
    [
        "saves_over_one_place_beside_a_reader",
        "a_deletion_beside_a_save_and_readers",
        pytest.param("a_restore_beside_saves_and_removals", marks=pytest.mark.slow),
    ],
)
def test_requests_that_come_late_keep_each_promise(name: str, threads: Threads) -> None:
    search(STORIES[name], Conditions.HONOURED, range(examples(LATE_RUNS)), threads, is_late=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PROMISES)
def test_a_hundred_thousand_random_schedules_keep_each_promise(name: str, threads: Threads) -> None:
    runs = -(-ALL_RUNS // SHARES) * STORIES[name].share
    for store in STORIES[name].stores:
        search(STORIES[name], store, range(runs), threads)


FOUND = {
    "a try whose answer was lost is not sent again over a later save": (
        "saves_over_one_place_beside_a_reader|HONOURED|140|one*3, answered, one, other*3, answered,"
        " other*5, unheard, other, answered, reader*2, one, reader*3, one*3, dropped, answered,"
        " one*4, answered, one, other"
    ),
    "a later save does not delete the files of one that is sent again": (
        "saves_over_one_place_beside_a_reader|IGNORED|298|one*3, answered, one*2, other*3,"
        " answered, other*5, unheard, other, answered, reader*5, one*3, answered, one*2, other*3,"
        " one*2, answered, one"
    ),
    "a job looks for another owner before it sends its commit again": (
        "a_job_that_takes_the_run_over|REFUSED|105|older*3, answered, older*5, reader*16, newer*23,"
        " older, unheard, older, answered, newer*9, answered, newer*3, older"
    ),
    "of two deletions of one step one deletes its files, and none puts its manifest back": (
        "a_deletion_beside_removals_by_rule|disk|10|retention*4, remover*5, retention*3, remover,"
        " retention*22, remover*5, retention*9, remover*2, retention*3, remover*2, retention*19,"
        " remover*18, retention*14"
    ),
    "a job removes no step that a newer job has saved again": (
        "a_job_that_goes_back_beside_removals_of_an_older_one|disk|28|older*17, reader*17,"
        " older*80, newer*33, older, older's removals*25, newer*30, older's removals*2, newer*70,"
        " newer's removals*64, older's removals*17"
    ),
    "a run is not taken for empty while its steps change": (
        "a_restore_beside_saves_and_removals|IGNORED|487|saver*18, reader*10, saver*4, "
        "answered, saver, answered, saver*8, answered, saver*3, answered, saver*6, answered, "
        "saver, saver's removals*23, answered, saver's removals*6, answered, "
        "saver's removals*11, answered, saver's removals*4, answered, saver's removals*2, "
        "reader*2, saver*3, answered, saver*5, answered, saver*2, saver's removals*16, "
        "answered, saver's removals*4, answered, saver's removals*2, saver"
    ),
    "a job on a disk looks for another owner after the last flush": (
        "a_job_that_takes_the_run_over|disk|27|older*27, reader*16, newer*92, older*5"
    ),
}
"""Schedules that have broken a promise."""


@pytest.mark.parametrize("promise", FOUND)
def test_a_schedule_that_was_found_breaks_no_promise_any_more(
    promise: str, threads: Threads
) -> None:
    replayed(FOUND[promise], threads)


QUICK = {
    "two_commits_of_one_name": (DISK, *Conditions),
    "a_deletion_beside_a_reader": (DISK, *Conditions),
    "a_conversion_beside_saves_and_removals": (DISK, *Conditions),
    "a_collection_beside_a_save": tuple(Conditions),
    "two_jobs_that_take_one_run": (Conditions.REFUSED,),
    "saves_to_one_free_place": (Conditions.REFUSED,),
}
SLOW = {
    "saves_to_one_free_place": (Conditions.HONOURED, Conditions.IGNORED),
    "two_jobs_that_take_one_run": (Conditions.HONOURED, Conditions.IGNORED),
    "a_deletion_beside_a_save_that_borrows": (DISK, *Conditions),
}
EVERY_ORDER = [
    *((name, store) for name, stores in QUICK.items() for store in stores),
    *(
        pytest.param(name, store, marks=pytest.mark.slow)
        for name, stores in SLOW.items()
        for store in stores
    ),
]
"""Two actors on a store: the orders of their calls that make a difference are few enough."""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "store"), EVERY_ORDER)
def test_every_order_of_two_actors_keeps_each_promise(
    name: str, store: Store, threads: Threads
) -> None:
    every = Exhaustive()
    for policy in every.policies():
        run_once(STORIES[name], store, policy, threads, 0)
    assert every.runs > 2


@pytest.mark.parametrize("name", BOUNDS)
def test_a_stated_bound_is_where_the_search_finds_it(name: str, threads: Threads) -> None:
    with pytest.raises(Found):
        search(STORIES[name], Conditions.HONOURED, range(200), threads)
