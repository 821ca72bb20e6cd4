"""Timings of saves, loads and other calls, for logs, traces and dashboards.

An *event* is one stage of a call on this rank, or the whole call: its name, its begin and its
duration, the time that the rank waited for others, the bytes of tensors, and an error. Nothing is
measured without a subscriber.

    with ckpt.events.trace("trace-{rank}.json"):
        ckpt.save("runs/step-100", state)

    end = ckpt.events.subscribe(lambda event: print(event.call, event.stage, event.seconds))
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from sharding.agreement.call_events import Event, Requests, observe

__all__ = ["Event", "Requests", "log", "recorded", "subscribe", "trace"]

LOGGER = "ckpt.events"


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Calls `callback` with each event of this process from now on. Returns a function to stop it.

    The callback runs on the thread of the call; a background save has a thread of its own. An error
    in the callback is a warning, and the call goes on.

    >>> import ckpt, tempfile, torch
    >>> found = []
    >>> end = ckpt.events.subscribe(found.append)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(f"{folder}/a", {"w": torch.ones(2)})
    >>> end()
    >>> found[-1].call, found[-1].stage, found[-1].nbytes, found[-1].error
    ('ckpt.save', '', 8, '')
    """
    return observe(callback)


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """Yields a list to which the events of this process are added until the block ends."""
    found: list[Event] = []
    end = observe(found.append)
    try:
        yield found
    finally:
        end()


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes the events of the block to a file that Perfetto and chrome://tracing open.

    A job of several ranks needs a file for each: `{rank}` in the path is this process's rank in the
    first call that is traced. The viewers open several files together; a process of the picture is
    a rank. The file, and its folder, are written when the block ends, also by an error.

    Raises OSError if the file cannot be written.
    """
    rows: list[tuple[int, Event]] = []
    end = observe(lambda event: rows.append((threading.get_ident(), event)))
    try:
        yield
    finally:
        end()
        rank = rows[0][1].rank if rows else 0
        target = Path(os.fspath(path).replace("{rank}", str(rank)))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"traceEvents": list(_rows(rows))}), encoding="utf-8")


def log(level: int = logging.INFO) -> Callable[[], None]:
    """Logs each whole call at `level`, and each stage one level below, to the logger `ckpt.events`.

    The fields of the event are attributes of the record, with the prefix `ckpt_`, so that a
    formatter for JSON has them. Returns a function to stop it. Each `log` writes lines of its own,
    so call it once. Python shows no INFO by default: `logging.basicConfig(level=logging.INFO)`.
    """
    logger = logging.getLogger(LOGGER)

    def tell(event: Event) -> None:
        depth = level if not event.stage else level - 10
        if logger.isEnabledFor(depth):
            fields = {f"ckpt_{name}": value for name, value in asdict(event).items()}
            logger.log(depth, _sentence(event), extra=fields)

    return observe(tell)


def _sentence(event: Event) -> str:
    name = f"{event.call}: {event.stage}" if event.stage else event.call
    took = f"{event.seconds:.3f} s on rank {event.rank} of {event.world_size}"
    ended = f", ended by {event.error}" if event.error else ""
    moved = f", {event.nbytes:,} bytes" if event.nbytes else ""
    waited = f", {event.waited:.3f} s of it for other ranks" if event.waited else ""
    again = f", {event.rereads} reads repeated" if event.rereads else ""
    sent = sum(request.sent for request in event.requests.values())
    repeated = sum(requests.repeated for requests in event.requests.values())
    asked = f", {sent} requests" if sent else ""
    asked += f" of which {repeated} repeat failed ones" if repeated else ""
    return f"{name} took {took}{moved}{waited}{again}{asked}{ended}"


def _rows(rows: list[tuple[int, Event]]) -> Iterator[dict[str, object]]:
    """Yields events of the Trace Event Format: times in microseconds, a process for each rank."""
    for rank in sorted({event.rank for _, event in rows}):
        name = {"name": f"rank {rank}"}
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": name}
    threads: dict[int, int] = {}
    for thread, event in rows:
        yield {
            "ph": "X",
            "pid": event.rank,
            "tid": threads.setdefault(thread, len(threads)),
            "name": event.stage or event.call,
            "cat": event.call,
            "ts": event.began * 1e6,
            "dur": event.seconds * 1e6,
            "args": {
                "bytes": event.nbytes,
                "waited": event.waited,
                "error": event.error,
                **event.numbers(),
            },
        }
