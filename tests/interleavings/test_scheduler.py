"""The machine itself: it misses no order, repeats schedules, and its disk answers as a real one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.interleavings.disk import ROOT, Disk
from tests.interleavings.scheduler import (
    Call,
    Ended,
    Exhaustive,
    Policy,
    Randomly,
    Replay,
    Scheduler,
    Threads,
    read,
    written,
)
from tests.selection import slow

Step = tuple[str, str]
"""Read a key, or write to it."""


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads() as made:
        yield made


def outcome(
    programs: Sequence[Sequence[Step]], policy: Policy, threads: Threads
) -> tuple[object, ...] | None:
    """What each program reads and what is there in the end; None if the run has not ended."""
    values: dict[str, str] = {}
    seen: list[list[str]] = [[] for _ in programs]
    scheduler = Scheduler(policy, threads)

    def act(number: int) -> None:
        for at, (what, key) in enumerate(programs[number]):
            keys = frozenset({key})
            is_write = what == "write"
            scheduler.before(
                Call(
                    what, key, frozenset() if is_write else keys, keys if is_write else frozenset()
                )
            )
            if is_write:
                values[key] = f"{number}.{at}"
            else:
                seen[number].append(values.get(key, ""))

    for number in range(len(programs)):
        scheduler.add(str(number), lambda number=number: act(number), None)  # type: ignore[misc]
    scheduler.run()
    is_whole = len(scheduler.trace) == sum(map(len, programs))
    return (*map(tuple, seen), *sorted(values.items())) if is_whole else None


class InOrder:
    """One of all orders."""

    def __init__(self, names: Sequence[str]) -> None:
        self._left = list(names)

    def pick(self, ready: Sequence[Any], last: Any) -> str:
        return self._left.pop(0)

    def choose(self, outcomes: Sequence[str]) -> str:
        return outcomes[0]


def all_orders(counts: Sequence[int]) -> Iterator[list[str]]:
    """Every order of the calls of programs that have so many; the first pick only begins."""
    if not any(counts):
        yield []
    for number, count in enumerate(counts):
        if count:
            rest = [left - (at == number) for at, left in enumerate(counts)]
            for order in all_orders(rest):
                yield [str(number), *order]


@pytest.mark.thorough
@pytest.mark.parametrize("actors", [2, slow(3)])
def test_the_exhaustive_search_finds_each_outcome_that_any_order_has(
    threads: Threads, actors: int
) -> None:
    chance, fewer = random.Random(actors), 0
    for _ in range(12 if actors == 2 else 6):
        programs = [
            [(chance.choice(("read", "write")), chance.choice("abc")) for _ in range(5 - actors)]
            for _ in range(actors)
        ]
        orders = [*all_orders([len(each) + 1 for each in programs])]
        wanted = {outcome(programs, InOrder(order), threads) for order in orders}
        search = Exhaustive()
        found = {outcome(programs, policy, threads) for policy in search.policies()} - {None}
        assert found == wanted, programs
        assert search.runs <= len(orders)
        fewer += search.runs < len(orders) / 4
    assert fewer > 2


def test_a_schedule_as_text_gives_the_same_run_again(threads: Threads) -> None:
    programs = [[("write", "a"), ("read", "b")] * 3, [("read", "a"), ("write", "b")] * 3]
    for seed in range(20):
        ends = []
        policy: Policy = Randomly(seed)
        for _ in range(2):
            decided: list[str] = []

            def noted(policy: Policy = policy, decided: list[str] = decided) -> Policy:
                pick = policy.pick

                def instead(ready: Sequence[Any], last: Any) -> str:
                    decided.append(pick(ready, last))
                    return decided[-1]

                policy.pick = instead  # type: ignore[method-assign]
                return policy

            ends.append(outcome(programs, noted(), threads))
            policy = Replay(read(written(decided)))
        assert ends[0] == ends[1] is not None


def test_a_killed_process_makes_no_further_call(threads: Threads) -> None:
    scheduler = Scheduler(Replay(["a", "b", "kill a"]), threads)
    cleaned: list[str] = []

    def act(name: str) -> None:
        try:
            for _ in range(3):
                scheduler.before(Call(name))
        finally:
            cleaned.append(name)
            scheduler.before(Call("cleans up"))

    for name in "ab":
        scheduler.add(name, lambda name=name: act(name), name)  # type: ignore[misc]
    scheduler.run()
    assert [call.name for _, call in scheduler.trace] == ["b", "b", "b", "cleans up"]
    assert cleaned == ["a", "b"]


def test_a_check_that_fails_ends_all_actors(threads: Threads) -> None:
    scheduler = Scheduler(Replay(["a", "b"]), threads)

    def act() -> None:
        for _ in range(3):
            scheduler.before(Call("acts"))
        scheduler.fail(AssertionError("wrong"))

    for name in "ab":
        scheduler.add(name, act, name)
    with pytest.raises(AssertionError, match="wrong"):
        scheduler.run()
    assert all(one.is_over for one in scheduler.actors)


def test_an_error_of_a_policy_ends_the_run_at_once(threads: Threads) -> None:
    with pytest.raises(KeyError, match="nobody"):
        outcome([[("write", "a")]] * 2, InOrder(["0", "nobody"]), threads)


def test_a_search_refuses_programs_that_a_run_before_has_changed(threads: Threads) -> None:
    ran: list[str] = []

    def program(scheduler: Scheduler, name: str) -> None:
        ran.append(name)
        key = frozenset({"a"})
        scheduler.before(Call("writes", f"after {len(ran)}", frozenset(), key))

    def search() -> None:
        for policy in Exhaustive().policies():
            scheduler = Scheduler(policy, threads)
            for name in "ab":
                scheduler.add(name, partial(program, scheduler, name), None)
            scheduler.run()

    with pytest.raises(AssertionError, match="something survives a run"):
        search()


# The disk.


def quiet_disk(seed: int = 0, before: Callable[[Call], None] = lambda call: None) -> Disk:
    return Disk(before, lambda verb, path: None, lambda: 1e9, seed)


def random_call(chance: random.Random) -> tuple[str, list[str]]:
    name = chance.choice(
        ["create", "open", "unlink", "mkdir", "rmdir", "link", "rename", "stat", "list", "symlink"]
    )
    paths = ["a", "b", "a/c", "a/d", "b/c", "l", "l/c"]
    return name, [chance.choice(paths) for _ in range(2)]


def done(calls: Any, root: str, name: str, paths: list[str]) -> object:
    """The result of a call, or its error number; `calls` are `os` or a disk in memory."""
    first, second = (f"{root}/{path}" for path in paths)
    try:
        match name:
            case "create":
                descriptor = calls.open(first, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                calls.writev(descriptor, [paths[0].encode(), b"!"])
                calls.pwrite(descriptor, b"?", 1)
                calls.close(descriptor)
            case "open":
                descriptor = calls.open(first, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    return calls.pread(descriptor, 9, 0), calls.fstat(descriptor).st_size
                finally:
                    calls.close(descriptor)
            case "stat":
                return oct(calls.stat(first).st_mode)[:3], oct(calls.lstat(first).st_mode)[:3]
            case "list":
                with calls.scandir(first) as entries:
                    return sorted((one.name, one.is_file(), one.is_dir()) for one in entries)
            case "link":
                calls.link(first, second)
            case "rename":
                calls.rename(first, second)
            case "symlink":
                calls.symlink(paths[0].rpartition("/")[2], second)
            case _:
                getattr(calls, name)(first)
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("seed", range(3))
def test_the_disk_in_memory_answers_as_a_real_one(tmp_path: Path, seed: int) -> None:
    chance, disk = random.Random(seed), quiet_disk()
    for _ in range(400):
        name, paths = random_call(chance)
        wanted = done(os, str(tmp_path), name, paths)
        assert done(disk, ROOT, name, paths) == wanted, (name, paths)


def test_a_listing_that_is_no_snapshot_may_miss_an_older_name_and_a_newer_one() -> None:
    """The older file goes and the newer one comes while the listing is between their places."""
    missed = 0
    for seed in range(20):
        disk = quiet_disk(seed)
        for name in ("other", "old"):
            os_open(disk, name)
        names = []
        with disk.scandir(ROOT) as entries:
            for entry in entries:
                names.append(entry.name)
                if names == ["other"]:
                    os_open(disk, "new")
                    disk.unlink(f"{ROOT}/old")
        missed += names == ["other"]
    assert 0 < missed < 20


def os_open(disk: Disk, name: str) -> None:
    disk.close(disk.open(f"{ROOT}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL))


def test_a_file_goes_on_behind_its_descriptor_when_its_name_is_gone() -> None:
    disk = quiet_disk()
    os_open(disk, "a")
    descriptor = disk.open(f"{ROOT}/a", os.O_RDWR)
    disk.unlink(f"{ROOT}/a")
    disk.pwrite(descriptor, b"x", 0)
    assert disk.pread(descriptor, 5, 0) == b"x"
    with pytest.raises(FileNotFoundError):
        disk.open(f"{ROOT}/a", os.O_RDONLY)


def test_the_end_of_a_run_is_no_error_of_a_program(threads: Threads) -> None:
    class Stops:
        def pick(self, ready: Sequence[Any], last: Any) -> str:
            raise Ended

        def choose(self, outcomes: Sequence[str]) -> str:
            return outcomes[0]

    assert outcome([[("write", "a")]], Stops(), threads) is None
