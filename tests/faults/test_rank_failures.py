"""One rank raises, hangs, ends or is interrupted at any step: the others have one error in time.

A row of the table is a call, a step of it, what happens there, and to whom. Afterwards the same
process group saves and loads, unless a rank has ended; a rank that hung takes part again.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt

SHORT_SECONDS, LONG_SECONDS = 2.0, 100.0
"""The time-out where a rank hangs, and where nobody should wait for one to pass."""
SAVING = (
    "ckpt.saving.agreement:flatten",
    "ckpt.saving.save:_write",
    "ckpt.saving.agreement:pack_summary",
)
COMMIT = "ckpt.saving.agreement:write_manifest"
"""Of rank 0 alone."""
LATE = "is interrupted when the others go on"
"""They have the answer that this rank has not looked at."""
WAIT = "sharding.agreement.channel:Link.wait"
"""Of the other ranks: for rank 0's answer."""
INSTALL = "installing the loaded state"
"""What the ranks do together by this name."""
STEPS = {
    "save": (*SAVING, COMMIT),
    "save later": (
        "ckpt.saving.agreement:flatten",
        "ckpt.saving.background:_stage",
        "ckpt.saving.background:_Save._write",
        "ckpt.saving.agreement:pack_summary",
        COMMIT,
    ),
    "load": (
        "ckpt.loading.agreement:match",
        "ckpt.loading.agreement:plan_load",
        "ckpt.loading.load:LoadRun.read",
        INSTALL,
    ),
    "load, exchanging": ("ckpt.loading.agreement:plan_load", "ckpt.loading.load:LoadRun.read"),
    "convert": ("ckpt.state_dict:flatten", "sharding.reshard.kinds:_mark"),
    "load a state dict": (
        "ckpt.state_dict:flatten",
        "ckpt.state_dict:match",
        "ckpt.state_dict:plan_load",
        INSTALL,
    ),
}
"""What each call does, in order, until tensors travel."""
TRAVEL = {
    "load, exchanging": "ckpt.transfer.run:redistribute",
    "convert": "sharding.reshard.kinds:redistribute",
    "load a state dict": "ckpt.transfer.run:redistribute",
}
"""The steps in which tensors travel: who does not take part breaks the process group itself."""
ERRORS = {
    "raises": "FileNotFoundError",
    "is interrupted": "KeyboardInterrupt",
    LATE: "KeyboardInterrupt",
    "leaves": "SystemExit",
    "hangs": "TimeoutError",
    "ends": "ProcessEnded",
}
"""What may happen to a rank -> the error that the others name."""
HAPPENS = [what for what in ERRORS if what != LATE]
"""At any step."""


def state(value: float) -> dict[str, Any]:
    """A tensor divided among the ranks, one that all have, and a number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12.0).reshape(6, 2) + value
    return {
        "divided": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "whole": torch.full((5,), float(value)),
        "step": int(value),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states are equal on this rank."""
    return (
        torch.equal(one["divided"].to_local(), other["divided"].to_local())
        and torch.equal(one["whole"], other["whole"])
        and one["step"] == other["step"]
    )


def do(call: str, folder: str, seconds: float) -> None:
    """The call, on this rank."""
    if call == "save":
        ckpt.save(f"{folder}/new", state(2), timeout=seconds)
    elif call == "save later":
        handle = ckpt.save(f"{folder}/new", state(2), timeout=seconds, blocking=False)
        handle.wait(LONG_SECONDS)
    elif call.startswith("load a"):
        ckpt.state_dict.load(state(1), state(0), timeout=seconds)
    elif call.startswith("load"):
        replicas = "exchange" if call.endswith("exchanging") else "read"
        ckpt.load(f"{folder}/old", state(0), timeout=seconds, replicas=replicas)
    else:
        ckpt.state_dict.convert(state(1), to="full", timeout=seconds)


