"""Every call of the operating system that a call of ours makes fails, one at a time.

`FailingDisk` counts the calls of each kind below a folder, and lets the n-th of one kind fail with
an error that the system can give it: before it is done, or after it. Then either the call raised an
error of ours that names path and reason, and the checkpoint is the one of before; or it returned,
and its result is there. A call after which the checkpoint is complete can thus fail no save.
"""

import errno
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
LOOK = (errno.EACCES, errno.EIO, errno.ESTALE)
CHANGE = (errno.EIO, errno.EROFS, errno.EACCES, errno.ENOSPC)
ERRORS = {
    "open": (
        *(errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS),
        *(errno.EIO, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE, errno.EPERM),
    ),
    **dict.fromkeys(("write", "writev", "pwrite"), (*FULL, errno.EFBIG)),
    "fsync": FULL,
    "close": FULL,
    "link": (*CHANGE, errno.EXDEV),
    "replace": CHANGE,
    "rename": CHANGE,
    "unlink": (*CHANGE[:3], errno.EBUSY),
    "rmdir": (*CHANGE[:3], errno.EBUSY),
    "mkdir": (*CHANGE, errno.EMLINK, errno.EDQUOT),
    **dict.fromkeys(("scandir", "listdir"), (*LOOK, errno.EMFILE)),
    **dict.fromkeys(("stat", "lstat", "fstat", "pread", "preadv", "readlink"), LOOK),
}
"""The errors of each kind of call."""
DONE_BEFORE = ("link", "replace", "rename", "unlink", "mkdir")
"""A network file system can do these and then fail all the same."""
SAMPLE = 20
"""The failures that a run of all tests tries; `slow` has each call, with `EACH` errors."""
EACH = 2


@dataclass(frozen=True)
class Failure:
    """The failure of one call: the n-th of a kind, from 0."""

    kind: str
    number: int
    error: int
    is_done: bool


