"""The floors of a hand-over: the bytes that a rank needs, moved without a library."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import PROT_READ, mmap

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from live_job import COLUMNS, TENSORS, Job

from ckpt.arguments import workers_for

REQUEST = struct.Struct("<QQ")
"""First byte and number of bytes."""
HASHED_BYTES, COPIED_BYTES = 64 << 10, 512 << 10
"""Of one checksum, and of a copy whose bytes are hashed while they are in the cache."""
MADV_COLLAPSE = 25


class Floors:
    """The floors of one rank. Rank 0 offers the whole state; all ranks make this."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._copies = [one.clone() for one in job.locals]
        self._each = workers_for(job.readers)
        """Threads of a reader, as many as of a load."""
        self._memory = self._listener = None
        found: list[object] = [None, None]
        if job.rank == 0:
            self._memory = os.memfd_create("floor")
            with open(self._memory, "wb", closefd=False) as file:
                for at in range(TENSORS):
                    file.write(torch.full((job.nbytes // TENSORS // 4,), float(at)).numpy())
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            found = [f"/proc/{os.getpid()}/fd/{self._memory}", self._listener.getsockname()]
        dist.broadcast_object_list(found, src=0)
        path, self._where = found
        if not job.is_trainer:
            self._mapped = _mapped(str(path), job.nbytes)

    def copy(self) -> None:
        """The bytes of a reader, from and to warm memory of its own."""
        if not self._job.is_trainer:
            self._copy()

    def copy_part(self) -> None:
        """The bytes of a trainer."""
        if self._job.is_trainer:
            self._copy()

    def _copy(self) -> None:
        for one, copy in zip(self._job.locals, self._copies, strict=True):
            copy.copy_(one)

    def copy_and_hash(self) -> None:
        """The bytes of a reader from mapped memory, each byte of the state hashed by one reader."""
        if not self._job.is_trainer:
            _in_threads(self._copied_and_hashed, self._each)

    def _copied_and_hashed(self, first: int, step: int) -> None:
        job = self._job
        index = job.rank - job.trainers
        for at in range(first, TENSORS, step):
            local, dim = job.locals[at].numpy(), job.dims[at]
            whole = self._mapped[at]
            size = -(-whole.shape[dim] // job.readers)
            here = slice(index * size, index * size + local.shape[dim])
            if dim == 0:
                source, target = _bytes(whole[here]), _bytes(local)
                for lo in range(0, len(target), COPIED_BYTES):
                    part = target[lo : lo + COPIED_BYTES]
                    np.copyto(part, source[lo : lo + COPIED_BYTES])
                    _hash(part)
            else:
                rows = -(-len(whole) // job.readers)
                _hash(_bytes(whole[index * rows : (index + 1) * rows]))
                np.copyto(local, whole[:, here])

    def sendfile(self) -> None:
        """Rank 0 serves each connection from a thread; each reader has as many as a load."""
        if self._job.rank == 0:
            assert self._listener is not None
            threads = []
            for _ in range(self._each * self._job.readers):
                threads.append(threading.Thread(target=self._send, args=self._listener.accept()))
                threads[-1].start()
            for thread in threads:
                thread.join()
        elif not self._job.is_trainer:
            _in_threads(self._receive, self._each)

    def _send(self, connection: socket.socket, _: object) -> None:
        assert self._memory is not None
        with connection:
            while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
                at, left = REQUEST.unpack(request)
                while left:
                    sent = os.sendfile(connection.fileno(), self._memory, at, left)
                    at, left = at + sent, left - sent

    def _receive(self, first: int, step: int) -> None:
        with socket.create_connection(self._where) as connection:  # type: ignore[arg-type]
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for tensor in self._job.locals[first::step]:
                left = memoryview(tensor.reshape(-1).numpy()).cast("B")
                connection.sendall(REQUEST.pack(0, len(left)))
                while left:
                    left = left[connection.recv_into(left) :]


def _in_threads(work: Callable[[int, int], None], count: int) -> None:
    """Runs `work(number, count)` in each of `count` threads."""
    threads = [threading.Thread(target=work, args=(at, count)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _mapped(path: str, nbytes: int) -> Sequence[np.ndarray]:
    """Returns the tensors of a file of memory, mapped, with each page present and huge."""
    descriptor = os.open(path, os.O_RDONLY)
    memory = mmap(descriptor, nbytes, prot=PROT_READ)
    os.close(descriptor)
    with suppress(OSError):  # the system has none
        memory.madvise(MADV_COLLAPSE)
    whole = np.frombuffer(memory, np.float32).reshape(TENSORS, -1, COLUMNS)
    whole.sum()
    return list(whole)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view("u1")


def _hash(array: np.ndarray) -> None:
    data = memoryview(array)
    for at in range(0, len(data), HASHED_BYTES):
        xxhash.xxh3_128_digest(data[at : at + HASHED_BYTES])
