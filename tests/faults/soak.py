"""An hour of random saves, loads, deletes, kills and faults: what was tried, and what is lost.

    python tests/faults/soak.py --minutes 60 --store disk
    python tests/faults/soak.py --minutes 60 --store s3 --server radosgw

Every round runs one command on one or several ranks. Some rounds go undisturbed; in some, processes
are killed at a random step; in some, the store fails: on disk by `faulty_store` in every rank, in a
bucket by a proxy before the server. Then, undisturbed, what must exist is read and compared to the
bit. Ends with status 1 at the first thing that is lost or wrong, and says what the round was.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])  # this folder's own names stand for nothing

import ckpt
from formats.errors import FormatError
from tests.faults.commands import found_step
from tests.faults.conftest import Jobs
from tests.faults.places import Bucket, Disk, Place, belonging
from tests.faults.steps import Kill
from tests.faults.zygote import Ended
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import TRANSIENT, Fault, no_faults, seeded
from tests.stores.fixtures import STARTERS

NAMES = ("a", "b", "c", "d")
LIES = (Fault.FLIP_ANSWER, Fault.FLIP_REQUEST, Fault.SHORT_ANSWER)
FAILS = (*TRANSIENT, *TRANSIENT, Fault.DENIED)
EXPECTED = (
    *("ExistsError", "InUseError", "NotACheckpointError", "RankError", "StoreError", "OSError"),
    *("CorruptError", "DamagedLoadError", "PartialLoadError", "BackgroundError", "HostileError"),
    *("PermissionError", "FileNotFoundError", "MismatchError", "WaitTimeoutError", "FormatError"),
    *("ReplacedError", "ReplacedLoadError"),
)
"""What a command may raise when it is disturbed."""
UNDISTURBED = ("InUseError", "NotACheckpointError")


class Violation(Exception):
    """Something is lost, wrong, or left hanging."""


STEPS = {"save": (14, 4), "convert": (12, 3), "delete": (4, 3), "gc": (2, 1)}
"""How many steps a process takes, about: on disk and in a bucket."""


def wide(step: int) -> int:
    """The elements of the largest tensor of a step: a bucket takes many of them in parts."""
    return (7_000, 70_000, 3_000_000)[step % 3]


@dataclass
class Chaos:
    """How a round is disturbed."""

    kind: str = "none"
    kill: Kill | None = None
    faults: tuple[int, float, bool] | None = None
    lies: bool = False


@dataclass
class Soak:
    """What has been done at one place, and what must be there."""

    jobs: Jobs
    place: Place
    chance: random.Random
    proxy: FaultProxy | None = None
    steps: dict[str, int] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    """What the store may have lied about, and what may have borrowed from it."""
    counts: Counter[str] = field(default_factory=Counter)
    last: int = 0
    told: str = ""
    """What the last round was."""

    def round(self) -> None:
        """One command, and a look at what is there."""
        chance = self.chance
        name, other = chance.sample(NAMES, 2)
        command = chance.choices(
            ["save", "load", "delete", "convert", "verify", "gc"], [10, 4, 2, 2, 1, 1]
        )[0]
        if command in ("load", "convert", "verify") and name not in self.steps:
            command = "save"
        ranks = chance.choice([1, 2, 2, 3]) if command in ("save", "load") else 1
        arguments, wanted, base = self._arguments(command, name, other)
        chaos = self._chaos(command, arguments, ranks)
        self.told = f"{command} {arguments} on {ranks} ranks; {chaos}"
        options = self.place.options
        seen = 0
        if self.proxy is not None and chaos.kind == "faults":
            options = dict(self.proxy.server.options)
            seen = len(self.proxy.seen)
            self._disturb(chaos)
        ended, _ = self.jobs.run(
            command,
            self.place.url,
            ranks,
            chaos.kill,
            watched=chaos.kill is not None,
            faults=chaos.faults,
            options=options,
            **arguments,
        )
        lied = any(one.lied for one in ended)
        if self.proxy is not None and chaos.kind == "faults":
            self.proxy.schedule = no_faults
            met = [one.fault for one in self.proxy.seen[seen:] if one.fault is not None]
            self.counts["faults injected"] += len(met)
            lied = Fault.FLIP_REQUEST in met
        self.counts["faults injected"] += sum(one.faults for one in ended)
        self.counts["processes killed"] += sum(one.status == -9 for one in ended)
        self.counts[command] += 1
        self._check(ended, chaos)
        went_well = all(one.status == 0 and not one.error for one in ended)
        self.counts["commands that went well" if went_well else "commands that raised"] += 1
        for target, step in wanted.items():
            before = self.steps.get(target)
            doubtful = lied or base in self.doubtful or (chaos.lies and not went_well)
            self._resolve(target, {step} if went_well else {before, step}, doubtful)

    def look_at_everything(self) -> None:
        """Everything that must exist is there to the bit, and nothing else is."""
        for name in NAMES:
            self._resolve(name, {self.steps.get(name)}, name in self.doubtful)
        if not self.doubtful:
            ckpt.gc(self.place.url, older_than=0, delete=True, storage_options=self.place.options)
            over = self.place.files() - belonging(self.place)
            if over:
                raise Violation(f"not collected: {sorted(over)}")

    def _arguments(
        self, command: str, name: str, other: str
    ) -> tuple[dict[str, Any], dict[str, int | None], str | None]:
        """What the command is told, what it is to bring about, and what it borrows from."""
        url, chance = f"{self.place.url}/{name}", self.chance
        if command == "save":
            self.last += 1
            base = other if other in self.steps and chance.random() < 0.4 else None
            kinds = [False, False, True] if base is None else [False, True, "delta"]
            told = {
                "url": url,
                "step": self.last,
                "overwrite": name in self.steps,
                "base": None if base is None else f"{self.place.url}/{base}",
                "compress": chance.choice(kinds),
                "blocking": chance.random() < 0.6,
                "wide": wide(self.last),
            }
            return told, {name: self.last}, base
        if command == "convert":
            target = f"{self.place.url}/{other}"
            overwrite = other in self.steps
            told = {"source": url, "target": target, "to": "ckpt", "overwrite": overwrite}
            return told, {other: self.steps[name]}, name
        if command == "load":
            return {"url": url, "step": self.steps[name], "wide": wide(self.steps[name])}, {}, None
        if command == "gc":
            return {"url": self.place.url}, {}, None
        return {"url": url}, {name: None} if command == "delete" else {}, None

    def _chaos(self, command: str, arguments: dict[str, Any], ranks: int) -> Chaos:
        chance = self.chance
        kind = chance.choices(["none", "kill", "faults"], [2, 4, 4])[0]
        if kind == "kill" and command in STEPS:
            # The writer of a save in the background takes the first steps, its rank the last.
            has_writer = arguments.get("blocking") is False
            role = chance.choice(["rank", "writer"] if has_writer else ["rank"])
            most = STEPS[command][self.proxy is not None] // (2 if has_writer else 1)
            number, step = chance.randrange(ranks), chance.randint(1, most)
            when = chance.choice(["before", "after"])
            return Chaos(kind, Kill(f"{role}{number}", step, when, chance.random() < 0.5))
        if kind == "faults":
            lies = chance.random() < 0.3
            probability = chance.choice([0.02, 0.1, 0.3])
            faults = (chance.getrandbits(30), probability, lies)
            return Chaos(kind, faults=None if self.proxy else faults, lies=lies)
        return Chaos()

    def _disturb(self, chaos: Chaos) -> None:
        assert self.proxy is not None
        faults = [*FAILS, *LIES] if chaos.lies else FAILS
        probability = self.chance.choice([0.02, 0.1, 0.3])
        self.proxy.schedule = seeded(self.chance.getrandbits(30), probability, faults)

    def _check(self, ended: list[Ended], chaos: Chaos) -> None:
        """Nobody hangs, and nobody raises what is nobody's fault."""
        for one in ended:
            if one.status not in ((0, -9) if chaos.kill else (0,)):
                raise Violation(f"a rank ended with {one.status}: {ended}")
            disturbed = chaos.kind != "none" or bool(self.doubtful)
            kind = one.error
            if kind == "RankError" and "InUseError" in one.message:
                kind = "InUseError"
            if kind and kind not in (EXPECTED if disturbed else UNDISTURBED):
                raise Violation(f"{one.error}: {one.message}")

    def _resolve(self, name: str, allowed: set[int | None], doubtful: bool) -> None:
        url, options = f"{self.place.url}/{name}", self.place.options
        self.counts["checkpoints read and verified"] += 1
        try:
            step = found_step(url, options)
        except (FormatError, AssertionError) as error:
            if isinstance(error, AssertionError) and "wrong bits" in str(error):
                self.counts["silently wrong"] += 1
                raise Violation(f"{name}: {error}") from error
            if not doubtful and name not in self.doubtful:
                self.counts["lost"] += 1
                raise Violation(f"{name}: {error}") from error
            self.counts["lies of the store found"] += name not in self.doubtful
            self.doubtful.add(name)
            self.steps.setdefault(name, self.last)
            return
        if step not in allowed:
            self.counts["lost"] += 1
            raise Violation(f"{name} is of step {step}, allowed were {allowed}")
        self.doubtful.discard(name)
        if step is None:
            self.steps.pop(name, None)
        else:
            self.steps[name] = step


