"""Saves and loads of one rank by itself, and those that only some ranks call."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from sharding.agreement import channel as wait_warning
from sharding.agreement.ranks import Ranks

WAIT_SECONDS = 60.0


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3, 2), value), "model": nn.Linear(2, 2), "step": int(value)}


def save_and_load_by_itself(folder: str, saver: int) -> None:
    """One rank saves, reads and loads; the other calls nothing of ckpt meanwhile."""
    if dist.get_rank() == saver:
        mine = state(7.0)
        ckpt.save(f"{folder}/a", mine, group="self", timeout=1.0)
        handle = ckpt.save(f"{folder}/b", mine, group="self", timeout=1.0, blocking=False)
        handle.wait()
        for name in ("a", "b"):
            target = ckpt.load(f"{folder}/{name}", state(0.0), group="self", timeout=1.0)
            assert torch.equal(target["w"], mine["w"])
            assert torch.equal(target["model"].weight, mine["model"].weight)
            assert target["step"] == 7
        ckpt.load(f"{folder}/a", state(0.0), group="self", replicas="exchange", timeout=1.0)
        again = ckpt.load(f"{folder}/none", state(0.0), group="self", fallback=f"{folder}/a")
        assert again["step"] == 7
    dist.barrier()
    loaded = ckpt.load(f"{folder}/a", state(0.0))  # all of them, and they are in step
    assert loaded["step"] == 7


@pytest.mark.parametrize("saver", [0, 1])
def test_one_rank_saves_and_loads_by_itself(
    clusters: Callable[[int], Any], tmp_path: Path, saver: int
) -> None:
    clusters(2).run(save_and_load_by_itself, str(tmp_path), saver)
    assert ckpt.read(tmp_path / "a")["step"] == 7  # type: ignore[index]
    assert not ckpt.verify(tmp_path / "b").problems


def save_a_part(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with pytest.raises(ckpt.StateError) as caught:
        ckpt.save(folder, {"w": whole}, group="self")
    return str(caught.value)


def test_a_rank_by_itself_cannot_save_what_others_have_a_part_of(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    for message in clusters(2).run(save_a_part, str(tmp_path / "c")):
        assert "w: sharded over the ranks [0, 1], of which" in message
    assert not (tmp_path / "c").exists()


def test_a_group_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group is a process group, 'self' or None, not 'me'"):
        ckpt.save(tmp_path, {}, group="me")  # type: ignore[call-overload]
    for group in (5, object(), ["self"]):
        with pytest.raises(ckpt.ArgumentTypeError, match=r"not a (int|object|list)$"):
            ckpt.save(tmp_path, {}, group=group)  # type: ignore[call-overload]
    ckpt.save(tmp_path, {"step": 1}, group="self")
    assert ckpt.load(tmp_path, {"step": 0}, group="self") == {"step": 1}


def gives_wrong_groups(folder: str) -> list[str]:
    """What a save to a mesh says, and on rank 1 one to a group of rank 0."""
    first = dist.new_group([0])
    said = []
    for group in [init_device_mesh("cpu", (2,)), first][: 1 + dist.get_rank()]:
        with pytest.raises(ckpt.CkptError) as caught:
            ckpt.save(folder, {}, group=group)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_a_mesh_and_a_group_of_other_ranks_are_refused(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    first, second = clusters(2).run(gives_wrong_groups, str(tmp_path / "c"))
    for mesh in (first[0], second[0]):
        assert mesh.startswith("ArgumentTypeError: group is a process group, 'self' or None, not a")
        assert mesh.endswith("DeviceMesh; a mesh has groups: give mesh.get_group()")
    assert second[1].startswith("NotAMemberError: this rank is not in the process group that it ")
    assert not (tmp_path / "c").exists()


@pytest.mark.thorough
def test_a_group_that_was_destroyed_is_no_single_process(tmp_path: Path) -> None:
    program = f"""
import torch.distributed as dist, ckpt
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
group = dist.new_group([0])
dist.destroy_process_group()
try:
    ckpt.save("{tmp_path}/c", {{}}, group=group)
except ckpt.CkptError as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.startswith("DestroyedGroupError group is a process group that"), ran
    assert not (tmp_path / "c").exists()


