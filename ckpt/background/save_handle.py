"""The handle that `ckpt.save(..., blocking=False)` returns: the progress and result of the save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from ckpt.arguments import Uncopied
from ckpt.display import printable, size
from ckpt.errors import WaitTimeoutError
from sharding.url_secrets import without_secrets

__all__ = ["SaveHandle", "Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """One rank's figures of a successful save."""

    url: str
    nbytes: int
    """Bytes of tensors that this rank wrote."""
    staged_seconds: float
    """The time from the call until everything was copied."""
    seconds: float
    """The time from the call until the checkpoint existed."""


class SaveHandle(Uncopied):
    """A background save. Only the thread that called `ckpt.save` uses the public methods."""

    url: str
    """The URL of the checkpoint."""

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
        """Returns whether the save is over, successful or not. Never waits, never raises."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the checkpoint exists, on every rank that waits.

        Raises WaitTimeoutError after `timeout` seconds, while the save goes on. If the save has
        failed, raises its error; RankError if another rank failed.
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
        """Waits as `wait` does, and returns the figures of the save."""
        self.wait(timeout)
        assert self._saved is not None
        return self._saved

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns once everything is copied, so that the state may change in any way.

        Optimizers in the state wait before their steps without this call. Raises WaitTimeoutError
        after `timeout` seconds. Only `wait` raises an error of the save.
        """
        if timeout is None:
            self._help()
        if not self._staged.wait(timeout):
            raise WaitTimeoutError(f"{self.url}: the state is not copied after {timeout:g} s")

    def progress(self) -> tuple[int, int]:
        """Returns the bytes of tensors that this rank has written, and the bytes of all of them."""
        return self._progress(), self._nbytes

    @property
    def staged_seconds(self) -> float:
        """The time from the call until everything was copied; 0 until then."""
        return self._staged_seconds

    def finished(self, timeout: float | None = None) -> bool:
        """Whether the save is over within so many seconds; its error stays unseen."""
        return self._finished.wait(timeout)

    def untold(self) -> Exception | None:
        """Returns the error of the save, once."""
        told, self._is_told = self._is_told, True
        return None if told else self._error

    def when_finished(self, follow: Callable[[Exception | None], None]) -> None:
        """Calls `follow` with the error, or None, once the save is over; the error stays unseen.

        The save's thread calls `follow`; if the save is over, this thread calls it at once.
        """
        with self._lock:
            if not self._finished.is_set():
                self._followers.append(follow)
                return
        follow(self._error)

    # The methods below are for the save's own thread.

    def staging(self, help_copying: Callable[[], None]) -> None:
        """From now on a thread that waits for the copies helps by `help_copying`."""
        self._help = help_copying

    def follow(self, progress: Callable[[], int]) -> None:
        """From now on `progress` returns the bytes that are written."""
        self._progress = progress

    def mark_staged(self) -> None:
        """Notes that everything is copied, or that the copies have failed."""
        if self._staged.is_set():
            return
        self._help = lambda: None
        self._staged_seconds = time.perf_counter() - self._started
        self._staged.set()

    def mark_finished(self, error: Exception | None) -> None:
        """Notes that the save is over, with its error if it failed."""
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