@contextmanager
def happening(step: str, what: str, gate: str) -> Iterator[None]:
    """Inside, something happens to this rank when it comes to a step for the first time."""
    where = step if ":" in step else "sharding.agreement.ranks:Ranks.run_and_compare"
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    before, happened = getattr(owner, name), []

    def comparing(ranks: Any, stage: str, action: Callable, *rest: Any, **named: Any) -> Any:
        if stage == step:
            return before(ranks, stage, lambda: (failing(None), action())[1], *rest, **named)
        return before(ranks, stage, action, *rest, **named)

    def failing(*arguments: Any, **options: Any) -> Any:
        if not happened:
            happened.append(what)
            if what == "raises":
                raise FileNotFoundError("on purpose")
            if what == LATE:
                before(*arguments, **options)
            if what in ("is interrupted", LATE):
                raise KeyboardInterrupt
            if what == "leaves":
                raise SystemExit(3)
            if what == "ends":
                os.kill(os.getpid(), signal.SIGKILL)
            Path(gate).read_text()  # a FIFO: until another rank opens it too
        return before(*arguments, **options) if ":" in step else None

    setattr(owner, name, failing if ":" in step else comparing)
    try:
        yield
    finally:
        setattr(owner, name, before)
        assert happened


def fail(
    call: str, step: str, what: str, victim: int, folder: str, goes_on: bool
) -> tuple[str, int, str]:
    """The class of this rank's error, the rank that it names, and what it says."""
    rank = dist.get_rank()
    seconds = SHORT_SECONDS if what == "hangs" else LONG_SECONDS
    gate = f"{folder}/gate"
    try:
        if rank == victim:
            with happening(step, what, gate):
                do(call, folder, seconds)
        else:
            do(call, folder, seconds)
    except BaseException as error:
        raised = (type(error).__name__, getattr(error, "rank", rank), str(error))
    else:
        raised = ("", -1, "")
    if what == "hangs" and rank == (victim + 1) % dist.get_world_size():
        Path(gate).write_text("")
    if goes_on:
        ckpt.save(f"{folder}/after", state(3))
        loaded = ckpt.load(f"{folder}/after", state(0))
        assert same(loaded, state(3))
        handle = ckpt.save(f"{folder}/later", state(4), blocking=False)
        handle.wait(LONG_SECONDS)
        if dist.get_world_size() > 1 and step not in TRAVEL.values():
            full: Any = ckpt.state_dict.convert(state(3), to="full")
            assert torch.equal(full["divided"], torch.arange(12.0).reshape(6, 2) + 3)
    return raised


def save_old(folder: str) -> None:
    ckpt.save(f"{folder}/old", state(1))


def check(
    cluster: Any, folder: Path, call: str, step: str, what: str, victim: int, goes_on: bool
) -> None:
    """Play one row."""
    os.mkfifo(folder / "gate")
    cluster.run(save_old, str(folder))
    arguments = (call, step, what, victim, str(folder), goes_on)
    if what == "ends":
        with pytest.raises(Exception, match=rf"ranks \[{victim}\] died"):
            cluster.run(survive, *arguments)
        found = None
    else:
        found = cluster.run(fail, *arguments)
        for rank, (kind, named, said) in enumerate(found):
            check_error(rank, kind, named, said, what, victim)
    assert not ckpt.verify(folder / "old").problems
    if (folder / "new" / "manifest.json").exists():  # told too late to take it back, or not at all
        assert not ckpt.verify(folder / "new").problems
        assert what in ("ends", "hangs", "is interrupted", "leaves")
        assert step == COMMIT or call == "save later"
    if goes_on:
        assert not ckpt.verify(folder / "after").problems
        assert not ckpt.verify(folder / "later").problems


def check_error(rank: int, kind: str, named: int, said: str, what: str, victim: int) -> None:
    """What a rank raised says what happened, and to whom."""
    if rank == victim and what != "hangs":
        assert kind == ERRORS[what] or (kind == "CkptError" and ERRORS[what] in said), (kind, said)
        return
    assert kind == "RankError", (rank, kind, said)
    assert named == victim, (rank, said)
    assert f"failed on rank {victim} with " in said
    assert ERRORS[what] in said


