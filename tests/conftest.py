"""Real process groups for tests: one set of processes per world size, started once and reused.

A program whose start or end is not what a test is about runs in a forked process (`programs`).

Real servers come from `tests/stores/fixtures.py`.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import settings

import tests.old_torch  # noqa: F401
from tests import selection
from tests.garbage import collect_garbage
from tests.selection import covering, pairs, quick, values_of
from tests.stores.fixtures import azurite_server, gcs_server, moto, radosgw_server, servers

__all__ = ["azurite_server", "gcs_server", "moto", "radosgw_server", "servers"]

SERVER = Path(__file__).parent / "rank_server.py"
START_SECONDS = 120
JOB_SECONDS = 120
MOST_THREADS = 40
"""Of a rank; a cluster whose ranks have more is not used for another test."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
"""Of every rank, beside the environment of the tests."""
ON_RANKS = {"clusters", "doomed_cluster"}
"""Fixtures whose tests are divided into those of `make test`, `make test-all` and the slow ones."""
HASH_SEEDS = "CKPT_TESTS_HASH_SEEDS"
"""A variable of the environment: tests/mutations.py saves a server."""
GROUP_SECONDS = 60
"""How long a collective waits for a rank that never comes."""


class RankFailed(Exception):
    """A function raised on some ranks: `errors` has (class name, message, traceback) by rank."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {e[2]}" for rank, e in errors.items()))


class RankDied(Exception):
    """A rank's process ended in the middle of a job; `errors` has what the others raised."""

    def __init__(self, dead: list[int], errors: dict[int, tuple[str, str, str]]) -> None:
        self.dead, self.errors = dead, errors
        super().__init__(f"ranks {dead} died; {errors}")


class RankServer:
    """A process that forks ranks; its seed decides the order of sets in all of them."""

    def __init__(self, hash_seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rank-server-")
        address = f"{self._folder.name}/socket"
        listener = Listener(address, family="AF_UNIX")
        listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": str(hash_seed)}
        self._process = subprocess.Popen([sys.executable, str(SERVER), address], env=environment)
        self._connection = listener.accept()
        listener.close()

    def fork(self, *arguments: object) -> "RankProcess":
        """A new rank, which runs `rank_worker.main` with these arguments."""
        environment = {**os.environ, **ENVIRONMENT}
        self._connection.send(("rank", [str(each) for each in arguments], environment))
        return RankProcess(self._connection.recv())

    def program(self, code: str, *arguments: object, **environment: str) -> "Program":
        """A new process, which runs what `python -c CODE ARGUMENTS` would, all imported before."""
        pipes = [os.pipe() for _ in range(3)]
        ends = [pipes[0][0], pipes[1][1], pipes[2][1]]
        told = {**os.environ, **ENVIRONMENT, **environment}
        self._connection.send(("program", code, [str(each) for each in arguments], told))
        for end in ends:
            send_handle(self._connection, end, self._process.pid)
            os.close(end)
        return Program(self, self._connection.recv(), pipes[0][1], pipes[1][0], pipes[2][0])

    def status(self, process: int) -> int:
        """The exit status of a process that has ended, negative for a signal."""
        self._connection.send(("status", process))
        return int(self._connection.recv())

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
        self._folder.cleanup()


class RankProcess:
    """A process that the server has forked, by a descriptor that stays with this very process."""

    def __init__(self, process: int) -> None:
        self.pid = process
        self._file = open(os.pidfd_open(process), "rb", buffering=0)  # noqa: SIM115

    def poll(self) -> bool:
        """Whether the process has ended."""
        return self._file.closed or bool(wait([self._file], 0))

    def end(self) -> None:
        """Kill the process if it runs, and return when it has ended."""
        if self._file.closed:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file.fileno(), signal.SIGKILL)
        wait([self._file])
        self._file.close()


class Program(RankProcess):
    """A forked program with pipes; used as `subprocess.Popen` with `text=True` is."""

    def __init__(self, server: RankServer, process: int, *pipes: int) -> None:
        super().__init__(process)
        self._server = server
        self.stdin = open(pipes[0], "w")  # noqa: SIM115
        self.stdout, self.stderr = (open(pipe) for pipe in pipes[1:])  # noqa: SIM115
        self.returncode: int | None = None

    def communicate(self, text: str = "", timeout: float = JOB_SECONDS) -> tuple[str, str]:
        """All that the program writes, until it has ended. Raises TimeoutError."""
        read = ["", ""]

        def collect(index: int, stream: IO[str]) -> None:
            read[index] = stream.read()

        threads = [
            threading.Thread(target=collect, args=each)
            for each in enumerate((self.stdout, self.stderr))
        ]
        for thread in threads:
            thread.start()
        with suppress(BrokenPipeError):
            self.stdin.write(text)
        with suppress(BrokenPipeError):
            self.stdin.close()
        is_over = bool(wait([self._file], timeout))
        if not is_over:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file.fileno(), signal.SIGKILL)
        for thread in threads:
            thread.join(timeout)
        if not is_over or any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"the program did not end in {timeout} s: {read}")
        self.returncode = self._server.status(self.pid)
        for file in (self.stdout, self.stderr, self._file):
            file.close()
        return read[0], read[1]


