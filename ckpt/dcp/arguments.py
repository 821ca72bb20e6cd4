"""The arguments of DCP's functions, its errors, and the choice of `ckpt` or torch to serve a call.

`ckpt.save` or `ckpt.load` serves a call if storage and planner are DCP's defaults or ours. With a
user's planner or storage, or a ShardedTensor in parts that no layout describes, torch's own code
runs. Its errors pass through `torch.distributed.checkpoint`, which pickles them between ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.stateful import Stateful

from ckpt.errors import ArgumentError, ArgumentTypeError, CkptError, RankError
from ckpt.state.stateful import by_parameters
from sharding.agreement.ranks import Ranks
from sharding.describe.dtensor import has_layout, is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sharding.agreement.ranks import Group

T = TypeVar("T")
_log = logging.getLogger("ckpt.dcp")


class OfAPath:
    """The part of our storage that knows its place."""

    path: str | None

    @property
    def checkpoint_id(self) -> str:
        """The place that is read or written next. Raises ArgumentError if none was given."""
        if self.path is None:
            raise ArgumentError(f"{type(self).__name__} has no path: pass one, or checkpoint_id=")
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True: every path and URL is valid."""
        return True


def storage_of(
    storage: T | None, kind: type[T], checkpoint_id: str | os.PathLike[str] | None, argument: str
) -> T:
    """Returns the storage of a call; by default a new one of `kind` at `checkpoint_id`.

    Raises ArgumentError if neither argument gives the place of the checkpoint.
    """
    if type(storage) in (FileSystemReader, FileSystemWriter):  # half of the import lines are ckpt's
        _log_torch_s(type(storage).__name__)
    if storage is None:
        if not checkpoint_id:
            raise ArgumentError(f"no checkpoint_id and no {argument}: pass one of the two")
        return kind(checkpoint_id)  # type: ignore[call-arg]
    if isinstance(storage, kind) and checkpoint_id is not None:
        storage.reset(checkpoint_id)  # type: ignore[attr-defined]
    return storage


@cache
def _log_torch_s(name: str) -> None:
    """Logs, once in a process and on rank 0, that torch serves calls with its own storage."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(
            "torch's %s serves this call, with DCP's files: no checksum, no commit, and metadata "
            "in a pickle; import %s from ckpt.dcp for ckpt's files",
            name,
            name,
        )


def is_plain_storage(storage: object, kind: type[T]) -> TypeGuard[T]:
    """Whether a storage is of `kind` and no subclass of the user adds methods, which torch calls.

    >>> from ckpt.dcp import CkptStorageReader
    >>> class Own(CkptStorageReader):
    ...     def read_data(self, plan, planner): ...
    >>> [is_plain_storage(made("x"), CkptStorageReader) for made in (CkptStorageReader, Own)]
    [True, False]
    """
    kinds = type(storage).__mro__
    own = kinds[: kinds.index(kind)] if kind in kinds else ()
    return kind in kinds and all(name.startswith("_") for each in own for name in vars(each))


def is_served(begun: tuple[object, object]) -> bool:
    """Whether `ckpt` serves a call: `begun` has its storage, and its state if that is so."""
    return begun[1] is not None


def check_state(state_dict: object) -> None:
    """Raises ArgumentTypeError unless the state dict is a mapping."""
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(f"state_dict is a {type(state_dict).__name__}; give a dict")


def on_all_ranks(
    name: str, group: Group, action: Callable[[], T], is_served: Callable[[T], bool] = bool
) -> T:
    """Returns the action's result, once the action has succeeded on all ranks, which call this.

    The action runs methods of the user; a failure on one rank is an error on all. Raises
    ArgumentError if `ckpt` serves the call of one rank, and torch the call of another.
    """
    ranks = Ranks(group)
    with ranks.call(name):
        result, records = ranks.run_and_compare(
            name, action, lambda each: {"served": is_served(each)}
        )
    if not records.same["served"]:
        raise ArgumentError(
            f"{name}: the ranks gave planners, stagers or storage of different kinds, and would "
            "wait for one another: give the same on all ranks"
        )
    return result


def group_of(process_group: ProcessGroup | None, no_dist: bool) -> Group:
    """Returns the `group=` of `ckpt.save` and `ckpt.load`."""
    return "self" if no_dist else process_group


def state_of(state_dict: Mapping[str, object], in_order: bool = False) -> dict[str, object]:
    """Returns the state dict with the result of `state_dict()` for each Stateful entry.

    A local state dict of `FullyShardedDataParallel` has its parameters' names. `in_order` takes the
    entries in one order on all ranks, as torch's load does: a `state_dict()` may have collectives.
    """
    named = cast("Mapping[str, object]", by_parameters(cast("Mapping[object, object]", state_dict)))
    if in_order:
        named = {key: named[key] for key in sorted(named, key=str)}
    return {
        key: entry.state_dict() if isinstance(entry, Stateful) else entry
        for key, entry in named.items()
    }


def have_layouts(nest: object) -> bool:
    """Whether each ShardedTensor in a nest has a layout; equal on all ranks, as its metadata is.

    torch's functions plan the parts of others, and our storage writes and reads them.
    """
    left, seen = [nest], set[int]()
    while left:
        node = left.pop()
        if isinstance(node, torch.Tensor):
            if is_sharded(node) and not has_layout(node):
                return False
        elif isinstance(node, Mapping | list | tuple) and id(node) not in seen:
            seen.add(id(node))
            left += node.values() if isinstance(node, Mapping) else node
    return True


def check_coordinator(rank: int) -> None:
    """Raises ArgumentError for another coordinator than rank 0, which commits."""
    if rank != 0:
        raise ArgumentError(f"coordinator_rank is {rank}; rank 0 commits: leave it out")


def given_arguments(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that were given: older versions of torch lack the newer ones."""
    return {name: value for name, value in arguments.items() if value not in (None, False)}


def translate_error(
    error: CheckpointException, group: ProcessGroup | None, no_dist: bool
) -> CkptError:
    """Returns this rank's own error, or a RankError with the text of another rank's error."""
    is_alone = no_dist or not dist.is_initialized()
    rank = 0 if is_alone else dist.get_rank(group)
    failed = error.failures
    own = failed[rank][0] if rank in failed else None
    if isinstance(own, CkptError):
        return own
    first = min(failed)
    cause = failed[first][0]
    return RankError(str(error.args[0]), first, type(cause).__name__, str(cause))


@contextmanager
def translate_errors(group: ProcessGroup | None, no_dist: bool) -> Iterator[None]:
    """Raises errors of this package in the place of torch's CheckpointException in the block."""
    try:
        yield
    except CheckpointException as error:
        raise translate_error(error, group, no_dist) from error
