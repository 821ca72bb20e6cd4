"""Who meets whom: each story prepares a store, and says what the actors do at the same time.

A story is a function of an `Observer`. It prepares the store by calls of the product, and returns a
program for each actor. An actor is a process of its own, with a clock that jumps. Programs raise
what must not happen, and catch what the documents allow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ckpt
from ckpt.run.owner import Ownership
from ckpt.run.steps import removals
from ckpt.stores.store import open_store
from tests.interleavings.bucket import Conditions
from tests.interleavings.observer import Observer, Rights, state
from tests.interleavings.scheduler import Policy, Randomly, Replay, Threads, read, written
from tests.interleavings.simulation import CLOCK_SECONDS, DISK, Store, inside

VARIABLE = "CKPT_TESTS_SCHEDULE"
"""In the environment: one schedule, as a failure prints it, in the place of a search."""
GONE = (ckpt.ReplacedError, ckpt.NotACheckpointError)
"""The errors of a reader whose checkpoint is removed meanwhile (docs/runs.md)."""
Program = Callable[[], object]
Tell = Callable[[Observer], Mapping[str, Program]]


@dataclass(frozen=True)
class Story:
    """What happens at the same time, and what may."""

    tell: Tell
    rights: Mapping[str, Rights]
    mortal: Sequence[str] = ()
    """Actors of whom one may be killed."""
    stores: Sequence[Store] = (DISK, *Conditions)
    share: int = 1
    """Its part of the slow schedules on each store: a story of few calls has more."""
    is_bound: bool = False
    """Whether the documents state that its invariants have a limit here: a search finds it."""

    @property
    def name(self) -> str:
        return self.tell.__name__


STORIES: dict[str, Story] = {}


def story(
    *mortal: str,
    stores: Sequence[Store] = (DISK, *Conditions),
    share: int = 1,
    is_bound: bool = False,
    **rights: Rights,
) -> Callable[[Tell], Tell]:
    """Adds a story; `rights` are those of its processes by their names."""

    def add(tell: Tell) -> Tell:
        STORIES[tell.__name__] = Story(tell, rights, mortal, stores, share, is_bound)
        return tell

    return add


def job(seen: Observer, keep: int | None = None, **more: Any) -> ckpt.Checkpointer:
    """A job of the run."""
    rules = None if keep is None else ckpt.Keep(last=keep)
    how: dict[str, Any] = {"every_steps": 1, "signals": (), "blocking": True, "keep": rules}
    return ckpt.Checkpointer(seen.world.run, **{**how, **more})


def saved(seen: Observer, name: str, *steps: int, keep: int | None = None) -> ckpt.Checkpointer:
    """The job of a process that has saved these steps."""
    with seen.world.acting(name):
        run = job(seen, keep)
        for step in steps:
            run.save(step, seen.begins(step))
        run.wait_until_finished()
    return run


def place(seen: Observer, step: int) -> str:
    return f"{seen.world.run}/step-{step}"


def latest(seen: Observer) -> None:
    """Asks for the newest step, and loads it unless it is removed before."""
    before = seen.newest()
    found = ckpt.latest(seen.world.run)
    seen.check_newest(found, before)
    with suppress(*GONE):
        seen.check(ckpt.load(found, state(0)))


def restore(seen: Observer) -> None:
    """Restores the newest step."""
    with job(seen, read_only=True) as run:
        restored = run.restore(into := state(0))
        assert restored is not None
        seen.check(into)


def goes_on(seen: Observer, step: int, value: float, keep: int | None = None) -> None:
    """A job that begins: it restores, and saves this step or, if the run is further, the next."""
    with job(seen, keep) as run:
        restored = run.restore(into := state(0))
        assert restored is not None
        seen.check(into)
        with suppress(ckpt.NotOwnerError):
            run.save(max(step, restored + 1), seen.begins(value))


@story(saver=Rights(keep_last=1))
def a_reader_beside_saves_and_removals(seen: Observer) -> Mapping[str, Program]:
    run = saved(seen, "saver", 9, keep=1)

    def save() -> None:
        for step in (10, 11):
            run.save(step, seen.begins(step))
        run.close()

    return {"saver": save, "reader": lambda: latest(seen)}


@story("saver", saver=Rights(keep_last=1))
def a_restore_beside_saves_and_removals(seen: Observer) -> Mapping[str, Program]:
    run = saved(seen, "saver", 8, 9, keep=2)
    run.close()

    def save() -> None:
        with job(seen, keep=1) as run:
            run.restore(state(0))
            run.save(10, seen.begins(10))
            run.save(11, seen.begins(11))

    return {"saver": save, "reader": lambda: restore(seen)}


@story("older", older=Rights(keep_last=1), newer=Rights(keep_last=1))
def a_job_that_takes_the_run_over(seen: Observer) -> Mapping[str, Program]:
    older = saved(seen, "older", 8, 9, keep=2)

    def save() -> None:
        with suppress(ckpt.NotOwnerError):
            older.save(10, seen.begins(10.5))
        with suppress(ckpt.NotOwnerError):
            older.save(11, seen.begins(11.5))
        older.close()

    return {
        "older": save,
        "newer": lambda: goes_on(seen, 10, 10.0, keep=1),
        "reader": lambda: latest(seen),
    }


@story("older", older=Rights(keep_last=1), newer=Rights(keep_last=2))
def a_job_that_goes_back_beside_removals_of_an_older_one(seen: Observer) -> Mapping[str, Program]:
    """The newer job saves a step again that the older one is about to remove."""
    older = saved(seen, "older", 8, 9, keep=None)
    older.close()

    def save() -> None:
        with suppress(ckpt.NotOwnerError), job(seen, keep=1) as run:
            run.restore(state(0))
            run.save(10, seen.begins(10.5))

    def go_back() -> None:
        with suppress(*GONE, ckpt.NotOwnerError), job(seen, keep=2) as run:
            run.restore(state(0), step=8)
            run.save(9, seen.begins(9.5))

    return {"older": save, "newer": go_back, "reader": lambda: latest(seen)}


@story(first=Rights(), second=Rights(), third=Rights())
def three_jobs_that_begin_at_once(seen: Observer) -> Mapping[str, Program]:
    saved(seen, "saver", 9).close()
    return {
        name: lambda at=at: goes_on(seen, 10 + at, 10.0 + at)  # type: ignore[misc]
        for at, name in enumerate(("first", "second", "third"))
    }


@story(share=4)
def two_jobs_that_take_one_run(seen: Observer) -> Mapping[str, Program]:
    """Of two starts in a new folder the one with the higher epoch owns it."""
    owners = [Ownership(seen.world.run, seen.world.run, None) for _ in range(2)]

    def take(owner: Ownership) -> None:
        with suppress(ckpt.NotOwnerError):
            owner.start()
            owner.take(1)

    def end() -> None:
        epochs = [owner.epoch for owner in owners]
        assert epochs[0] != epochs[1] or not seen.has_locks, epochs
        for owner in owners:
            try:
                owner.look()
            except ckpt.NotOwnerError:
                assert owner.epoch < max(epochs), epochs
            else:
                assert owner.epoch == max(epochs), epochs

    seen.at_end.append(end)
    return {"one": lambda: take(owners[0]), "other": lambda: take(owners[1])}


@story("saver", "collector", share=4)
def a_collection_beside_a_save(seen: Observer) -> Mapping[str, Program]:
    run = saved(seen, "saver", 9)

    def save() -> None:
        run.save(10, seen.begins(10))
        run.close()

    return {"saver": save, "collector": lambda: ckpt.gc(seen.world.run, delete=True)}


@story(share=4, remover=Rights(removes=("step-9",)))
def a_deletion_beside_a_save_and_readers(seen: Observer) -> Mapping[str, Program]:
    run = saved(seen, "saver", 9, 10)

    def save() -> None:
        run.save(11, seen.begins(11))
        run.close()

    def read_9() -> None:
        with suppress(*GONE):
            seen.check(ckpt.load(place(seen, 9), state(0)))

    return {
        "remover": lambda: ckpt.delete(place(seen, 9)),
        "saver": save,
        "reader": read_9,
        "other": lambda: latest(seen),
    }


@story(share=4, one=Rights(), other=Rights())
def saves_over_one_place_beside_a_reader(seen: Observer) -> Mapping[str, Program]:
    ckpt.save(place(seen, 1), seen.begins(1))

    def over(value: float) -> None:
        """A save whose answer was lost is an error if the other one has come meanwhile."""
        with suppress(ckpt.StoreError):
            ckpt.save(place(seen, 1), seen.begins(value), overwrite=True)

    def load() -> None:
        seen.check(ckpt.load(place(seen, 1), state(0)))

    return {"one": lambda: over(2), "other": lambda: over(3), "reader": load}


@story(share=4)
def saves_to_one_free_place(seen: Observer) -> Mapping[str, Program]:
    ckpt.save(place(seen, 1), seen.begins(1))
    won: list[float] = []

    def save(value: float) -> None:
        try:
            ckpt.save(place(seen, 2), seen.begins(value))
        except ckpt.ExistsError:
            return
        won.append(value)
        assert not seen.has_locks or won == [value], won

    return {"one": lambda: save(2), "other": lambda: save(3)}


@story(share=4, saver=Rights(keep_last=1), converter=Rights(writes="exported"))
def a_conversion_beside_saves_and_removals(seen: Observer) -> Mapping[str, Program]:
    run = saved(seen, "saver", 9, keep=1)
    target = f"{seen.world.root}/exported"

    def save() -> None:
        run.save(10, seen.begins(10))
        run.close()

    def convert() -> None:
        try:
            ckpt.convert(place(seen, 9), target)
        except GONE:
            return
        seen.check(ckpt.load(target, state(0)))

    return {"saver": save, "converter": convert}


@story(share=4, retention=Rights(keep_last=1), remover=Rights(removes=("step-9",)))
def a_deletion_beside_removals_by_rule(seen: Observer) -> Mapping[str, Program]:
    saved(seen, "saver", 9, 10, 11).close()
    rules = ckpt.Keep(last=1)

    def remove() -> None:
        with suppress(ckpt.NotACheckpointError):
            ckpt.delete(place(seen, 9))

    return {"retention": lambda: [*removals(seen.world.run, rules, None)], "remover": remove}


@story(share=4, remover=Rights(removes=("step-9",)), saver=Rights(removes=("step-10",)))
def a_deletion_beside_a_save_that_borrows(seen: Observer) -> Mapping[str, Program]:
    """A save that finds its base gone takes its manifest back."""
    ckpt.save(place(seen, 9), seen.begins(9))
    done: list[str] = []

    def save() -> None:
        with suppress(ckpt.StoreError, ckpt.NotACheckpointError):
            ckpt.save(place(seen, 10), seen.begins(9), base=place(seen, 9))
            done.append("saved")

    def remove() -> None:
        with suppress(ckpt.InUseError):
            ckpt.delete(place(seen, 9))
            done.append("deleted")

    def end() -> None:
        assert len(done) < 2, done
        for folder in seen.committed:
            seen.check(ckpt.load(f"{seen.world.run}/{folder}", state(0)))

    seen.at_end.append(end)
    return {"saver": save, "remover": remove}


@story(stores=(DISK,), saver=Rights(keep_last=2), other=Rights(writes="other"))
def a_branch_of_links_that_saves_its_step_again(seen: Observer) -> Mapping[str, Program]:
    os.mkdir(seen.world.run)
    for step in (8, 9):
        with seen.world.acting("other"):
            ckpt.save(f"{seen.world.root}/other/step-{step}", seen.begins(step))
        os.symlink(f"../other/step-{step}", place(seen, step))

    def save() -> None:
        with job(seen, keep=2) as run:
            run.restore(state(0), step=8)
            run.save(9, seen.begins(9.5))
            run.save(10, seen.begins(10))

    return {"saver": save, "reader": lambda: latest(seen)}


@story(share=4)
def two_commits_of_one_name(seen: Observer) -> Mapping[str, Program]:
    """The condition of a commit, by itself."""
    ckpt.save(place(seen, 1), seen.begins(1))
    won: list[str] = []

    def commit(text: str) -> None:
        with open_store(seen.world.run, None) as store, suppress(ckpt.ExistsError):
            store.commit("owner-7.json", text.encode(), replace=False)
            won.append(text)

    def end() -> None:
        assert len(won) == 1 or not seen.has_locks, won
        assert seen.world.files()["run/owner-7.json"].decode() in won

    seen.at_end.append(end)
    return {text: lambda text=text: commit(text) for text in ("one", "other")}  # type: ignore[misc]


@story(share=4, remover=Rights(removes=("step-9",)))
def a_deletion_beside_a_reader(seen: Observer) -> Mapping[str, Program]:
    for step in (9, 10):
        ckpt.save(place(seen, step), seen.begins(step))

    def load() -> None:
        with suppress(*GONE):
            seen.check(ckpt.load(place(seen, 9), state(0)))

    return {"remover": lambda: ckpt.delete(place(seen, 9)), "reader": load}


@story(is_bound=True)
def a_collection_of_any_age_beside_a_save(seen: Observer) -> Mapping[str, Program]:
    """`older_than` below the time of a save: it may take a file between a look and the commit."""
    run = saved(seen, "saver", 9)

    def collect() -> None:
        ckpt.gc(seen.world.run, delete=True, older_than=-10 * CLOCK_SECONDS)

    def save() -> None:
        run.save(10, seen.begins(10))
        run.close()

    return {"saver": save, "collector": collect}


@story(is_bound=True, retention=Rights(keep_last=1), remover=Rights(removes=("step-11",)))
def a_deletion_of_the_newest_beside_removals_by_rule(seen: Observer) -> Mapping[str, Program]:
    """A rule counts the steps of its one listing, also those that are deleted meanwhile."""
    saved(seen, "saver", 10, 11).close()
    rules = ckpt.Keep(last=1)
    return {
        "retention": lambda: [*removals(seen.world.run, rules, None)],
        "remover": lambda: ckpt.delete(place(seen, 11)),
    }


class Found(AssertionError):
    """A schedule after which an invariant does not hold."""


def run_once(
    told: Story, store: Store, policy: Policy, threads: Threads, seed: int, is_late: bool = False
) -> Observer:
    """Runs one schedule of a story. Raises Found, with the schedule."""
    has_locks = store in (DISK, Conditions.HONOURED)
    seen = Observer(store, seed, told.rights, has_locks)
    failure: BaseException | None = None
    with inside(seen.world):
        programs = told.tell(seen)
        scheduler = seen.world.start(policy, threads, is_late)
        for name, program in programs.items():
            scheduler.add(name, program, seen.world.process_of(name))
        try:
            scheduler.run()
            dead = [one for one in scheduler.actors if one.is_dead]
            actors = [one for one in scheduler.actors if one not in dead and not one.is_request]
            failure = next((one.error for one in actors if one.error is not None), None)
            if failure is None:
                seen.check_end(bool(dead) or scheduler.is_cut)
        except (AssertionError, ckpt.CkptError) as error:
            failure = error
    if failure is not None:
        lines = "\n".join(scheduler.lines())
        replay = f"{told.name}|{_name(store)}|{seed}|{written(scheduler.decisions)}"
        raise Found(
            f"{told.name} on {store}: {type(failure).__name__}: {failure}\n{lines}\n"
            f'again: {VARIABLE}="{replay}" pytest tests/interleavings'
        ) from failure
    return seen


def _name(store: Store) -> str:
    return store.name if isinstance(store, Conditions) else store


def replayed(text: str, threads: Threads, is_late: bool = False) -> Observer:
    """Runs the schedule that a failure has printed. Raises Found if it still fails."""
    name, where, seed, schedule = text.split("|")
    store: Store = DISK if where == DISK else Conditions[where]
    return run_once(STORIES[name], store, Replay(read(schedule)), threads, int(seed), is_late)


def search(
    told: Story, store: Store, seeds: Iterable[int], threads: Threads, is_late: bool = False
) -> int:
    """Runs a random schedule for each seed; returns the widest gap that `Observer.widest` has seen.

    Some answers of a bucket are lost on the way; with `is_late`, some requests come late.
    """
    widest = 0
    for seed in seeds:
        losses = 0 if store == DISK else 2
        policy = Randomly(f"{told.name} {store} {seed}", told.mortal, losses)
        widest = max(widest, run_once(told, store, policy, threads, seed, is_late).widest)
    return widest