class Cluster:
    """Processes that form one gloo process group and run functions of test files together."""

    def __init__(
        self,
        servers: Sequence[RankServer],
        world_size: int,
        group_seconds: float = GROUP_SECONDS,
    ) -> None:
        self.world_size = world_size
        self.threads = 0
        """The most that a rank has had before a job."""
        self._folder = tempfile.TemporaryDirectory(prefix="cluster-")
        address = f"{self._folder.name}/socket"
        listener = Listener(address, family="AF_UNIX")
        store = f"{self._folder.name}/store"
        self.processes = [
            servers[rank % len(servers)].fork(address, rank, world_size, store, group_seconds)
            for rank in range(world_size)
        ]
        listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
        connections = [listener.accept() for _ in range(world_size)]
        self._connections: dict[int, Connection] = {c.recv(): c for c in connections}
        listener.close()

    @property
    def alive(self) -> bool:
        return not any(process.poll() for process in self.processes)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank. Raises RankFailed, RankDied or TimeoutError."""
        for connection in self._connections.values():
            connection.send((function.__code__.co_filename, function.__name__, arguments))
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str, str]] = {}
        dead: list[int] = []
        waiting = dict(self._connections)
        while waiting:
            ready = wait(list(waiting.values()), timeout=JOB_SECONDS)
            if not ready:
                self.close()
                ended = f"; {dead} had ended" if dead else ""
                raise TimeoutError(
                    f"ranks {sorted(waiting)} did not answer in {JOB_SECONDS} s{ended}"
                )
            for rank in [rank for rank, c in waiting.items() if c in ready]:
                try:
                    succeeded, answer, threads = waiting.pop(rank).recv()
                    self.threads = max(self.threads, threads)
                except (EOFError, ConnectionResetError):
                    dead.append(rank)
                    continue
                (results if succeeded else errors)[rank] = answer
        if dead:
            raise RankDied(dead, errors)
        for connection in self._connections.values():
            connection.send(None)
        if errors:
            lost = any("gloo" in e[1] or "pair closure" in e[1] for e in errors.values())
            # The others' messages to those that failed have broken the group, or time-outs have.
            if len(errors) < self.world_size or lost:
                self.close()
            raise RankFailed(errors)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.end()
        for connection in self._connections.values():
            connection.close()
        self._folder.cleanup()


_running: dict[int, Cluster] = {}
"""By world size: shared by all tests."""


@pytest.fixture(scope="session")
def rank_servers() -> Iterator[list[RankServer]]:
    """The processes from which all ranks are forked.

    There are two, because the order of a set differs between ranks that a user starts.
    """
    servers = [RankServer(int(seed)) for seed in os.environ.get(HASH_SEEDS, "1 2").split()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def programs(rank_servers: list[RankServer]) -> Callable[..., Program]:
    """A function like `RankServer.program`: from code, arguments and environment to a program."""
    return rank_servers[0].program


@pytest.fixture(scope="session")
def clusters(rank_servers: list[RankServer]) -> Iterator[Callable[[int], Cluster]]:
    """A function from a world size to a running cluster of that size, shared by all tests."""

    def cluster(world_size: int) -> Cluster:
        if world_size not in _running or not _running[world_size].alive:
            if world_size in _running:
                _running[world_size].close()
            _running[world_size] = Cluster(rank_servers, world_size)
        return _running[world_size]

    yield cluster
    for world_size in tuple(_running):
        _running.pop(world_size).close()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give properties fewer examples in `make test`: see tests/selection.py."""
    gc.disable()  # until all is collected: nearly nothing of it is garbage
    selection.is_quick = "not thorough" in config.option.markexpr
    if selection.is_quick:
        full = settings.get_profile("ci")
        settings.register_profile("quick", full, max_examples=selection.examples(100))
        settings.load_profile("quick")


def pytest_unconfigure() -> None:
    """Let the five passes of pytest's own over all garbage be short: the first is this one."""
    collect_garbage()


def pytest_sessionfinish() -> None:
    """Let an error after the last test be legible: each process group of torch adds a prefix."""
    sys.excepthook = sys.__excepthook__


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the run has cost: the processes that it has started are over."""
    spent = os.times()
    user, system = spent.user + spent.children_user, spent.system + spent.children_system
    terminalreporter.write_line(
        f"processor time: {user + system:.0f} s ({user:.0f} s user, {system:.0f} s system), of "
        "this process and all that it has started"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `make test` and `make test-all` leave out: see tests/selection.py."""
    functions: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        is_costly = ON_RANKS & {*item.fixturenames} or any(
            item.get_closest_marker(name) for name in ("costly", "wide")
        )
        by_hand = {mark.name for mark in item.callspec.marks}
        if is_costly and not {"slow", "thorough"} & by_hand:
            functions.setdefault((item.path, item.originalname), []).append(item)
    for (_, name), cases in functions.items():
        told = [{key: repr(value) for key, value in c.callspec.params.items()} for c in cases]
        is_wide = cases[0].get_closest_marker("wide") is not None
        in_quick = quick(told, name)
        if is_wide:
            in_all = covering(told, name, values_of(told), beside=in_quick)
        else:
            in_all = pairs(told, name)
        for index, case in enumerate(cases):
            if index not in in_all:
                case.add_marker(pytest.mark.slow)
            elif index not in in_quick:
                case.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over all that is there now: it costs a second each time."""
    gc.enable()
    collect_garbage()


def pytest_runtest_logfinish() -> None:
    """End the clusters whose ranks keep many threads: something still refers to their groups."""
    for world_size, cluster in tuple(_running.items()):
        if cluster.threads > MOST_THREADS:
            _running.pop(world_size).close()


@pytest.fixture
def doomed_cluster(rank_servers: list[RankServer]) -> Iterator[Callable[[int], Cluster]]:
    """A function that starts a cluster for one test, to be killed in."""
    started: list[Cluster] = []

    def cluster(world_size: int) -> Cluster:
        started.append(Cluster(rank_servers, world_size, group_seconds=20))
        return started[-1]

    yield cluster
    for cluster_ in started:
        cluster_.close()
