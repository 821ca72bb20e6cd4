"""What must happen at each fault, one test after the other, from end to end.

The rows are those of the table in docs/reliability.md. Other files of this folder go into each of
them: test_flips.py, test_misplaced.py and the tests of kills.
"""

import errno
import json
import os
import pickle
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from tests import dcp_alone
from tests.conftest import Program, RankDied
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault, Request, Schedule, dead_between, no_faults
from tests.stores.server import Server
from tools.exit_codes import ExitCode
from tools.main import main

SEED = 20268
ROWS = 48
"""Of 4 KiB: three chunks, one and a half on each of two ranks."""
SENTINEL = -5.0
NOBODY = 65534


def state(value: float = 1.0) -> dict[str, Any]:
    """A tensor cut over the ranks, one that all have, a value: the same for any number of them."""
    whole = torch.arange(ROWS * 1024).reshape(ROWS, 1024) / 8 + value
    if not dist.is_initialized():
        return {"cut": whole, "whole": whole[:3] + 1, "step": int(value)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    cut = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    return {"cut": cut, "whole": whole[:3] + 1, "step": int(value)}


def empty() -> dict[str, Any]:
    """A target in which whatever is touched shows."""
    target = state()
    for tensor in local(target).values():
        tensor.fill_(SENTINEL)
    return target


def local(nest: dict[str, Any]) -> dict[str, torch.Tensor]:
    cut = nest["cut"]
    return {"cut": getattr(cut, "to_local", lambda: cut)(), "whole": nest["whole"]}


def touched(target: dict[str, Any]) -> set[str]:
    return {name for name, tensor in local(target).items() if (tensor != SENTINEL).any()}


def is_state(target: dict[str, Any], value: float = 1.0) -> bool:
    wanted = state(value)
    return target["step"] == wanted["step"] and all(
        torch.equal(tensor, local(wanted)[name]) for name, tensor in local(target).items()
    )


def save(folder: str, value: float = 1.0) -> None:
    ckpt.save(folder, state(value), overwrite=True)


End = tuple[str, str, set[str], set[str]]
WELL: End = ("", "", set(), set())


def attempt(
    folder: str, replicas: str = "auto", storage: dict[str, Any] | None = None, **options: Any
) -> End:
    """How a load ends here: the error, its message, what it says it touched, what it did touch.

    No error where it loaded exactly what was saved.
    """
    target = empty()
    try:
        ckpt.load(folder, target, replicas=replicas, storage_options=storage, **options)
    except Exception as error:
        said = set(getattr(error, "touched", ()))
        return type(error).__name__, str(error), said, touched(target)
    return WELL if is_state(target) else ("silently wrong", "", set(), set())


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def foreign(folder: Path, name: str) -> Path:
    """The state in another format, written by the library whose format it is, or converted."""
    target = folder / name
    if name == "dcp":
        dcp_alone.save(state(), target)
    elif name.endswith(".pt"):
        torch.save(state(), target)
    else:
        ckpt.save(folder / "first", state())
        ckpt.convert(folder / "first", target, to="hf", max_shard_bytes=100_000)
    return target


# One random bit flipped in shard data.


@pytest.mark.parametrize("replicas", ["read", "exchange"])
def test_a_flipped_bit_is_an_error_on_all_ranks_that_names_file_tensor_and_bytes(
    clusters: Callable, tmp_path: Path, replicas: str
) -> None:
    ranks = clusters(2)
    ranks.run(save, str(tmp_path))
    chance = random.Random(SEED)
    for trial in range(12):
        file = shards(tmp_path)[trial % 2]
        data = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little")
        at = chance.randrange(header, header + ROWS * 2048)
        flipped = 1 << chance.randrange(8)
        data[at] ^= flipped
        file.write_bytes(data)
        ends = ranks.run(attempt, str(tmp_path), replicas)
        assert {error for error, *_ in ends} <= {"DamagedLoadError", "RankError"}
        for _, message, said, did in ends:
            lo, hi = map(int, re.findall(rf"{file.name}: \w+: bytes (\d+):(\d+)", message)[0])
            assert lo <= at < hi
            assert did <= said
        data[at] ^= flipped
        file.write_bytes(data)
    assert ranks.run(attempt, str(tmp_path)) == [WELL] * 2


# A rank killed (-9) in the middle of saving over an earlier checkpoint.


def save_and_die(folder: str, doomed: int) -> None:
    def progress(nbytes: int) -> None:
        if dist.get_rank() == doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    ckpt.save(folder, state(2), overwrite=True, progress=progress)


@pytest.mark.parametrize("doomed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_killed_while_saving_over_a_checkpoint_leaves_that_and_ends_the_others(
    doomed_cluster: Callable, clusters: Callable, tmp_path: Path, doomed: int
) -> None:
    clusters(2).run(save, str(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RankDied) as died:
        doomed_cluster(2).run(save_and_die, str(tmp_path), doomed)
    assert died.value.dead == [doomed]
    assert list(died.value.errors) == [1 - doomed]
    kind, message, _ = died.value.errors[1 - doomed]
    assert kind == "RankError"
    assert f"rank {doomed}" in message
    assert before.items() <= {p.name: p.read_bytes() for p in tmp_path.iterdir()}.items()
    assert ckpt.verify(tmp_path).sound
    assert clusters(2).run(attempt, str(tmp_path)) == [WELL] * 2


# A shard file deleted.


def test_without_one_of_its_files_a_checkpoint_is_refused_and_no_rank_s_target_touched(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save, str(tmp_path))
    gone = shards(tmp_path)[1]
    gone.unlink()
    for error, message, said, did in clusters(2).run(attempt, str(tmp_path)):
        assert error in ("GoneError", "RankError")
        assert f"{gone}: the file is missing" in message
        assert (said, did) == (set(), set())
    check_refused_by_the_rest(tmp_path, tmp_path / "converted.safetensors")


@pytest.mark.parametrize("name", ["hf", "dcp"])
def test_without_one_of_its_files_a_foreign_checkpoint_is_refused_and_never_read_as_zeros(
    tmp_path: Path, name: str
) -> None:
    folder = foreign(tmp_path, name)
    for gone in sorted([*folder.glob("*.safetensors"), *folder.glob("*.distcp")]):
        data = gone.read_bytes()
        gone.unlink()
        error, message, said, did = attempt(str(folder), exclude="step")
        assert error == "CorruptError"
        assert gone.name in message
        assert (said, did) == (set(), set())
        check_refused_by_the_rest(folder, tmp_path / "converted.safetensors")
        gone.write_bytes(data)
    assert ckpt.load(folder, empty(), exclude="step")["whole"].equal(state()["whole"])


def check_refused_by_the_rest(folder: Path, target: Path) -> None:
    """All that reads a checkpoint says that it is damaged."""
    assert not ckpt.verify(folder).sound
    with pytest.raises(ckpt.CorruptError):
        ckpt.read(folder)
    with pytest.raises(ckpt.CorruptError):
        ckpt.convert(folder, target)
    assert not target.exists()
    with pytest.raises(ckpt.CorruptError):
        ckpt.diff(folder, folder)


# A file truncated, junk appended.


@pytest.mark.parametrize("change", [b"", b"\0", b"junk" * 1000], ids=["cut", "a zero", "junk"])
@pytest.mark.parametrize("name", ["native", "hf", "dcp", "model.pt"])
def test_a_file_that_was_cut_or_goes_on_is_named(tmp_path: Path, name: str, change: bytes) -> None:
    if name == "native":
        folder = tmp_path / "native"
        save(str(folder))
    else:
        folder = foreign(tmp_path, name)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data + change if change else data[: -len(data) // 3])
        report = ckpt.verify(folder)
        assert any(file.name in problem.message for problem in report.problems), file
        error, message, *_ = attempt(str(folder), exclude="step")
        assert error, f"{file}: nobody noticed"
        assert file.name in message
        file.write_bytes(data)
    assert ckpt.verify(folder).sound


class BadSector:
    """`os`, on a disk that cannot read the byte in the middle of one file any more."""

    def __init__(self, file: Path) -> None:
        self._file, self._lost = str(file), file.stat().st_size // 2

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        end = offset + sum(target.nbytes for target in targets)
        is_it = os.readlink(f"/proc/self/fd/{descriptor}") == self._file
        if is_it and offset <= self._lost < end:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, targets, offset)


def test_a_file_that_the_disk_cannot_read_is_damaged_and_gives_way_to_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(str(tmp_path / f"step-{step}"), step)
    (file,) = shards(tmp_path / "step-2")
    monkeypatch.setattr("ckpt.stores.local_store.os", BadSector(file))
    (problem,) = ckpt.verify(tmp_path / "step-2").problems
    assert f"{file}: the disk cannot read all of it: Input/output error" in problem.message
    error, message, said, did = attempt(str(tmp_path / "step-2"))
    assert error == "DamagedLoadError"
    assert str(file) in message
    assert did <= said
    with pytest.warns(ckpt.FallbackWarning, match="step-1 is used"):
        loaded = ckpt.load(tmp_path / "step-2", empty(), fallback=True)
    assert is_state(loaded, 1)


# A malicious pickle as metadata.


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("where", ["model.pt", "old.pt", "dcp", "a value in dcp"])
def test_a_malicious_pickle_is_refused_by_name_and_never_executed(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = tmp_path / "proof"
    evil = pickle.dumps({"x": Malicious(f"touch {proof}")}, 2)
    target = tmp_path / where
    if where == "model.pt":
        torch.save({"w": torch.ones(2), "x": Malicious(f"touch {proof}")}, target)
    elif where == "old.pt":
        target.write_bytes(evil)
    else:
        target = foreign(tmp_path, "dcp")
        metadata = target / ".metadata"
        if where == "dcp":
            metadata.write_bytes(evil)
        else:
            plant(target, Malicious(f"touch {proof}"))
    for read in (
        lambda: ckpt.read(target),
        lambda: ckpt.load(target, {}),
        lambda: ckpt.convert(target, tmp_path / "out.safetensors"),
        lambda: ckpt.diff(target, target),
    ):
        with pytest.raises((ckpt.HostileError, ckpt.NotACheckpointError)) as refused:
            read()
        if where != "old.pt":  # which is refused before its pickle is looked at
            assert "system" in str(refused.value)
    for command in ("verify", "inspect", "ls"):
        code = main([command, str(target)])
        assert code != ExitCode.INTERNAL, capsys.readouterr().err
    assert not proof.exists()
    pickle.loads(evil)
    assert proof.exists(), "the pickle does what it threatens to"


def plant(folder: Path, value: object) -> None:
    """A DCP folder whose stored bytes of `step` are a pickle of `value`."""
    stored = BytesIO()
    torch.save(value, stored)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = [i for i in metadata.storage_data if i.fqn == "step"]
    place = metadata.storage_data[index]
    file = folder / place.relative_path
    data, end = file.read_bytes(), place.offset + place.length
    file.write_bytes(data[: place.offset] + stored.getvalue() + data[end:])
    longer = len(stored.getvalue()) - place.length
    place.length += longer
    for other in metadata.storage_data.values():
        if other.relative_path == place.relative_path and other.offset >= end:
            other.offset += longer
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# A save without collectives at 4 ranks, a load at 2.

ALONE = """
import os, sys, torch, ckpt
whole = torch.arange(400.0).reshape(40, 10)
children = []
for rank in range(4):
    child = os.fork()
    if child == 0:
        try:
            ckpt.save(sys.argv[1], {"w": whole[rank * 10 : rank * 10 + 10], "rank": rank})
        except ckpt.ExistsError:
            os._exit(6)
        os._exit(0)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def load_whole(folder: str) -> tuple[str, bool]:
    target = {"w": torch.zeros(40, 10), "rank": -1}
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(folder, target)
    return str(error.value), not target["w"].any()


@pytest.mark.thorough
def test_processes_that_save_without_a_group_get_one_whole_checkpoint_and_errors(
    clusters: Callable, programs: Callable[..., Program], tmp_path: Path
) -> None:
    """Each is a job of its own to `ckpt`; four quarters never become something that loads."""
    folder = tmp_path / "c"
    ends = json.loads(programs(ALONE, folder).communicate()[0])
    assert sorted(ends) == [0, 6, 6, 6]
    winner = ends.index(0)
    assert ckpt.verify(folder).sound
    found: Any = ckpt.read(folder)
    assert found["rank"] == winner
    assert torch.equal(found["w"], torch.arange(400.0).reshape(40, 10)[winner * 10 :][:10])
    for message, untouched in clusters(2).run(load_whole, str(folder)):
        assert "w: the checkpoint has shape (10, 10), the target has (40, 10)" in message
        assert untouched


# Three asynchronous saves in flight on two ranks.


def save_three(folder: str, when_busy: str) -> list[str]:
    """How each of three saves in the background ended."""
    ends, handles = [], []
    for number in range(3):
        try:
            handles.append(
                ckpt.save(
                    f"{folder}/step-{number}", state(number), blocking=False, when_busy=when_busy
                )
            )
        except ckpt.BusyError:
            ends.append("refused")
    for handle in handles:
        handle.wait(60)
        ends.append("saved")
    return ends


def test_three_saves_in_the_background_are_queued_or_refused_and_never_hang(
    clusters: Callable, tmp_path: Path
) -> None:
    assert clusters(2).run(save_three, str(tmp_path / "wait"), "wait") == [["saved"] * 3] * 2
    for number in range(3):
        assert is_state(ckpt.load(tmp_path / f"wait/step-{number}", empty()), number)
    first, second = clusters(2).run(save_three, str(tmp_path / "refuse"), "refuse")
    assert first == second
    assert first.count("saved") >= 1
    saved = {path.parent.name for path in tmp_path.glob("refuse/*/manifest.json")}
    assert len(saved) == first.count("saved")


# A load that fails half-way.


def load_misfit(folder: str, misfit: int) -> tuple[str, set[str]]:
    target = empty()
    if dist.get_rank() == misfit:
        target["whole"] = torch.full((2, 2), SENTINEL)
    with pytest.raises((ckpt.MismatchError, ckpt.RankError), match="whole") as error:
        ckpt.load(folder, target)
    return type(error.value).__name__, touched(target)


def test_a_load_that_cannot_be_planned_on_one_rank_touches_nothing_on_any(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save, str(tmp_path))
    ends = clusters(2).run(load_misfit, str(tmp_path), 1)
    assert ends == [("RankError", set()), ("MismatchError", set())]


@pytest.mark.parametrize("replicas", ["read", "exchange"])
def test_a_load_that_fails_in_reading_lists_on_each_rank_what_was_touched(
    clusters: Callable, tmp_path: Path, replicas: str
) -> None:
    clusters(2).run(save, str(tmp_path))
    file = shards(tmp_path)[1]
    data = bytearray(file.read_bytes())
    data[-200] ^= 1  # the end of what rank 1 alone needs
    file.write_bytes(data)
    ends = clusters(2).run(attempt, str(tmp_path), replicas)
    assert [error for error, *_ in ends] == ["RankError", "DamagedLoadError"]
    for _, message, said, did in ends:
        assert did <= said
        assert said
        assert all(name in message for name in said)


class Fussy:
    """An object whose own state is refused on one rank."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not today")


def save_fussy(folder: str) -> None:
    ckpt.save(folder, {**state(), "object": Fussy()})


def load_fussy(folder: str) -> tuple[str, set[str], set[str]]:
    target = {**empty(), "object": Fussy()}
    with pytest.raises((ckpt.PartialLoadError, ckpt.RankError), match="not today") as error:
        ckpt.load(folder, target)
    return type(error.value).__name__, set(error.value.touched), touched(target)


def test_an_object_that_refuses_its_state_leaves_a_list_of_what_was_touched_on_each_rank(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save_fussy, str(tmp_path))
    tensors = {"cut", "whole"}
    assert clusters(2).run(load_fussy, str(tmp_path)) == [
        ("RankError", tensors, tensors),
        ("PartialLoadError", tensors, tensors),
    ]


# Disk full, permission lost.


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of so many bytes; skips the test where one may not be made."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"only root may mount a small file system: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def failing(folder: str, blocking: bool) -> tuple[str, str]:
    try:
        handle = ckpt.save(folder, state(2), overwrite=True, blocking=blocking)
        if handle is not None:
            handle.wait(60)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_is_an_error_on_every_rank_and_the_earlier_checkpoint_stays(
    clusters: Callable, tmp_path: Path, blocking: bool
) -> None:
    with small_disk(tmp_path / "disk", 300_000) as disk:
        clusters(2).run(save, str(disk / "c"))
        before = {path.name: path.read_bytes() for path in (disk / "c").iterdir()}
        for error, message in clusters(2).run(failing, str(disk / "c"), blocking):
            assert error in ("OSError", "StoreError", "RankError")
            assert "No space left on device" in message
        after = {path.name: path.read_bytes() for path in (disk / "c").iterdir()}
        assert after == before, "what was half-written is removed"
        assert clusters(2).run(attempt, str(disk / "c")) == [WELL] * 2
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        assert clusters(2).run(failing, str(disk / "c"), blocking) == [("", "")] * 2
        assert is_state(ckpt.load(disk / "c", empty()), 2)


def test_on_a_disk_that_became_read_only_a_save_is_an_error_on_every_rank(
    clusters: Callable, tmp_path: Path
) -> None:
    """As the kernel makes a disk that fails, and for root too."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        clusters(2).run(save, str(disk / "c"))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for error, message in clusters(2).run(failing, str(disk / "c"), True):
            assert error in ("OSError", "StoreError", "RankError")
            assert "Read-only file system" in message
            assert str(disk / "c") in message
        assert clusters(2).run(attempt, str(disk / "c")) == [WELL] * 2
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert clusters(2).run(failing, str(disk / "c"), True) == [("", "")] * 2


@contextmanager
def powerless(folder: Path) -> Iterator[None]:
    """Without root's right to write and read everywhere; the folders above this one are open."""
    for above in folder.parents[:3]:
        above.chmod(0o755)
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)


def test_where_the_permission_to_write_was_lost_the_earlier_checkpoint_stays(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "c"
    save(str(folder))
    folder.chmod(0o555)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with powerless(folder), pytest.raises(PermissionError, match=str(folder)):
        save(str(folder), 2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert attempt(str(folder)) == WELL


def test_a_file_that_may_not_be_read_any_more_is_named_before_the_target_is_touched(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "c"
    save(str(folder))
    (closed,) = shards(folder)
    closed.chmod(0)
    with powerless(folder):
        error, message, said, did = attempt(str(folder))
    assert error == "AccessDeniedError"
    assert str(closed) in message
    assert (said, did) == (set(), set())
    closed.chmod(0o644)
    assert attempt(str(folder)) == WELL


# A store that is down for a while.


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto) as proxy:
        yield proxy


def save_at(url: str, options: dict[str, Any], value: float, deadline: str) -> tuple[str, str]:
    """How a save over what is there ends, when a request is tried for so many seconds."""
    os.environ["CKPT_STORE_DEADLINE"] = deadline
    try:
        ckpt.save(url, state(value), overwrite=True, storage_options=options)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        del os.environ["CKPT_STORE_DEADLINE"]
    return "", ""


def down_for(requests: int) -> Schedule:
    """A store that goes away when the first data come, for so many requests."""
    left = [requests]

    def schedule(request: Request) -> Fault | None:
        if (request.writes_data or left[0] < requests) and left[0]:
            left[0] -= 1
            return Fault.DROP_REQUEST
        return None

    return schedule


@pytest.mark.thorough
def test_a_store_that_is_down_for_a_while_is_waited_for(
    clusters: Callable, proxy: FaultProxy
) -> None:
    url, options = proxy.server.url("while"), dict(proxy.server.options)
    for value in (1, 2):
        proxy.schedule = down_for(6)
        assert clusters(2).run(save_at, url, options, value, "60") == [("", "")] * 2
        assert proxy.faults() == {Fault.DROP_REQUEST}
        proxy.clear()
    proxy.schedule = dead_between(2, 6)
    target = ckpt.load(url, empty(), storage_options=options)
    assert is_state(target, 2)
    assert proxy.faults() == {Fault.DROP_REQUEST}


@pytest.mark.thorough
def test_a_store_that_stays_away_is_an_error_on_every_rank_and_the_earlier_checkpoint_stays(
    clusters: Callable, proxy: FaultProxy
) -> None:
    url, options = proxy.server.url("away"), dict(proxy.server.options)
    assert clusters(2).run(save_at, url, options, 1, "60") == [("", "")] * 2
    proxy.schedule = down_for(1 << 30)
    for error, message in clusters(2).run(save_at, url, options, 2, "1"):
        assert error in ("StoreError", "RankError")
        assert url in message
    proxy.schedule = no_faults
    assert ckpt.verify(url, storage_options=options).sound
    assert clusters(2).run(attempt, url, "auto", options) == [WELL] * 2
    assert clusters(2).run(save_at, url, options, 2, "60") == [("", "")] * 2
    assert is_state(ckpt.load(url, empty(), storage_options=options), 2)
