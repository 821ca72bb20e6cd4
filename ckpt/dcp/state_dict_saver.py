"""`save` and `async_save` by the names and arguments of torch.distributed.checkpoint.

`ckpt.save` saves: it plans without collectives and commits atomically. With a user's planner,
torch's function plans and our StorageWriter writes (`ckpt.dcp.arguments`). The future of a
background save has the interface of concurrent.futures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any
from warnings import warn

from torch.distributed.checkpoint import state_dict_saver as _torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from ckpt.dcp.arguments import (
    check_coordinator,
    check_state,
    given_arguments,
    group_of,
    have_layouts,
    is_plain_storage,
    is_served,
    on_all_ranks,
    state_of,
    storage_of,
    translate_error,
    translate_errors,
)
from ckpt.dcp.storage_reader import metadata_of_state
from ckpt.dcp.storage_writer import CkptStorageWriter, check_collectives
from ckpt.saving.background import SaveHandle
from ckpt.saving.save import save as _save

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.state_dict_saver import (
        AsyncCheckpointerType,
        AsyncSaveResponse,
    )

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]

State = Mapping[str, Any]


def save(
    state_dict: State,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Commits a state at `checkpoint_id`; returns its names, shapes and dtypes on every rank.

    docs/dcp.md compares this function with torch's, argument by argument. All ranks of
    `process_group` call this, or with `no_dist=True` one rank alone. An earlier checkpoint at the
    place stays readable until the new one is complete.

    Raises:
        ArgumentError: no place was given, or an argument is not supported.
        StateError: a value cannot be stored without a pickle; the error names its key path.
        RankError: another rank failed; the error names the rank and its error.

    >>> import tempfile, torch
    >>> from ckpt.dcp import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save({"model": {"w": torch.ones(2)}, "step": 1}, checkpoint_id=folder)
    >>> sorted(saved.state_dict_metadata)
    ['model.w', 'step']
    """
    group = group_of(process_group, no_dist)
    begin = partial(_begin, state_dict, storage_writer, checkpoint_id, planner, use_collectives)
    writer, state = on_all_ranks("ckpt.dcp.save", group, begin, is_served)
    if state is not None and isinstance(writer, CkptStorageWriter):
        _save(writer.checkpoint_id, state, group=group, **_ways(writer))
        return metadata_of_state(state)
    arguments = given_arguments(
        storage_writer=writer,
        checkpoint_id=checkpoint_id,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )
    with translate_errors(process_group, no_dist):
        metadata: Metadata = _torch.save(dict(state_dict), **arguments)
        return metadata


def async_save(
    state_dict: State,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType | None = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata] | AsyncSaveResponse:
    """Returns a future of the Metadata that `save` returns; the state may change from now on.

    docs/dcp.md compares this function with torch's. With an `async_stager` that stages in the
    background, returns torch's AsyncSaveResponse with two futures. If a save fails and no caller
    asks its future, the next save raises a BackgroundError. Raises as `save` does.
    """
    group = group_of(process_group, no_dist)
    own = planner if async_stager is None else async_stager
    begin = partial(_begin, state_dict, storage_writer, checkpoint_id, own, use_collectives)
    writer, state = on_all_ranks("ckpt.dcp.async_save", group, begin, is_served)
    if state is not None and isinstance(writer, CkptStorageWriter):
        handle = _save(writer.checkpoint_id, state, group=group, blocking=False, **_ways(writer))
        return SaveFuture(handle, metadata_of_state(state))
    arguments = given_arguments(
        storage_writer=writer,
        checkpoint_id=checkpoint_id,
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
        no_dist=no_dist,
    )
    with translate_errors(process_group, no_dist):
        found = _torch.async_save(dict(state_dict), **arguments)
    if isinstance(found, Future):
        return translate_future(found, process_group, no_dist)
    found.upload_completion = translate_future(found.upload_completion, process_group, no_dist)
    return found


def save_state_dict(
    state_dict: State,
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Calls `save`, which replaces it. Raises ArgumentError for another coordinator than rank 0."""
    warn("save_state_dict is deprecated: call save instead", FutureWarning, stacklevel=2)
    check_coordinator(coordinator_rank)
    return save(
        state_dict,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def _begin(
    state_dict: State,
    own_writer: StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    own: object,
    use_collectives: bool,
) -> tuple[StorageWriter, dict[str, object] | None]:
    """Returns the writer, and the state if `ckpt.save` serves the call.

    `own` is the user's planner or stager; torch serves a call with one. Raises ArgumentError for an
    argument that is not supported.
    """
    check_collectives(use_collectives)
    writer = storage_of(own_writer, CkptStorageWriter, checkpoint_id, "storage_writer")
    check_state(state_dict)
    if not is_plain_storage(writer, CkptStorageWriter):
        return writer, None
    _ = writer.checkpoint_id  # raises if there is none
    if own is not None and type(own) is not DefaultSavePlanner:
        return writer, None
    state = state_of(state_dict)
    return writer, state if have_layouts(state) else None


def _ways(writer: CkptStorageWriter) -> dict[str, Any]:
    """Returns the options of a writer of ours as arguments of `ckpt.save`."""
    return {
        "overwrite": writer.overwrite,
        "compress": writer.compress,
        "metadata": writer.metadata,
        "storage_options": writer.storage_options,
    }


def __getattr__(name: str) -> object:
    return getattr(_torch, name)  # torch 2.6 lacks two names of `__all__`


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


def translate_future(found: Future[Any], group: ProcessGroup | None, no_dist: bool) -> Future[Any]:
    """Returns a future that ends like another, with errors of this package."""
    translated: Future[Any] = Future()
    translated.set_running_or_notify_cancel()

    def end(done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, CheckpointException):
            cause, error = error, translate_error(error, group, no_dist)
            error.__cause__ = cause
        if error is None:
            translated.set_result(done.result())
        else:
            translated.set_exception(error)

    found.add_done_callback(end)
    return translated
