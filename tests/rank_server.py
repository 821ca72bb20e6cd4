"""A process that has imported torch and the product, and forks one rank of a cluster after another.

Started by tests/conftest.py as `python rank_server.py SOCKET`. A request is the arguments of
`rank_worker.main` and the environment of the rank; the answer is the process id of the rank. A
fresh interpreter takes seconds of processor time to import the same modules.
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
from multiprocessing.connection import Client, Connection
from types import FrameType

import numpy as np
import torch

from tests import rank_worker

IMPORTED = (
    "ckpt.loading",
    "ckpt.saving",
    "ckpt.state_dict",
    "hypothesis",
    "pytest",
    "sharding.composable",
    "sharding.fsdp2.fully_shard",
    "sharding.fsdp1.wrapper",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""Modules that most tests need and that take long to import."""


def main() -> None:
    """Fork ranks until the connection ends, then wait for all of them to end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that crashes leaves a stack, no file
    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank collects only its own garbage, and shares the rest with this process
    signal.signal(signal.SIGCHLD, _reap)
    with Client(sys.argv[1], family="AF_UNIX") as connection, suppress(EOFError):
        while True:
            arguments, environment = connection.recv()
            connection.send(_fork(connection, arguments, environment))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _fork(connection: Connection, arguments: list[str], environment: dict[str, str]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.close()
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        np.random.seed()
        torch.seed()
        rank_worker.main(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _reap(signal_number: int, frame: FrameType | None) -> None:
    """Wait for the ranks that have ended, so that their processor time counts as this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
