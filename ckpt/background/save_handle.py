"""What `ckpt.save(..., blocking=False)` returns: how far the save is, and how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from ckpt.display import printable, size
from ckpt.errors import WaitTimeoutError
from sharding.url_secrets import without_secrets

__all__ = ["SaveHandle", "Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A save that went well, as one rank saw it."""

    url: str
    nbytes: int
    """Bytes of tensors that this rank wrote."""
    staged_seconds: float
    """From the call until everything was copied."""
    seconds: float
    """From the call until the checkpoint existed."""


class SaveHandle:
    """A save in the background. All its methods are for the thread that called `ckpt.save`."""

    url: str
    """Where the checkpoint will be."""

    def __init__(self, url: str, nbytes: int, started: float) -> None:
        self.url = url
        self._nbytes = nbytes
        self._started = started
        self._staged_seconds = 0.0
        self._staged = threading.Event()
        self._finished = threading.Event()
        self._progress: Callable[[], int] = lambda: 0
        self._help: Callable[[], None] = lambda: None
        self._error: Exception | None = None
        self._saved: Saved | None = None
        self._is_told = False
        self._lock = threading.Lock()
        self._followers: list[Callable[[Exception | None], None]] = []

    def __repr__(self) -> str:
        return f"<SaveHandle of {printable(without_secrets(self.url))}: {self._state()}>"

    def _repr_html_(self) -> str:
        done, total = self.progress()
        bar = f"<progress value={done} max={max(total, 1)}></progress>"
        return f"{escape(repr(self)[1:-1])} {bar} {size(done)} of {size(total)}"

    def _state(self) -> str:
        if not self.done():
            return "in flight"
        return "failed" if self._error else "done"

    def done(self) -> bool:
        """Whether the save is over, well or not. Never waits, never raises."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint exists, on every rank that waits.

        Raises WaitTimeoutError after `timeout` seconds, the save goes on; and what the save failed
        with, RankError where that was on another rank.
        """
        if not self._finished.wait(timeout):
            done, total = self.progress()
            raise WaitTimeoutError(
                f"{self.url}: the save is not complete after {timeout:g} s; this rank has written "
                f"{done:,} of {total:,} bytes"
            )
        error = self.untold() or self._error
        if error is not None:
            raise error

    def result(self, timeout: float | None = None) -> Saved:
        """As `wait`, and what came of it."""
        self.wait(timeout)
        assert self._saved is not None
        return self._saved

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when everything is copied, and the state may be changed in any way.

        Optimizers in the state wait by themselves before they step. Raises WaitTimeoutError after
        `timeout` seconds. An error of the save is `wait`'s to raise.
        """
        if timeout is None:
            self._help()
        if not self._staged.wait(timeout):
            raise WaitTimeoutError(f"{self.url}: the state is not copied after {timeout:g} s")

    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that this rank has written, and how many it has to write."""
        return self._progress(), self._nbytes

    def finished(self, timeout: float | None = None) -> bool:
        """Whether it is over within so many seconds; tells nobody how it ended."""
        return self._finished.wait(timeout)

    def untold(self) -> Exception | None:
        """The error it ended with, once."""
        told, self._is_told = self._is_told, True
        return None if told else self._error

    def when_finished(self, follow: Callable[[Exception | None], None]) -> None:
        """Call `follow` with the error, or None, once the save is over; tells nobody.

        By the thread that does the save; at once where it is over.
        """
        with self._lock:
            if not self._finished.is_set():
                self._followers.append(follow)
                return
        follow(self._error)

    # What follows is for the thread that does the save.

    def staging(self, help_copying: Callable[[], None]) -> None:
        """From now on whoever waits for the copies can help."""
        self._help = help_copying

    def follow(self, progress: Callable[[], int]) -> None:
        """From now on `progress` knows how many bytes are written."""
        self._progress = progress

    def mark_staged(self) -> None:
        """Everything is copied, or never will be."""
        if self._staged.is_set():
            return
        self._help = lambda: None
        self._staged_seconds = time.perf_counter() - self._started
        self._staged.set()

    def mark_finished(self, error: Exception | None) -> None:
        """The save is over; with `error`, in vain."""
        self.mark_staged()
        written = 0 if error else self._nbytes
        self._progress = lambda: written
        seconds = time.perf_counter() - self._started
        self._error = error
        self._saved = None if error else Saved(self.url, written, self._staged_seconds, seconds)
        with self._lock:
            self._finished.set()
            followers, self._followers = self._followers, []
        for follow in followers:
            follow(error)