@contextmanager
def place_at(store: str, server: str, scratch: Path) -> Iterator[tuple[Place, FaultProxy | None]]:
    """Where the checkpoints are, and what disturbs the way there."""
    if store == "disk":
        (scratch / "place").mkdir()
        yield Disk(str(scratch / "place")), None
        return
    with STARTERS[server](scratch) as started, FaultProxy(started) as proxy:
        yield Bucket(started, "soak"), proxy


def main() -> int:
    """Run for the time that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--store", choices=["disk", "s3"], default="disk")
    parser.add_argument("--server", choices=["radosgw", "moto"], default="radosgw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to work; by default a temporary folder")
    options = parser.parse_args()
    os.environ.setdefault("CKPT_STORE_DEADLINE", "10")
    end = time.monotonic() + options.minutes * 60
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="ckpt-soak-", dir=options.folder)
        scratch = Path(stack.enter_context(made))
        place, proxy = stack.enter_context(place_at(options.store, options.server, scratch))
        (scratch / "jobs").mkdir()
        jobs = Jobs(str(scratch / "jobs"))
        stack.callback(jobs.close)
        soak = Soak(jobs, place, random.Random(options.seed), proxy)
        rounds, shown = 0, time.monotonic()
        try:
            while time.monotonic() < end:
                soak.round()
                rounds += 1
                if rounds % 10 == 0:
                    soak.look_at_everything()
                if time.monotonic() - shown > 60:
                    shown = time.monotonic()
                    print(f"round {rounds}: {summary(soak)}", flush=True)
            soak.look_at_everything()
        except Violation as error:
            print(f"VIOLATION in round {rounds + 1}, seed {options.seed}: {error}\n  {soak.told}")
            print(f"{rounds} rounds: {summary(soak)}")
            return 1
        print(f"{rounds} rounds over {options.minutes:g} minutes, {options.store}: {summary(soak)}")
    return 0


def summary(soak: Soak) -> str:
    """What was done and found."""
    counts = Counter({"lost": 0, "silently wrong": 0})
    counts.update(soak.counts)
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
