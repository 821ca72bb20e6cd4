"""What goes wrong in the background is told to all ranks, once, and costs one checkpoint."""

import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.errors import StoreError
from ckpt.opening import in_flight
from ckpt.saving.arena import Arena
from ckpt.saving.writers import WriterProcess, arena_writer
from ckpt.transfer.write_job import error_message, read_answer
from sharding.agreement.call_events import pause_collection
from tests.ckpt.late_copies import SECONDS, late_copies
from tests.conftest import Program
from tests.selection import slow


def state(numel: int = 500_000) -> dict[str, Any]:
    """A model whose parameters are put off, divided among the ranks when it is saved."""
    torch.manual_seed(1)  # equal on all ranks: what differs is written by rank 0 alone
    model = nn.Linear(numel, 1)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}


def writer() -> int:
    """The writer's process id; it is started if it has not been."""
    return int(import_module("ckpt.saving.writers").arena_writer().writer().process.pid)


def limit_writer(nbytes: int) -> None:
    """From now on this rank's writer can write files of so many bytes and no more."""
    _, hard = resource.prlimit(writer(), resource.RLIMIT_FSIZE)
    resource.prlimit(writer(), resource.RLIMIT_FSIZE, (nbytes, hard))


def said(action: Callable[[], object]) -> str:
    """What an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Errors.


def fail_on_rank_1(folder: str) -> tuple[str, str, str]:
    """Told at `wait`; then at the next save to rank 1, which has not waited; then to nobody."""
    if dist.get_rank() == 1:
        limit_writer(100_000)
    first = ckpt.save(f"{folder}/a", state(), blocking=False)
    at_wait = said(lambda: first.wait(SECONDS))
    second = ckpt.save(f"{folder}/b", state(), blocking=False)
    if dist.get_rank() == 0:
        said(lambda: second.wait(SECONDS))
    at_save = said(lambda: ckpt.save(f"{folder}/c", state(), blocking=False))
    if dist.get_rank() == 1:
        limit_writer(resource.RLIM_INFINITY)
    ckpt.save(f"{folder}/d", state(), blocking=False).wait(SECONDS)
    return at_wait, at_save, str(first)


def test_one_ranks_error_reaches_all_at_wait_or_at_the_next_save(
    clusters: Callable, tmp_path: Path
) -> None:
    (wait0, save0, shown), (wait1, save1, _) = clusters(2).run(fail_on_rank_1, str(tmp_path))
    assert wait0.startswith("RankError: writing failed on rank 1 with StoreError")
    assert wait1.startswith("StoreError: ")
    assert "File too large" in wait0
    assert "File too large" in wait1
    assert save1.startswith(f"BackgroundError: {tmp_path}/b: the save in the background failed")
    assert save0.startswith("RankError: describing the state failed on rank 1 with BackgroundError")
    assert shown == f"<SaveHandle of {tmp_path}/a: failed>"
    for name in "abc":
        assert not (tmp_path / name).exists() or not list((tmp_path / name).iterdir())
    assert not ckpt.verify(tmp_path / "d").problems


def test_an_error_of_the_writer_is_what_the_trainer_raises() -> None:
    for error in (StoreError("s3://b/c/d: the server is away"), OSError("no room")):
        with pytest.raises(StoreError) as raised:
            read_answer(error_message(error), "s3://b/c/d")
        known = "" if isinstance(error, StoreError) else "s3://b/c/d: OSError: "
        assert str(raised.value) == f"{known}{error}"


def test_a_manifest_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "a"
    with late_copies() as go:
        handle = ckpt.save(place, state(10), blocking=False)
        (place / "manifest.json").mkdir(parents=True)
        go.set()
        with pytest.raises(ckpt.ExistsError):
            handle.wait(SECONDS)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_job_does_not_end_the_writer_while_it_starts(number: int) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    writer = WriterProcess(Arena())
    writer.process.send_signal(number)
    writer.close()
    assert writer.process.returncode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_after_an_interrupt_before_the_thread_runs_steps_and_saves_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    given = state()
    given["model"](torch.ones(500_000)).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(tmp_path / "a", given, blocking=False)
    given["optim"].step()
    ckpt.save(tmp_path / "b", given, blocking=False).wait(SECONDS)
    assert not ckpt.verify(tmp_path / "b").problems
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_an_interrupt_while_the_turn_to_save_is_given_back_leaves_it_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, interrupted = in_flight.saves.leave_turn, []

    def leaving(turn: object) -> None:
        if not interrupted:
            interrupted.append(turn)
            raise KeyboardInterrupt
        leave(turn)

    monkeypatch.setattr(in_flight.saves, "leave_turn", leaving)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(tmp_path / "a", {"w": torch.ones(2)}, blocking=False)
    in_flight.saves.wait()
    # Refused, not waited for: where the turn stays taken, to wait takes for ever.
    handle = ckpt.save(tmp_path / "b", {"w": torch.ones(2)}, blocking=False, when_busy="refuse")
    handle.wait(SECONDS)
    assert ckpt.verify(tmp_path / "a").sound


def test_an_interrupt_as_garbage_is_put_off_leaves_it_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disable = gc.disable

    def disabling() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", disabling)
    try:
        with pytest.raises(KeyboardInterrupt), pause_collection():
            raise AssertionError("it was interrupted before")
        assert gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from Python 3.12 on
def test_a_process_that_is_forked_while_a_thread_puts_collection_off_collects_garbage() -> None:
    begun, over = threading.Event(), threading.Event()

    def pause() -> None:
        with pause_collection():
            begun.set()
            over.wait(SECONDS)

    thread = threading.Thread(target=pause)
    thread.start()
    assert begun.wait(SECONDS)
    child = os.fork()
    if not child:
        with pause_collection():
            is_off = not gc.isenabled()
        os._exit(0 if is_off and gc.isenabled() else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_garbage_is_collected_after_the_last_of_two_threads_that_put_it_off() -> None:
    first, second = pause_collection(), pause_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    try:
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_writer_that_is_killed_is_an_error_and_the_next_save_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WriterProcess.write

    def killed_before(self: WriterProcess, *arguments: Any) -> Any:
        self.process.kill()
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(WriterProcess, "write", killed_before)
        handle = ckpt.save(tmp_path, state(), blocking=False)
        with pytest.raises(ckpt.CkptError, match="ended with status -9 before it was done"):
            handle.wait(SECONDS)
    ckpt.save(tmp_path, state(), blocking=False).wait(SECONDS)
    assert not ckpt.verify(tmp_path).problems


def wide_state() -> dict[str, Any]:
    """A model and momenta of several times the memory of `IN_WAVES`, after a step."""
    model = nn.Linear(700, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(700)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


IN_WAVES: Any = {"blocking": False, "host_memory": "1MiB", "overwrite": True}


def test_a_writer_that_is_killed_between_waves_is_an_error_and_holds_no_step(
    tmp_path: Path,
) -> None:
    given = wide_state()
    ckpt.save(tmp_path / "a", given)
    before = ckpt.id(tmp_path / "a").digest
    os.kill(writer(), signal.SIGSTOP)
    handle = ckpt.save(tmp_path / "a", given, **IN_WAVES)
    threading.Timer(0.05, os.kill, (writer(), signal.SIGKILL)).start()
    given["optim"].step()  # waits for the writer
    with pytest.raises(ckpt.CkptError, match="ended with status -9 before it was done"):
        handle.wait(SECONDS)
    assert ckpt.id(tmp_path / "a").digest == before
    ckpt.save(tmp_path / "a", given, **IN_WAVES).wait(SECONDS)
    assert ckpt.id(tmp_path / "a").digest != before


def test_a_store_that_fails_between_waves_is_an_error_and_holds_no_step(tmp_path: Path) -> None:
    given, usual = wide_state(), resource.prlimit(writer(), resource.RLIMIT_FSIZE)
    limit_writer(1_200_000)
    try:
        handle = ckpt.save(tmp_path / "a", given, **IN_WAVES)
        given["optim"].step()
        with pytest.raises(StoreError, match="File too large"):
            handle.wait(SECONDS)
    finally:
        resource.prlimit(writer(), resource.RLIMIT_FSIZE, usual)
    ckpt.save(tmp_path / "b", given, **IN_WAVES).wait(SECONDS)
    assert not ckpt.verify(tmp_path / "b").problems
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system lists no descriptors")
def test_a_writer_that_is_killed_between_two_saves_leaves_no_descriptor(tmp_path: Path) -> None:
    found = []
    for step in range(2):
        ckpt.save(tmp_path / str(step), state(), blocking=False).wait(SECONDS)
        writer = arena_writer().writer()
        writer.process.kill()
        writer.process.wait()
        found.append(len(os.listdir("/proc/self/fd")))
    assert found[0] == found[1]


def test_a_progress_that_raises_fails_one_save_and_not_the_next(tmp_path: Path) -> None:
    def broken(_: int) -> None:
        raise RuntimeError("no terminal")

    weights = {"w": torch.rand(2_000_000)}
    first = ckpt.save(tmp_path / "a", weights, blocking=False, progress=broken)
    assert said(lambda: first.wait(SECONDS)) == "RuntimeError: no terminal"
    assert not (tmp_path / "a").exists()
    ckpt.save(tmp_path / "b", {"w": torch.ones(5)}, blocking=False).wait(SECONDS)
    assert not ckpt.verify(tmp_path / "b").problems


def die_in_the_background(folder: str) -> None:
    with late_copies():
        handle = ckpt.save(folder, state(), blocking=False)
        if dist.get_rank() == 1:
            os._exit(1)
    ended = "RankError: writing failed on rank 1 with ProcessEnded: "
    assert said(lambda: handle.wait(SECONDS)).startswith(ended)


def test_a_rank_that_ends_is_named_at_once(doomed_cluster: Callable, tmp_path: Path) -> None:
    cluster = doomed_cluster(2)
    with pytest.raises(Exception, match=r"ranks \[1\] died; \{\}"):
        cluster.run(die_in_the_background, str(tmp_path))
    assert not list(tmp_path.iterdir())


def report_late(folder: str) -> str:
    """Rank 1 copies after the time is over, when rank 0 has given it up."""
    with late_copies() as go:
        handle = ckpt.save(folder, state(), blocking=False, timeout=1)
        if dist.get_rank() == 0:
            go.set()
            answer = said(lambda: handle.wait(SECONDS))
        dist.barrier()
    return answer if dist.get_rank() == 0 else said(lambda: handle.wait(SECONDS))


def test_a_rank_that_reports_late_fails_the_save(clusters: Callable, tmp_path: Path) -> None:
    rank0, rank1 = clusters(2).run(report_late, str(tmp_path))
    assert rank0 == rank1
    assert "writing failed on rank 1 with TimeoutError: it has not come within 1 s" in rank0
    assert not list(tmp_path.iterdir())
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.read(tmp_path)


# More than one.


def save_two(folder: str, when_busy: Any, held: tuple[int, ...]) -> str:
    """Two saves, of which the first is held back on some ranks."""
    rank = dist.get_rank()
    with late_copies() as go:
        ckpt.save(f"{folder}/1", state(), blocking=False)
        if rank not in held:
            go.set()
        elif when_busy == "wait":
            threading.Timer(0.05, go.set).start()
        answer = said(
            lambda: ckpt.save(f"{folder}/2", state(), blocking=False, when_busy=when_busy)
        )
    ckpt.save(f"{folder}/3", state())
    return answer


@pytest.mark.parametrize("held", [(0,), (1,), (0, 1)])
def test_another_save_waits_or_is_refused_on_all_ranks_alike(
    clusters: Callable, tmp_path: Path, held: tuple[int, ...]
) -> None:
    assert clusters(2).run(save_two, str(tmp_path / "wait"), "wait", held) == ["", ""]
    answers = clusters(2).run(save_two, str(tmp_path / "refuse"), "refuse", held)
    for answer in answers:
        assert answer.startswith("BusyError: ")
        assert f"{tmp_path}/refuse/1 is still being saved" in answer
    for place in ("wait/1", "wait/2", "wait/3", "refuse/1", "refuse/3"):
        assert not ckpt.verify(tmp_path / place).problems
    assert not (tmp_path / "refuse/2").exists()


def save_by_some(folder: str) -> str:
    """A save by rank 0 alone, and one by all while it is in flight."""
    group = dist.new_group([0])
    with late_copies():
        if dist.get_rank() == 0:
            ckpt.save(f"{folder}/0", state(), blocking=False, group=group)
        answer = said(lambda: ckpt.save(f"{folder}/all", state(), when_busy="refuse"))
    ckpt.save(f"{folder}/all", state())
    return answer


def test_a_rank_that_is_busy_with_others_refuses_for_all(
    clusters: Callable, tmp_path: Path
) -> None:
    for answer in clusters(2).run(save_by_some, str(tmp_path)):
        assert answer.startswith("BusyError: ")
    assert not ckpt.verify(tmp_path / "0").problems
    assert not ckpt.verify(tmp_path / "all").problems


def test_only_two_answers_to_being_busy_are_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it can be 'wait' or 'refuse'"):
        ckpt.save(tmp_path, {}, when_busy="queue")  # type: ignore[call-overload]


# The end of processes.

PREAMBLE = """
import os, signal, sys, warnings, ckpt, torch
import torch.distributed as dist
folder = sys.argv[1]
weights = torch.rand(int(os.environ.get("NUMEL", "1_000_000")))
"""


@pytest.fixture
def trainer(programs: Callable[..., Program]) -> Callable[..., Program]:
    """A function that starts a program which saves."""

    def start(body: str, folder: Path, **environment: str) -> Program:
        return programs(PREAMBLE + body, folder, **environment)

    return start


OWN_DRIVER = """
import fsspec
from fsspec.implementations.local import LocalFileSystem
class Own(LocalFileSystem):
    protocol = "own"