def survive(*arguments: Any) -> None:
    """`fail`, on ranks that outlive another: each checks its own error."""
    what, victim = arguments[2], arguments[3]
    check_error(dist.get_rank(), *fail(*arguments), what, victim)
    raise AssertionError("as expected")  # so that it is seen to have come so far


def rows() -> Iterator[tuple[str, str, str, int]]:
    """Everything that the process group outlives."""
    for call, steps in STEPS.items():
        for step in steps:
            for what in HAPPENS:
                for victim in (0, 1):
                    if step != COMMIT or victim == 0:
                        yield call, step, what, victim
    for call in STEPS:
        for what in ("is interrupted", LATE):
            yield call, WAIT, what, 1


SAMPLE = [
    ("save", WAIT, "is interrupted", 1),
    ("save later", WAIT, LATE, 1),
    ("save", "ckpt.saving.agreement:flatten", "is interrupted", 1),
    ("save", "ckpt.saving.save:_write", "hangs", 1),
    ("save", COMMIT, "raises", 0),
    ("save later", "ckpt.saving.background:_Save._write", "leaves", 1),
    ("load", "ckpt.loading.load:LoadRun.read", "hangs", 0),
    ("convert", "ckpt.state_dict:flatten", "raises", 0),
    ("load a state dict", INSTALL, "is interrupted", 0),
]
DEATHS = [
    ("save", "ckpt.saving.save:_write", "ends", 0),
    ("load", "ckpt.loading.agreement:match", "ends", 1),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("call", "step", "what", "victim"), SAMPLE)
def test_one_rank_fails_and_the_group_goes_on(
    clusters: Callable, tmp_path: Path, call: str, step: str, what: str, victim: int
) -> None:
    check(clusters(2), tmp_path, call, step, what, victim, goes_on=True)


