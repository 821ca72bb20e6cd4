"""A process that has imported torch and the product, and forks ranks of clusters and programs.

Started by tests/conftest.py as `python rank_server.py SOCKET`. A request is the name of a function
of `Server` and its arguments; the answer is what the function returns. A fresh interpreter takes
three seconds of processor time to import the same modules.
"""

import sys

sys.path.pop(0)  # this folder has a `ckpt` of its own: the tests of it

import gc
import importlib
import os
import random
import resource
import signal
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle
from types import FrameType, ModuleType

import numpy as np
import torch

from tests import rank_worker

IMPORTED = (
    "aiobotocore.session",
    "ckpt.loading.load",
    "ckpt.saving.save",
    "ckpt.state_dict",
    "hypothesis",
    "pytest",
    "s3fs",
    "sharding.composable",
    "sharding.fsdp2",
    "sharding.fsdp1.wrapper",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""Modules that most tests need and that take long to import."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a forked process runs as `python -c CODE ARGUMENTS` would."""

    code: str
    arguments: list[str]

    def run(self) -> None:
        """Run the code as the main module; then the interpreter ends as any other.

        The garbage collector passes over all that was there before the code: at the end of an
        interpreter it would copy the memory of every object, which takes a second.
        """
        sys.argv = ["-c", *self.arguments]
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(self.code, "<string>", "exec"), vars(module))  # noqa: S102 - the tests' own


class Server:
    """The parent of ranks and programs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._statuses: dict[int, int] = {}
        """Wait statuses by the process id, of what has ended."""

    def serve(self) -> Program | None:
        """Answer until the connection ends; in a forked child the program that it is to run."""
        signal.signal(signal.SIGCHLD, self._reap)
        while True:
            try:
                name, *arguments = self._connection.recv()
            except EOFError:
                return None
            answer = getattr(self, name)(*arguments)
            if isinstance(answer, Program):
                return answer
            self._connection.send(answer)

    def rank(self, arguments: list[str], environment: dict[str, str]) -> int:
        """The process id of a new rank, which runs `rank_worker.main` with these arguments."""
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            self._be_child(environment)
            rank_worker.main(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def program(
        self, code: str, arguments: list[str], environment: dict[str, str]
    ) -> int | Program:
        """The process id of a new program; in the child the program. Three descriptors follow."""
        streams = [recv_handle(self._connection) for _ in range(3)]
        process = os.fork()
        if not process:
            self._be_child(environment)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        for stream in streams:
            os.close(stream)
        return process or Program(code, arguments)

    def status(self, process: int) -> int:
        """The exit status of a process that has ended, negative for a signal."""
        with suppress(ChildProcessError):
            self._statuses[process] = os.waitpid(process, 0)[1]
        return os.waitstatus_to_exitcode(self._statuses.pop(process))

    def _be_child(self, environment: dict[str, str]) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        np.random.seed()
        torch.seed()

    def _reap(self, signal_number: int, frame: FrameType | None) -> None:
        """Wait for what has ended, so that its processor time counts as this process's."""
        with suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if not process:
                    return
                self._statuses[process] = status


def main() -> None:
    """Serve until the connection ends, then wait for all children; in a child, run its program."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that crashes leaves a stack, no file
    torch.set_num_threads(1)
    for name in IMPORTED:
        if find_spec(name.partition(".")[0]) is not None:  # a machine with a GPU may have few
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank collects only its own garbage, and shares the rest with this process
    connection = Client(sys.argv[1], family="AF_UNIX")
    program = Server(connection).serve()
    if program is not None:
        program.run()
        return
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main()
