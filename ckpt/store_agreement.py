"""How ranks agree on the end of a save in the background: over the job's key-value store.

A process group is not to be used from two threads, so nothing here touches one: each rank leaves
its record under a key, rank 0 collects them, decides, and leaves the outcome for all. It is the
store that `init_process_group` met at, and it outlives `destroy_process_group`.

Rules:

1. A rank sends a fixed number of messages, whatever the world size; rank 0 one for each rank more.
2. Everybody waits with a deadline. A rank that does not report until then is named to all.
3. The keys of a save begin with its number, and are deleted when all have read the outcome.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING

from ckpt.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COMMIT_SECONDS = 60.0
"""How much longer than rank 0 the others wait: it has a manifest to write."""
READ_SECONDS = 30.0
"""How long rank 0, where the store may live, stays for the others to read the outcome."""
OUTCOME, READ, ALL_READ = "outcome", "read", "all-read"


@dataclass(frozen=True, slots=True)
class Failure:
    """What all ranks are told of a save that failed."""

    stage: str
    rank: int
    error: str
    message: str

    @classmethod
    def of(cls, stage: str, rank: int, error: BaseException) -> Failure:
        """An exception of this rank, as the others see it."""
        return cls(stage, rank, type(error).__name__, str(error))

    def raised(self) -> RankError:
        """The exception that the others raise."""
        return RankError(self.stage, self.rank, self.error, self.message)


class StoreAgreement:
    """One save's part of the store, as one rank uses it from one thread."""

    def __init__(self, number: int, rank: int, world_size: int, seconds: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._number, self._rank, self._world_size = number, rank, world_size
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self._job_store = _get_default_store()  # on rank 0 its server may live in it

    @cached_property
    def _store(self) -> Store:
        """The save's keys, by a connection of our own: to wait does not stop the training's."""
        from torch._C._distributed_c10d import PrefixStore

        clone = getattr(self._job_store, "clone", None)
        own = self._job_store if clone is None else clone()
        return PrefixStore(f"ckpt/{self._number:016x}", own)

    def report(self, record: bytes, failure: Failure | None) -> None:
        """Leave this rank's record, or why it has none."""
        text = {"record": record.decode(), "failure": failure and asdict(failure)}
        self._store.set(_record_key(self._rank), json.dumps(text))

    def collect(self) -> tuple[list[bytes], Failure | None]:
        """On rank 0: all ranks' records, by rank; or the failure of the lowest that has one."""
        keys = [_record_key(rank) for rank in range(self._world_size)]
        if not self._wait(keys, self._deadline - monotonic()):
            late = next(rank for rank, key in enumerate(keys) if not self._store.check([key]))
            said = f"it has not reported within {self._seconds:g} s"
            return [], Failure("writing", late, "TimeoutError", said)
        found = [json.loads(text) for text in self._all(keys)]
        failures = [Failure(**one["failure"]) for one in found if one["failure"]]
        return [one["record"].encode() for one in found], failures[0] if failures else None

    def publish(self, failure: Failure | None) -> None:
        """On rank 0: tell all others. `leave` comes after it."""
        self._store.set(OUTCOME, json.dumps(failure and asdict(failure)))

    def leave(self) -> None:
        """On rank 0: return when the others have read the outcome, or after READ_SECONDS."""
        if self._wait([ALL_READ], READ_SECONDS):
            for key in (_record_key(0), OUTCOME, READ, ALL_READ):
                self._store.delete_key(key)

    def outcome(self) -> Failure | None:
        """On the other ranks: what rank 0 published. Raises RankError when it does not come."""
        if not self._wait([OUTCOME], self._deadline + COMMIT_SECONDS - monotonic()):
            said = (
                f"it has not said within {self._seconds + COMMIT_SECONDS:g} s how the save ended; "
                "look whether there is a manifest"
            )
            raise RankError("committing", 0, "TimeoutError", said)
        found = json.loads(self._store.get(OUTCOME))
        self._store.delete_key(_record_key(self._rank))
        if self._store.add(READ, 1) == self._world_size - 1:
            self._store.set(ALL_READ, "")
        return Failure(**found) if found else None

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all keys are there within so many seconds; raises when the store is lost."""
        with suppress(RuntimeError):  # its kind differs from store to store
            self._store.wait(list(keys), timedelta(seconds=max(seconds, 0.001)))
            return True
        return bool(self._store.check(list(keys)))

    def _all(self, keys: Sequence[str]) -> list[bytes]:
        has_multi_get = getattr(self._store, "has_extended_api", bool)
        if has_multi_get():
            return list(self._store.multi_get(list(keys)))
        return [self._store.get(key) for key in keys]


def is_possible() -> bool:
    """Whether the default process group has met at a store."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return _get_default_store() is not None
    except (RuntimeError, ValueError):
        return False


def _record_key(rank: int) -> str:
    return f"record-{rank}"
