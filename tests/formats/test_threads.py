"""Work that threads do, or the caller where no thread can start."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from threading import Event

import pytest

from formats.storage import Pool


class Threads:
    """Threads of which only the first few can start."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._start = threading.Thread.start

    def start(self, thread: threading.Thread) -> None:
        if not self._left:
            raise RuntimeError("can't start new thread")
        self._left -= 1
        self._start(thread)


@pytest.mark.parametrize("most", [0, 1, 2, 9])
def test_all_work_is_done_once_however_many_threads_can_start(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    threads = Threads(most)
    done: list[int] = []
    gate = Event()

    def work(number: int) -> int:
        if number < most:
            gate.wait(30)  # until all is submitted: the pool wants another thread each time
        done.append(number)
        return -number

    with Pool(4) as pool:
        monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.start(thread))
        futures = [pool.submit(work, number) for number in range(20)]
        monkeypatch.undo()
        gate.set()
        wait(futures, 30)
    assert [future.result() for future in futures] == [-number for number in range(20)]
    assert sorted(done) == list(range(20))


def test_an_error_is_the_futures_wherever_the_work_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pool(1) as pool:
        monkeypatch.setattr(threading.Thread, "start", lambda thread: Threads(0).start(thread))
        future = pool.submit(int, "no number")
        monkeypatch.undo()
        with pytest.raises(ValueError, match="no number"):
            future.result()


def test_work_of_a_pool_that_has_ended_is_done_by_the_caller() -> None:
    pool = Pool(1)
    pool.shutdown()
    assert pool.submit(sum, (1, 2)).result() == 3
