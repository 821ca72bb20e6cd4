"""The future of a background save, by the interface of concurrent.futures."""

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
    """A future that is done once the save is over. A caller that asks for it sees its error."""

    def __init__(self, handle: SaveHandle, metadata: Metadata) -> None:
        super().__init__()
        self.handle = handle
        self._metadata = metadata
        self.set_running_or_notify_cancel()
        handle.when_finished(self._end)

    def result(self, timeout: float | None = None) -> Metadata:
        """Returns the names, shapes and dtypes that were saved; raises the error of the save."""
        try:
            return super().result(timeout)
        finally:
            self._tell()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the error of the save, or None."""
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
    """Returns a future that ends like another, with errors of this package."""
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
