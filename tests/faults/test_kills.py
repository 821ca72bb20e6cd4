"""Killed at any step, whoever it is: nothing that was there is lost, and what is new is whole.

A run of a command that is not killed tells its steps (`steps`). Then, for every step of every
process, the command runs again and is killed there: the process itself or all of its job,
before the step, after it, and in the middle of writes. After each,

- every earlier checkpoint is sound and has the bits that it had,
- the new one is that, or it is not there, and so is its second output,
- no rank that lives says that all is well when it is not, and none hangs,
- `ckpt.gc` finds what is left over, all of it and nothing else,
- the same command, run again, succeeds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.stores.store import split_url
from tests.faults.commands import found_step
from tests.faults.conftest import Jobs
from tests.faults.places import Bucket, Disk, Place, belonging
from tests.faults.steps import WRITES, Kill
from tests.faults.zygote import Ended
from tests.selection import examples
from tests.stores.server import Server

OLD, NEW = 1, 2
WIDE = 3_000_000
"""Elements that a bucket takes in parts."""
SAMPLE = 2
"""Kills of a scenario that the default run tries."""


@dataclass(frozen=True)
class Scenario:
    """A command that is killed."""

    command: str
    arguments: dict[str, Any]
    """Values that begin with a slash are paths in the place."""
    target: str
    world_size: int = 1
    earlier: tuple[str, ...] = ("/earlier",)
    """Checkpoints of the old state that are there before."""
    before: int | None = None
    """The step of the checkpoint at the target, before."""
    after: int | None = NEW
    is_on_disk_only: bool = False

    def at(self, place: Place) -> dict[str, Any]:
        found = {
            name: place.url + value if isinstance(value, str) and value[:1] == "/" else value
            for name, value in self.arguments.items()
        }
        return {**found, "options": place.options}


def saving(before: int | None = None, world_size: int = 1, **arguments: Any) -> Scenario:
    told = {"url": "/new", "step": NEW, "overwrite": before is not None, **arguments}
    return Scenario("save", told, "/new", world_size, before=before)


def converting(
    to: str, before: int | None = None, target: str = "/new", source: str = "/source"
) -> Scenario:
    told = {"source": source, "target": target, "to": to, "overwrite": before is not None}
    earlier = ("/earlier",)
    return Scenario("convert", told, target, earlier=earlier, before=before)


SCENARIOS = {
    "save": saving(),
    "save by two": saving(world_size=2),
    "overwrite by two": saving(OLD, world_size=2),
    "save compressed": saving(compress=True),
    "save with a base, by two": saving(base="/earlier", world_size=2),
    "overwrite with a base and deltas": saving(OLD, base="/earlier", compress="delta"),
    "save in parts": saving(wide=WIDE),
    "save in parts, overwriting": saving(OLD, wide=WIDE, base="/earlier"),
    "save in the background": saving(blocking=False),
    "save in the background by two": saving(blocking=False, world_size=2),
    "overwrite in the background with a base": saving(OLD, blocking=False, base="/earlier"),
    "save with a second output": saving(also="/also"),
    "save with a second output in the background by two": saving(
        OLD, also="/also", blocking=False, world_size=2
    ),
    "convert to ckpt": converting("ckpt"),
    "convert to ckpt, overwriting": converting("ckpt", OLD),
    "convert to hf": converting("hf"),
    "convert to hf, overwriting": converting("hf", OLD),
    "convert to dcp, overwriting": converting("dcp", OLD),
    "convert to a file": converting("safetensors", target="/files/new.safetensors"),
    "convert to a file, overwriting": converting("torch", OLD, target="/files/new.pt"),
    "delete": Scenario("delete", {"url": "/new"}, "/new", before=OLD, after=None),
}
BY_DEFAULT = (
    *("overwrite by two", "save with a base, by two", "overwrite in the background with a base"),
    *("convert to ckpt, overwriting", "convert to hf, overwriting", "delete"),
    "save with a second output",
)
"""The scenarios of the default run."""
IN_BUCKETS = (
    *("save in parts", "save in parts, overwriting"),
    *("save", "overwrite by two", "save with a base, by two", "save compressed"),
    *("overwrite in the background with a base", "save in the background by two", "delete"),
    *("convert to ckpt, overwriting", "convert to a file, overwriting"),
)


def left_over(place: Place, found: list[ckpt.LeftOver]) -> set[str]:
    """The files that these speak of."""
    names = {os.path.relpath(f"{one.folder}/{one.name}".rstrip("/"), place.url) for one in found}
    return {name for name in place.files() if {name, os.path.dirname(name)} & names}


@dataclass
class Table:
    """One scenario at one place: what has been tried."""

    jobs: Jobs
    scenario: Scenario
    place: Place
    outcomes: list[int | None] = field(default_factory=list)

    def prepare(self) -> None:
        s, options = self.scenario, self.place.options
        self.place.clear()
        for name in s.earlier:
            compress = s.arguments.get("compress", False) is not False
            self._save(name, OLD, compress=compress)
        if s.command == "convert":
            self._save(s.arguments["source"], NEW)
        if s.before is not None:
            if s.command == "convert":
                source = f"{self.place.url}/earlier"
                told = {"to": s.arguments["to"], "storage_options": options}
                ckpt.convert(source, self.place.url + s.target, **told)
            else:
                self._save(s.target, s.before)

    def _save(self, name: str, step: int, **arguments: Any) -> None:
        """By as many ranks as the command has, so that there is something to borrow."""
        told = {"url": self.place.url + name, "options": self.place.options, **arguments}
        ended = self.jobs.run(
            "save", self.place.url, self.scenario.world_size, watched=False, step=step, **told
        )[0]
        assert all(not one.error for one in ended), ended

    def run(self, kill: Kill | None) -> tuple[list[Ended], list[str]]:
        s = self.scenario
        return self.jobs.run(s.command, self.place.url, s.world_size, kill, **s.at(self.place))

    def step_at_target(self) -> int | None:
        return found_step(self.place.url + self.scenario.target, self.place.options)

    def kills(self) -> Iterator[Kill]:
        """Every way in which the command can be killed, as a run of it tells."""
        self.prepare()
        ended, steps = self.run(None)
        assert all(one.status == 0 and not one.error for one in ended), ended
        assert self.step_at_target() == self.scenario.after
        for line in steps:
            role, number, name, _ = line.split(" ", 3)
            for when in ("before", "during", "after") if name in WRITES else ("before", "after"):
                for everybody in (False, True):
                    yield Kill(role, int(number), when, everybody)

    def check(self, kill: Kill) -> None:
        """Kill, and look."""
        self.prepare()
        ended, _ = self.run(kill)
        step = self.step_at_target()
        self.outcomes.append(step)
        s = self.scenario
        assert step in (s.before, s.after)
        self._check_survivors(kill, ended, step)
        self._check_the_rest(step)
        if step == s.after:
            self._rerun_after()
        else:
            again, _ = self.run(None)
            assert all(one.status == 0 and not one.error for one in again), again
        assert self.step_at_target() == s.after
        self._check_the_rest(s.after, delete=True)

    def _rerun_after(self) -> None:
        """The command has done its work already, and says so where it would do it over."""
        ended, _ = self.run(None)
        expected = "" if self.scenario.arguments.get("overwrite") else "ExistsError"
        if self.scenario.command == "delete":
            expected = "NotACheckpointError"
        assert ended[0].error == expected, ended

    def _check_survivors(self, kill: Kill, ended: list[Ended], step: int | None) -> None:
        number = int(kill.role[-1])
        for rank, one in enumerate(ended):
            killed = kill.everybody or kill.role == f"rank{rank}"
            if not killed:
                assert one.status == 0, one
                if not one.error:
                    assert step == self.scenario.after
                elif rank != number:
                    assert one.error == "RankError", one
                    assert f"rank {number}" in one.message, one

    def _check_the_rest(self, step: int | None, delete: bool = False) -> None:
        s, place = self.scenario, self.place
        for name in s.earlier:
            assert found_step(place.url + name, place.options) == OLD
        others = [s.target] if s.command == "convert" and s.arguments["to"] != "ckpt" else []
        if also := s.arguments.get("also"):
            others.append(also)
            assert found_step(place.url + also, place.options) in (None, NEW)
        own, files = belonging(place, others), place.files()
        found = ckpt.gc(place.url, older_than=0, storage_options=place.options)
        folder = split_url(place.url + s.target)[0]
        if folder != place.url:
            found += ckpt.gc(folder, older_than=0, storage_options=place.options)
        assert left_over(place, found) == files - own
        if delete:
            for at in {place.url, folder}:
                ckpt.gc(at, older_than=0, delete=True, storage_options=place.options)
            assert place.files() == own
            assert self.step_at_target() == step
            for name in s.earlier:
                assert found_step(place.url + name, place.options) == OLD


def check_all(table: Table, kills: list[Kill]) -> None:
    for kill in kills:
        try:
            table.check(kill)
        except BaseException as error:
            raise AssertionError(f"{kill}: {error}") from error


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(str(tmp_path / "place"))


@pytest.fixture
def bucket(moto: Server, request: pytest.FixtureRequest) -> Bucket:
    return Bucket(moto, f"kills-{abs(hash(request.node.name)):x}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_step_on_disk(
    jobs: Jobs, disk: Disk, name: str, record_testsuite_property: Callable[[str, object], None]
) -> None:
    table = Table(jobs, SCENARIOS[name], disk)
    kills = list(table.kills())
    check_all(table, kills)
    assert set(table.outcomes) == {SCENARIOS[name].before, SCENARIOS[name].after}
    record_testsuite_property(f"kills on disk, {name}", len(kills))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", IN_BUCKETS)
def test_killed_at_every_step_in_a_bucket(
    jobs: Jobs, bucket: Bucket, name: str, record_testsuite_property: Callable[[str, object], None]
) -> None:
    table = Table(jobs, SCENARIOS[name], bucket)
    kills = list(table.kills())
    check_all(table, kills)
    record_testsuite_property(f"kills in a bucket, {name}", len(kills))


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_killed_at_some_steps_on_disk(jobs: Jobs, disk: Disk, name: str) -> None:
    table = Table(jobs, SCENARIOS[name], disk)
    check_all(table, random.Random(name).sample(list(table.kills()), examples(SAMPLE, 1)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["save"])
def test_killed_at_some_steps_in_a_bucket(jobs: Jobs, bucket: Bucket, name: str) -> None:
    table = Table(jobs, SCENARIOS[name], bucket)
    check_all(table, random.Random(name).sample(list(table.kills()), 1))
