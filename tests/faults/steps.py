"""What a process does to a checkpoint's folder, step by step; and an end at one of the steps.

A step is a system call that changes a folder on disk, or a request that changes a bucket. They are
found by watching `os` and the S3 driver, not by hooks in the product: a step that is new is
seen like the others. `watch` is for a process that exists for one trial.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "CKPT_TEST_STEPS"
"""In the environment of a writer process: how it is watched."""
BY_PATH = ("link", "mkdir", "rename", "replace", "rmdir", "unlink")
BY_DESCRIPTOR = ("fsync", "ftruncate", "pwrite", "write", "writev")
WRITES = ("pwrite", "write", "writev")
READ_ONLY = ("Get", "Head", "List")
"""What the names of requests begin with that change nothing."""


@dataclass(frozen=True)
class Kill:
    """The end of one process, or of all of a job, at one step of one process."""

    role: str
    """`rank0`, or `writer0` for the process that writes for it."""
    step: int
    """Counted from 1."""
    when: str
    """`before` the step, `after` it, or `during` a write, with half of it done."""
    everybody: bool


@dataclass(frozen=True)
class Watching:
    """How one process is watched."""

    role: str
    folder: str
    """Calls on paths below it are steps; for a bucket every request is."""
    log: str
    kill: Kill | None
    group: int
    """The process group of the job."""


def watch(watching: Watching) -> None:
    """From now on steps are written down, and the one that is to be the last is."""
    steps = _Steps(watching)
    for name in BY_PATH:
        setattr(os, name, steps.watched(name, getattr(os, name), steps.is_there))
    for name in BY_DESCRIPTOR:
        setattr(os, name, steps.watched(name, getattr(os, name), steps.is_in_there))
    setattr(os, "open", steps.watched("open", os.open, steps.is_made_there))  # noqa: B010
    setattr(shutil, "_use_fd_functions", False)  # noqa: B010  # by paths that can be told
    if importlib.util.find_spec("aiobotocore") is not None and "://" in watching.folder:
        _watch_requests(steps)


def watch_writer() -> None:
    """The same in a writer process, which its environment tells of it."""
    text = os.environ.get(VARIABLE)
    if text:
        found = json.loads(text)
        kill = found.pop("kill")
        watch(Watching(**found, kill=kill and Kill(**kill)))


def for_writer(watching: Watching) -> str:
    """What the environment of this process's writer says."""
    return json.dumps({**asdict(watching), "role": watching.role.replace("rank", "writer")})


class _Steps:
    def __init__(self, watching: Watching) -> None:
        self._watching = watching
        self._taken = 0
        # Beside what is watched, and by calls that are not.
        self._log = os.open(watching.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write = os.write
        self._readlink = os.readlink

    def begin(self, name: str, detail: str) -> int:
        """The number of a step that is about to be taken."""
        self._taken += 1
        line = f"{self._watching.role} {self._taken} {name} {os.path.basename(detail)}\n"
        self._write(self._log, line.encode())
        self.die(self._taken, "before")
        return self._taken

    def is_last(self, step: int, when: str) -> bool:
        kill = self._watching.kill
        return kill is not None and (kill.role, kill.step, kill.when) == (
            self._watching.role,
            step,
            when,
        )

    def die(self, step: int, when: str) -> None:
        """End here, if this is the last step."""
        if self.is_last(step, when):
            assert self._watching.kill is not None
            if self._watching.kill.everybody:
                os.killpg(self._watching.group, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(
        self, name: str, call: Callable[..., Any], detail: Callable[..., str | None]
    ) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            path = detail(*self.placed(arguments, options.get("dir_fd")))
            if path is None:
                return call(*arguments, **options)
            step = self.begin(name, path)
            if name in WRITES and self.is_last(step, "during"):
                descriptor, data, *_ = arguments
                first = data[0] if isinstance(data, list) else data
                self._write(descriptor, bytes(first)[: len(first) // 2])
                self.die(step, "during")
            result = call(*arguments, **options)
            self.die(step, "after")
            return result

        return instead

    def placed(self, arguments: tuple[Any, ...], folder: int | None) -> tuple[Any, ...]:
        """The arguments with the whole path of a name in an opened folder."""
        if folder is None:
            return arguments
        name, *rest = arguments
        return (os.path.join(self._readlink(f"/proc/self/fd/{folder}"), name), *rest)

    def is_there(self, path: Any, *_: Any) -> str | None:
        text = os.path.abspath(os.fspath(path)) if not isinstance(path, int) else ""
        return text if text.startswith(self._watching.folder) else None

    def is_in_there(self, descriptor: Any, *_: Any) -> str | None:
        if not isinstance(descriptor, int) or descriptor == self._log:
            return None
        try:
            return self.is_there(self._readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            return None

    def is_made_there(self, path: Any, flags: int = 0, *_: Any) -> str | None:
        return self.is_there(path) if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) else None


def _watch_requests(steps: _Steps) -> None:
    from aiobotocore.client import AioBaseClient

    call = AioBaseClient._make_api_call

    async def instead(self: Any, operation: str, parameters: Any) -> Any:
        if operation.startswith(READ_ONLY):
            return await call(self, operation, parameters)
        step = steps.begin(operation, str(parameters.get("Key", "")))
        result = await call(self, operation, parameters)
        steps.die(step, "after")
        return result

    AioBaseClient._make_api_call = instead
