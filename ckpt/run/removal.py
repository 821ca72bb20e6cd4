"""The removal of a run's checkpoints that no rule of a policy keeps, for a run and for `ckpt rm`.

Rules:

1. Newer checkpoints are removed first: a checkpoint before its base.
2. A checkpoint from which another borrows stays, until the other is removed. Of a link to a
   checkpoint of another run only the link is removed.
3. After a failure at one checkpoint, the others are still removed. The first error is raised at the
   end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from warnings import warn

from ckpt.deleting import delete_step
from ckpt.errors import CkptError, InUseError, NotOwnerError, SaveFailedWarning
from ckpt.run.history import run_steps
from ckpt.run.retention import Keep, RunStep, removable
from ckpt.stores.store import Options, join_url


@dataclass(frozen=True, slots=True)
class Removal:
    """One checkpoint that no rule keeps."""

    step: RunStep
    needed_by: str = ""
    """The reason why it stayed; empty if it was removed."""


def removals(
    url: str,
    keep: Keep,
    options: Options,
    *,
    dry_run: bool = False,
    look: Callable[[], object] | None = None,
) -> Iterator[Removal]:
    """Removes checkpoints that no rule keeps, and yields each; with `dry_run`, only yields them.

    One process calls this. Raises StoreError if the store fails. `look` is called directly
    before each removal; its error forbids it.
    """
    failed: Exception | None = None
    gone: set[str] | None = set() if dry_run else None
    for one in removable(run_steps(url, storage_options=options), keep, time.time()):
        place = join_url(url, one.name)
        needed_by = ""
        try:
            delete_step(place, True, options, gone, look)
        except NotOwnerError:
            raise
        except InUseError as error:
            needed_by = str(error).removeprefix(f"{place}: ")
        except (CkptError, OSError) as error:
            failed = failed or error
            continue
        yield Removal(one, needed_by)
    if failed is not None:
        raise failed


class Tidying:
    """Removals in a thread, one after the other, for one rank of a run."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: tuple[str, Exception] | None = None

    def begin(self, url: str, keep: Keep, options: Options, look: Callable[[], object]) -> None:
        """Begins to remove checkpoints that no rule keeps, once the previous removal is over.

        `look` raises NotOwnerError if another job owns the folder.
        """
        self.wait()
        arguments = (url, keep, options, look)
        thread = threading.Thread(target=self._run, args=arguments, name="ckpt-keep", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            self._run(*arguments)
        else:
            self._thread = thread

    def wait(self) -> None:
        """Returns once no removal is under way."""
        if self._thread is not None:
            self._thread.join()

    def tell(self, stacklevel: int) -> None:
        """Warns of a removal that has failed since the last call."""
        failed, self._failed = self._failed, None
        if failed is not None:
            url, error = failed
            more = "" if isinstance(error, NotOwnerError) else "; the next save tries again"
            warn(
                f"{url}: checkpoints that no rule keeps were not removed: "
                f"{type(error).__name__}: {error}{more}",
                SaveFailedWarning,
                stacklevel=stacklevel + 1,
            )

    def _run(self, url: str, keep: Keep, options: Options, look: Callable[[], object]) -> None:
        try:
            for _ in removals(url, keep, options, look=look):
                pass
        except Exception as error:
            self._failed = url, error
