"""One rank of a test cluster: joins a gloo process group and runs the jobs that it receives.

tests/rank_server.py forks a process for it. A job is (file, function name, arguments): the rank
loads the function from its test file and answers with the result, or with the traceback. When all
ranks have answered, each is sent None, and ends the process groups that the job has made.
"""

import faulthandler
import importlib.util
import os
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client
from types import ModuleType

import torch.distributed as dist

import tests.old_torch  # noqa: F401
from tests.kept_groups import end_groups

_modules: dict[str, ModuleType] = {}


def load(file: str) -> ModuleType:
    """The test module in a file, imported once per worker."""
    if file not in _modules:
        spec = importlib.util.spec_from_file_location(f"worker_module_{len(_modules)}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _modules[file] = module
    return _modules[file]


def threads() -> int:
    """How many this process has: every process group that still exists has two or more."""
    return len(os.listdir("/proc/self/task"))


def main(address: str, rank: str, world_size: str, store: str, timeout: str) -> None:
    """Serve jobs until the connection ends."""
    faulthandler.enable()  # a crash in native code leaves a stack
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=float(timeout)),
    )
    with Client(address, family="AF_UNIX") as connection:
        connection.send(int(rank))
        while True:
            job = connection.recv()
            if job is None:
                end_groups()
                continue
            file, name, arguments = job
            before = threads()
            try:
                result = getattr(load(file), name)(*arguments)
                connection.send((True, result, before))
            except BaseException as error:
                told = type(error).__name__, str(error), traceback.format_exc()
                connection.send((False, told, before))