class FailingDisk:
    """The calls on paths below a folder: counted, and one of them fails."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._real = {kind: getattr(os, kind) for kind in ERRORS}
        self._readlink = os.readlink
        self.counts: Counter[str] = Counter()
        self._failure: Failure | None = None

    @contextmanager
    def watched(self, failure: Failure | None = None) -> Iterator[None]:
        """Counts the calls in the block, where one of them fails."""
        self.counts.clear()
        self._failure = failure
        for kind, real in self._real.items():
            setattr(os, kind, self._call(kind, real))
        fast = shutil._use_fd_functions  # type: ignore[attr-defined]
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # by paths
        try:
            yield
        finally:
            shutil._use_fd_functions = fast  # type: ignore[attr-defined]
            for kind, real in self._real.items():
                setattr(os, kind, real)

    def _call(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self._is_below(arguments[0], options.get("dir_fd")):
                return real(*arguments, **options)
            number, failure = self.counts[kind], self._failure
            self.counts[kind] += 1
            if failure is None or (kind, number) != (failure.kind, failure.number):
                return real(*arguments, **options)
            if failure.is_done or kind == "close":
                real(*arguments, **options)
            raise OSError(failure.error, os.strerror(failure.error))

        return call

    def _is_below(self, place: Any, above: int | None) -> bool:
        try:
            if above is not None:
                place = f"{self._readlink(f'/proc/self/fd/{above}')}/{place}"
            path = self._readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else place
            return os.fspath(path).startswith(self._folder)
        except (OSError, TypeError):
            return False


def failures(counts: Counter[str], chance: random.Random) -> Iterator[Failure]:
    """Failures of each of these calls, with errors that are drawn."""
    for kind, calls in counts.items():
        for number in range(calls):
            for error in chance.sample(ERRORS[kind], EACH):
                yield Failure(kind, number, error, False)
            if kind in DONE_BEFORE:
                yield Failure(kind, number, chance.choice(ERRORS[kind]), True)


def old() -> dict[str, Any]:
    return {"w": torch.arange(300.0), "b": torch.ones(7), "step": 1}


def new() -> dict[str, Any]:
    return {**{f"w{i}": torch.full((500, 3), float(i)).T for i in range(4)}, "step": 2}


def found(place: str) -> str:
    """The checkpoint that is there, whole and with the right values."""
    try:
        state: Any = ckpt.read(place)
    except ckpt.NotACheckpointError:
        return "none"
    wanted = old() if state["step"] == 1 else new()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted if name != "step")
    return "old" if state["step"] == 1 else "new"


Act = Callable[[str], object]
"""A call of ours on the folder of a run."""


def save_in_run(folder: str) -> None:
    options: dict[str, Any] = {"signals": (), "blocking": True, "on_failure": "raise"}
    with ckpt.Checkpointer(folder, every_steps=1, **options) as run:
        run.restore(old())
        assert run.save(2, new())


def save_onto_a_link(folder: str) -> None:
    os.symlink(f"{folder}/step-1", f"{folder}/step-2")
    options: dict[str, Any] = {"signals": (), "blocking": True, "on_failure": "raise"}
    with ckpt.Checkpointer(folder, every_steps=1, **options) as run:
        run.restore(old(), step=1)
        assert run.save(2, new())


def load(folder: str) -> None:
    target = {"w": torch.zeros(300), "b": torch.zeros(7), "step": 0}
    ckpt.load(f"{folder}/step-1", target)
    assert torch.equal(target["w"], old()["w"])  # type: ignore[arg-type]


def verify(folder: str) -> None:
    for problem in ckpt.verify(f"{folder}/step-1").problems:
        raise ckpt.CorruptError(problem.message)


def converted(name: str, to: str, **options: Any) -> tuple[bool, str, Act, str, str]:
    def convert(folder: str) -> None:
        ckpt.convert(f"{folder}/step-1", f"{folder}/{name}", to=to, **options)

    return True, "step-1", convert, "old", "old"


CALLS: dict[str, tuple[bool, str, Act, str, str]] = {
    "save": (False, "step-1", lambda f: ckpt.save(f"{f}/step-1", new()), "none", "new"),
    "compressed": (
        *(False, "step-1"),
        *(lambda f: ckpt.save(f"{f}/step-1", new(), compress=True), "none", "new"),
    ),
    "overwrite": (
        *(True, "step-1"),
        *(lambda f: ckpt.save(f"{f}/step-1", new(), overwrite=True), "old", "new"),
    ),
    "borrow": (
        *(True, "step-2"),
        *(lambda f: ckpt.save(f"{f}/step-2", new(), base=f"{f}/step-1"), "none", "new"),
    ),
    "background": (
        *(True, "step-1"),
        lambda f: ckpt.save(f"{f}/step-1", new(), overwrite=True, blocking=False).wait(60),
        *("old", "new"),
    ),
    "run": (True, "step-2", save_in_run, "none", "new"),
    "linked": (True, "step-2", save_onto_a_link, "old", "new"),
    "delete": (True, "step-1", lambda f: ckpt.delete(f"{f}/step-1"), "old", "none"),
    "gc": (True, "step-1", lambda f: ckpt.gc(f, delete=True, older_than=0), "old", "old"),
    "load": (True, "step-1", load, "old", "old"),
    "verify": (True, "step-1", verify, "old", "old"),
    "latest": (True, "step-1", ckpt.latest, "old", "old"),
    "to hf": converted("hf", "hf"),
    "to dcp, resumed": converted("dcp", "dcp", resume=True),
    "to torch": converted("model.pt", "torch"),
    "to ckpt": converted("native", "ckpt"),
}
"""Whether a checkpoint is there before, the place that counts, the call, and what is there then
after a failure and after a success."""
RESULTS = {"to hf": "hf", "to dcp, resumed": "dcp", "to torch": "model.pt", "to ckpt": "native"}


def prepare(folder: Path, has_old: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if has_old:
        ckpt.save(folder / "step-1", old())
        shard = next((folder / "step-1").glob("*.safetensors"))
        shutil.copy(shard, folder / "step-1" / "00000000000000ff-00000.safetensors")


def check(name: str, folder: Path, disk: FailingDisk, failure: Failure) -> None:
    has_old, place, act, before, after = CALLS[name]
    prepare(folder, has_old)
    raised: BaseException | None = None
    with warnings.catch_warnings():
        for kind in (ckpt.NotDurableWarning, ckpt.LeftOverWarning, ckpt.UnreadableWarning):
            warnings.simplefilter("ignore", kind)
        with disk.watched(failure):
            try:
                act(str(folder))
            except Exception as error:
                raised = error
    is_there = found(str(folder / place))
    result = RESULTS.get(name)
    if raised is None:
        assert is_there == after
        assert result is None or (folder / result).exists()
        return
    assert isinstance(raised, ckpt.CkptError), repr(raised)
    assert not isinstance(raised, ckpt.NotACheckpointError), f"it is there: {raised}"
    assert str(folder) in str(raised)
    is_damage = isinstance(raised, ckpt.CorruptError)
    assert is_damage or os.strerror(failure.error) in str(raised), str(raised)
    assert is_damage or ";" in str(raised), f"no remedy: {raised}"
    if name == "delete" and "stay, for `ckpt gc`" in str(raised):
        assert is_there == after
    else:
        assert is_there == before
    assert result is None or not (folder / result).exists()
    parts = [*folder.rglob("*.part")]
    assert failure.kind in ("unlink", "listdir", "rmdir") or "resumed" in name or not parts


@pytest.fixture
def disk(tmp_path: Path) -> tuple[Path, FailingDisk]:
    return tmp_path / "disk", FailingDisk(str(tmp_path / "disk"))


def calls_of(name: str, folder: Path, disk: FailingDisk) -> Counter[str]:
    has_old, _, act, _, _ = CALLS[name]
    prepare(folder, has_old)
    with disk.watched():
        act(str(folder))
    return Counter(disk.counts)


def test_a_failing_call_of_the_system_is_a_store_error_and_what_was_there_stays(
    disk: tuple[Path, FailingDisk],
) -> None:
    chance = random.Random(35)
    names = [chance.choice([*CALLS]) for _ in range(SAMPLE)]
    for name in sorted({*names}):
        every = list(failures(calls_of(name, *disk), chance))
        for failure in chance.sample(every, names.count(name)):
            check(name, *disk, failure)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_each_failing_call_of_the_system_is_a_store_error_and_what_was_there_stays(
    disk: tuple[Path, FailingDisk], name: str
) -> None:
    calls = calls_of(name, *disk)
    assert calls["open"]
    for failure in failures(calls, random.Random(name)):
        check(name, *disk, failure)


def save_on_ranks(folder: str, rank: int, failure: Failure) -> tuple[str, str]:
    """The error of this rank's save when one rank's disk fails."""
    disk = FailingDisk(folder)
    chosen = failure if dist.get_rank() == rank else None
    state = {"w": torch.zeros(1 << 18), "step": 2}
    with disk.watched(chosen):
        try:
            ckpt.save(f"{folder}/step-1", state)
        except ckpt.CkptError as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "kind", ["writev", pytest.param("open", marks=pytest.mark.slow), "fsync", "replace"]
)
def test_on_every_rank_a_failing_disk_of_one_is_told_with_path_and_reason(
    clusters: Callable, tmp_path: Path, rank: int, kind: str
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    ends = clusters(2).run(save_on_ranks, str(folder), rank, Failure(kind, 0, errno.EIO, False))
    assert ends[rank][0] == "StoreError"
    assert ends[1 - rank][0] == "RankError"
    for _, message in ends:
        assert str(folder) in message
        assert os.strerror(errno.EIO) in message
    assert not [*folder.iterdir()]
