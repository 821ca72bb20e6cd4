"""The future of a save in the background, as concurrent.futures has them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ckpt.background.save_handle import SaveHandle
from ckpt.dcp.torch_errors import translated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SaveFuture(Future[Metadata]):
    """Done when the checkpoint exists, or never will. Whoever asks for its end has been told."""

    def __init__(self, handle: SaveHandle, metadata: Metadata) -> None:
        super().__init__()
        self.handle = handle
        self._metadata = metadata
        self.set_running_or_notify_cancel()
        handle.when_finished(self._end)

    def result(self, timeout: float | None = None) -> Metadata:
        """The names, shapes and dtypes that were saved; raises what the save failed with."""
        try:
            return super().result(timeout)
        finally:
            self._tell()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save failed with, or None."""
        try:
            return super().exception(timeout)
        finally:
            self._tell()

    def _tell(self) -> None:
        if self.done():
            self.handle.untold()

    def _end(self, error: Exception | None) -> None:
        if error is None:
            self.set_result(self._metadata)
        else:
            self.set_exception(error)


def translated_future(found: Future[Any], group: ProcessGroup | None, no_dist: bool) -> Future[Any]:
    """A future with the end of another, its CheckpointException an error of this package."""
    told: Future[Any] = Future()
    told.set_running_or_notify_cancel()

    def end(done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, CheckpointException):
            cause, error = error, translated(error, group, no_dist)
            error.__cause__ = cause
        if error is None:
            told.set_result(done.result())
        else:
            told.set_exception(error)

    found.add_done_callback(end)
    return told