class Told(logging.Handler):
    """Keeps the warnings of a logger, and opens a gate with the first of them."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate, self.messages = gate, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == 1:
            gate = os.open(self.gate, os.O_RDWR)  # of two that open it one may be alone
            os.write(gate, b"x")


def call_late(folder: str, late: int, is_first: bool) -> list[str]:
    """The rank `late` calls when another has warned that it has not; what this rank warned of."""
    if (dist.get_rank() == 0) != (late == 0):  # those that know who is missing
        wait_warning.NOTICE_SECONDS = 0.2
    group = dist.new_group() if is_first else None
    gate = f"{folder}/gate"
    told = Told(gate)
    logger = logging.getLogger("ckpt")
    logger.addHandler(told)
    try:
        if dist.get_rank() == late:
            with open(gate, "rb") as opened:
                opened.read(1)
        ckpt.save(f"{folder}/c", {"w": torch.ones(3)}, group=group, timeout=WAIT_SECONDS)
    finally:
        logger.removeHandler(told)
        wait_warning.NOTICE_SECONDS = 10.0
    return told.messages


@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_have_not_called_are_named_while_the_others_wait(
    clusters: Callable[[int], Any], tmp_path: Path, late: int, is_first: bool
) -> None:
    cluster = clusters(3)
    os.mkfifo(tmp_path / "gate")
    cluster.run(ckpt.save, str(tmp_path / "before"), {"step": 1})
    told = cluster.run(call_late, str(tmp_path), late, is_first)
    waiting = [rank for rank in range(3) if rank != late]
    said = f"s for rank {late}, which has not called it"
    if late:  # rank 0 knows, and the others hear that it does
        assert [len(messages) for messages in told] == [1, 0, 0]
        assert said in told[0][0]
    else:
        assert any(told[rank] for rank in waiting)
        for rank in waiting:
            assert all(said in message for message in told[rank]), told
    assert not told[late]
    message = next(message for messages in told for message in messages)
    assert message.startswith("ckpt.save: rank ")
    assert 'group="self"' in message
    assert "All fail after 60 s" in message
    assert ckpt.read(tmp_path / "c")["w"].sum() == 3  # type: ignore[index]


class Warned(logging.Handler):
    """Keeps warnings, and sets a key of the store with the first."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.messages = store, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.store.set("warned", "1")


def enter_slowly(slow: int) -> list[str]:
    """What this rank warns of while `slow` is at work before the first operation, and 2 absent."""
    rank = dist.get_rank()
    store = dist.PrefixStore(f"slow-{slow}", dist.distributed_c10d._get_default_store())
    ranks, told = Ranks(seconds=60), Warned(store)
    ranks.agree("telling numbers")
    wait_warning.NOTICE_SECONDS = 0.0
    logging.getLogger("ckpt").addHandler(told)
    try:
        if rank == 2:
            dist.barrier()
            store.wait(["warned"], timedelta(seconds=60))
        elif rank != slow:
            dist.barrier()
        with ranks.call("a call"):
            if rank == slow:
                dist.barrier()
                with suppress(RuntimeError):  # no rank has warned, as it should be for rank 0
                    store.wait(["warned"], timedelta(seconds=0.2))
            ranks.agree("telling numbers")
    finally:
        logging.getLogger("ckpt").removeHandler(told)
        wait_warning.NOTICE_SECONDS = 10.0
    return told.messages


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_slow_in_the_call_is_not_said_to_be_absent(
    clusters: Callable[[int], Any], slow: int
) -> None:
    told = clusters(3).run(enter_slowly, slow)
    assert [len(messages) for messages in told] == [1, 0, 0], told
    assert "for rank 2, which has not called it" in told[0][0]


def save_typed_values(folder: str) -> list[str]:
    """Sets whose order in memory differs from rank to rank, and a value that differs."""
    rank = dist.get_rank()
    letters = "abcdefgh" if rank else "hgfedcba"
    same = {"seen": {*letters}, "at": Path("a"), "queue": deque([{"n": {1, 2}}])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(f"{folder}/same", same)
        ckpt.save(f"{folder}/other", {**same, "device": torch.device("cpu", rank)})
        ckpt.save(f"{folder}/own", {**same, f"of {rank}": {rank}})
    return [str(warning.message) for warning in caught]


def test_typed_values_are_compared_between_ranks_by_what_they_are(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    first, second = clusters(2).run(save_typed_values, str(tmp_path))
    assert first == []
    assert len(second) == 1
    assert "'device'" in second[0]
    expected = {"seen": set("abcdefgh"), "at": Path("a"), "queue": deque([{"n": {1, 2}}])}
    assert ckpt.read(tmp_path / "same") == expected
    assert ckpt.read(tmp_path / "other") == {**expected, "device": torch.device("cpu", 0)}
    assert ckpt.read(tmp_path / "own") == {**expected, "of 0": {0}, "of 1": {1}}