fsspec.register_implementation("own", Own)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["", "own://"])
def test_a_normal_exit_finishes_the_save_in_flight(
    trainer: Callable[..., Program], tmp_path: Path, scheme: str
) -> None:
    """By the process, and by a thread where only this program knows the store's driver."""
    body = f"""{OWN_DRIVER}
ckpt.save("{scheme}" + folder, {{"w": weights}}, blocking=False)
sys.exit(3)
"""
    program = trainer(body, tmp_path)
    assert program.communicate(timeout=SECONDS) == ("", "")
    assert program.returncode == 3
    assert not ckpt.verify(tmp_path).problems


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["", "own://"])
def test_a_save_while_the_interpreter_ends_is_finished_in_the_call(
    trainer: Callable[..., Program], tmp_path: Path, scheme: str
) -> None:
    body = f"""{OWN_DRIVER}
import atexit
atexit.register(lambda: ckpt.save("{scheme}" + folder, {{"w": weights}}, blocking=False).wait(0))
"""
    assert trainer(body, tmp_path).communicate(timeout=SECONDS) == ("", "")
    assert not ckpt.verify(tmp_path).problems


def test_an_exit_after_a_failed_save_says_so(
    trainer: Callable[..., Program], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    program = trainer('ckpt.save(folder + "/file/x", {"w": weights}, blocking=False)', tmp_path)
    out, error = program.communicate(timeout=SECONDS)
    assert (out, program.returncode) == ("", 0)
    assert error.startswith(
        f"ckpt: {tmp_path}/file/x: the save in the background failed, there is no new checkpoint: "
        "StoreError: "
    )


def test_an_error_that_was_told_is_not_told_again_at_exit(
    trainer: Callable[..., Program], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    body = """
handle = ckpt.save(folder + "/file/x", {"w": weights}, blocking=False)
try:
    handle.wait(60)
except ckpt.CkptError:
    pass
"""
    assert trainer(body, tmp_path).communicate(timeout=SECONDS) == ("", "")


@pytest.mark.parametrize(
    ("numel", "how"),
    [("4_000_000", "compress=True"), ("300_000", 'host_memory="1MiB"')],
    ids=["copied", "in waves"],
)
def test_a_killed_trainer_loses_only_the_checkpoint_in_flight(
    trainer: Callable[..., Program], tmp_path: Path, numel: str, how: str
) -> None:
    body = f"""
from ckpt.saving.writers import arena_writer
ckpt.save(folder + "/1", {{"w": weights[:10]}}, blocking=False).wait(60)
print(arena_writer().writer().process.pid, flush=True)
input()
optimizer = torch.optim.SGD([weights, weights + 1, weights + 2])
def die(written):
    os.kill(os.getpid(), signal.SIGKILL)  # called before the manifest is written
state = {{"w": optimizer.param_groups[0]["params"], "o": optimizer}}
ckpt.save(folder + "/2", state, blocking=False, {how}, progress=die).wait(60)
"""
    program = trainer(body, tmp_path, NUMEL=numel)
    its_writer = os.pidfd_open(int(program.stdout.readline()))
    try:
        program.communicate("\n", timeout=SECONDS)
        assert program.returncode == -signal.SIGKILL
        ended = select.poll()
        ended.register(its_writer, select.POLLIN)
        assert ended.poll(1000 * SECONDS)
    finally:
        os.close(its_writer)
    assert not list((tmp_path / "2").glob(".*"))
    assert not (tmp_path / "2" / "manifest.json").exists()
    assert not ckpt.verify(tmp_path / "1").problems
    ckpt.save(tmp_path / "2", {"w": torch.ones(3)})
    assert not ckpt.verify(tmp_path / "2").problems


@pytest.mark.thorough
def test_a_forked_child_has_no_save_to_finish(
    trainer: Callable[..., Program], tmp_path: Path
) -> None:
    body = """
handle = ckpt.save(folder + "/1", {"w": weights}, blocking=False)
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
child = os.fork()
if not child:
    ckpt.save(folder + "/child", {"w": weights + 1}, blocking=False)
    sys.exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
handle.wait(60)
torch.save(weights, folder + "/weights.pt")
"""
    assert trainer(body, tmp_path).communicate(timeout=SECONDS) == ("4\n", "")
    weights = torch.load(tmp_path / "weights.pt")
    for place, expected in (("1", weights), ("child", weights + 1)):
        found: Any = ckpt.read(tmp_path / place)
        assert found["w"].equal(expected)


def test_a_forked_child_trains_without_the_copies_of_its_parent(
    trainer: Callable[..., Program], tmp_path: Path
) -> None:
    body = """
from tests.ckpt.late_copies import late_copies
model = torch.nn.Linear(300, 300)
optim = torch.optim.SGD(model.parameters(), lr=1.0)
before = model.weight.detach().clone()
with late_copies() as go:
    state = {"model": model, "optim": optim}
    handle = ckpt.save(folder, state, blocking=False, staging="overlapped")
    warnings.simplefilter("ignore", DeprecationWarning)  # as above
    child = os.fork()
    if not child:
        signal.alarm(30)
        model(torch.ones(300)).sum().backward()
        optim.step()
        os._exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    go.set()
    handle.wait(60)
print(ckpt.read(folder)["model"]["weight"].equal(before))
"""
    assert trainer(body, tmp_path).communicate(timeout=SECONDS) == ("5\nTrue\n", "")


@pytest.mark.wide
@pytest.mark.thorough
@pytest.mark.costly
@pytest.mark.parametrize("method", ["tcp", "file"])
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_leave_right_after_the_call_leave_a_checkpoint(
    trainer: Callable[..., Program], tmp_path: Path, method: str, first: int
) -> None:
    """The store may live in rank 0's process, which stays until the others know how it ended."""
    body = f"""
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=os.environ["WHERE"], rank=rank, world_size=2)
ckpt.save(folder + "/checkpoint", {{"w": torch.arange(1e6)}}, blocking=False)
dist.destroy_process_group()
if rank != {first}:
    input()
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = f"tcp://127.0.0.1:{port}" if method == "tcp" else f"file://{tmp_path}/store"
    programs = [trainer(body, tmp_path, RANK=str(rank), WHERE=where) for rank in range(2)]
    said = {first: programs[first].communicate(timeout=SECONDS)}
    said[1 - first] = programs[1 - first].communicate("\n", timeout=SECONDS)
    assert [program.returncode for program in programs] == [0, 0], said
    assert not ckpt.verify(tmp_path / "checkpoint").problems
    assert ckpt.read(tmp_path / "checkpoint")["w"].equal(torch.arange(1e6))  # type: ignore[index]


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [slow((0,)), slow((1,)), (0, 1, 2)])
def test_a_trainer_without_standard_streams_saves_in_the_background(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    program = (
        "import os, sys\n"
        f"for one in {closed}: os.close(one)\n"
        "import ckpt, torch\n"
        "ckpt.save(sys.argv[1], {'w': torch.ones(9)}, blocking=False).wait(60)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert ckpt.verify(tmp_path).sound


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, blocking: bool) -> None:
    def save() -> None:
        handle = ckpt.save(tmp_path, {"w": torch.ones(9999)}, blocking=blocking)
        assert handle is not None
        handle.wait(SECONDS)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if not blocking:
        limit_writer(4096)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if blocking else soft, hard))
    try:
        with pytest.raises((OSError, StoreError), match=rf"{tmp_path}/.*\.safetensors"):
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        if not blocking:
            limit_writer(hard)
    assert not list(tmp_path.iterdir())