@pytest.mark.parametrize(("call", "step", "what", "victim"), DEATHS)
def test_one_rank_ends_and_the_others_are_told(
    doomed_cluster: Callable, tmp_path: Path, call: str, step: str, what: str, victim: int
) -> None:
    check(doomed_cluster(3), tmp_path, call, step, what, victim, goes_on=False)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("call", "step", "what", "victim"), [row for row in rows() if row[2] != "ends"]
)
def test_whatever_happens_at_any_step_the_group_goes_on(
    clusters: Callable,
    tmp_path: Path,
    world_size: int,
    call: str,
    step: str,
    what: str,
    victim: int,
) -> None:
    check(clusters(world_size), tmp_path, call, step, what, victim, goes_on=True)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("call", "step", "what", "victim"), [row for row in rows() if row[2] == "ends"]
)
def test_wherever_a_rank_ends_the_others_are_told(
    doomed_cluster: Callable,
    tmp_path: Path,
    world_size: int,
    call: str,
    step: str,
    what: str,
    victim: int,
) -> None:
    check(doomed_cluster(world_size), tmp_path, call, step, what, victim, goes_on=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", HAPPENS)
@pytest.mark.parametrize("call", list(TRAVEL))
def test_while_tensors_travel_too_all_are_told(
    doomed_cluster: Callable, tmp_path: Path, call: str, what: str
) -> None:
    check(doomed_cluster(3), tmp_path, call, TRAVEL[call], what, 1, goes_on=False)


# Ranks that do not do the same.


def differ(folder: str, what: str) -> tuple[str, int, str]:
    """Ranks 0 and 1 call different things; afterwards the same."""
    rank = dist.get_rank()
    try:
        if rank == 0:
            ckpt.save(f"{folder}/new", state(2), timeout=LONG_SECONDS)
        elif what == "load":
            ckpt.load(f"{folder}/old", state(0), timeout=LONG_SECONDS)
        elif what == "later":
            ckpt.save(f"{folder}/new", state(2), timeout=LONG_SECONDS, blocking=False)
        else:
            ckpt.load(f"{folder}/old", state(0), dtype="float", timeout=LONG_SECONDS)
    except Exception as error:
        raised = (type(error).__name__, getattr(error, "rank", rank), str(error))
    ckpt.save(f"{folder}/after", state(3))
    assert same(ckpt.load(f"{folder}/after", state(0)), state(3))
    return raised


@pytest.mark.parametrize(("what", "said"), [("load", "ckpt.load"), ("later", "blocking=False")])
def test_ranks_in_different_calls_are_told_which(
    clusters: Callable, tmp_path: Path, what: str, said: str
) -> None:
    clusters(2).run(save_old, str(tmp_path))
    for kind, named, message in clusters(2).run(differ, str(tmp_path), what):
        assert (kind, named) == ("RankError", 1)
        assert said in message
        assert "rank 0 in ckpt.save " in message
        assert "call the same on all ranks" in message
    assert not (tmp_path / "new").exists()


def test_a_rank_whose_arguments_are_wrong_ends_the_others(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save_old, str(tmp_path))
    (kind, named, said), (own, _, _) = clusters(2).run(differ, str(tmp_path), "bad argument")
    assert (kind, named, own) == ("RankError", 1, "ArgumentError")
    assert "dtype is 'target' or None, not 'float'" in said


def wait_for(folder: str, seconds: Any) -> tuple[str, str]:
    """What this rank raises where rank 1, or each of both for a sound time, waits so long."""
    raised = ("", "")
    try:
        is_sound = seconds is None or (isinstance(seconds, float) and seconds > LONG_SECONDS)
        own = seconds if is_sound or dist.get_rank() else LONG_SECONDS
        ckpt.save(f"{folder}/new", state(2), timeout=own)
        ckpt.state_dict.convert(state(2), to="full", timeout=seconds)
    except Exception as error:
        raised = (type(error).__name__, str(error))
    ckpt.save(f"{folder}/after", state(3))
    return raised


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "5", None])
def test_a_time_out_that_is_none_is_an_error_on_all_ranks(
    clusters: Callable, tmp_path: Path, seconds: Any
) -> None:
    said = f"timeout is {seconds!r}; give seconds above 0"
    first, second = clusters(2).run(wait_for, str(tmp_path), seconds)
    if seconds is None:  # as if it were not given
        assert first == second == ("", "")
        return
    assert first == ("RankError", f"ckpt.save failed on rank 1 with ArgumentError: {said}")
    assert second == ("ArgumentError", said)
    with pytest.raises(ValueError, match="; give seconds above 0"):
        ckpt.save(tmp_path / "alone", {"step": 1}, timeout=seconds)


@pytest.mark.parametrize("seconds", [1e12, float("inf")])
def test_a_time_out_may_be_longer_than_the_system_waits(
    clusters: Callable, tmp_path: Path, seconds: float
) -> None:
    assert clusters(2).run(wait_for, str(tmp_path), seconds) == [("", "")] * 2


def come_late(folder: str) -> list[str]:
    """Rank 1 comes to three calls when they are over, learns of each, and is in step again."""
    raised = []
    gate = f"{folder}/gate"
    if dist.get_rank() == 1:
        Path(gate).read_text()
    for count in range(3):
        with pytest.raises(ckpt.RankError) as found:
            ckpt.save(f"{folder}/{count}", state(2), timeout=0.2)
        raised.append(f"{found.value.rank} {found.value.error}")
    if dist.get_rank() == 0:
        Path(gate).write_text("")
    ckpt.save(f"{folder}/after", state(3))
    return raised


def test_a_rank_that_comes_late_learns_that_calls_are_over(
    clusters: Callable, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    late = "1 TimeoutError"
    assert clusters(2).run(come_late, str(tmp_path)) == [[late] * 3] * 2
    assert not ckpt.verify(tmp_path / "after").problems
