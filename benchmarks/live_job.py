"""One rank of the trainers and readers of the live benchmarks, and the ways to hand a state over.

Trainers and readers are ranks of one gloo group, so that all ways take turns on the same ranks; no
way but the gather uses that.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckpt

TENSORS, COLUMNS = 48, 1020
RUNTIME = "CKPT_RUNTIME_DIR"


class Job:
    """One rank of the trainers and readers."""

    def __init__(
        self, nbytes: int, trainers: int, readers: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """`nbytes` are those of the state in float32."""
        self.dtype = dtype
        rows = max(12, nbytes // 4 // COLUMNS // TENSORS // 12 * 12)
        self.rank, self.trainers, self.readers = dist.get_rank(), trainers, readers
        self.is_trainer = self.rank < trainers
        members = [list(range(trainers)), list(range(trainers, trainers + readers))]
        groups = [dist.new_group(one) for one in members]
        self.group = groups[0] if self.is_trainer else groups[1]
        self.fan = dist.new_group([0, *members[1]])
        self.shapes = {f"w{at:02}": (rows, COLUMNS) for at in range(TENSORS)}
        self.nbytes = 4 * rows * COLUMNS * TENSORS
        mesh = DeviceMesh.from_group(self.group, "cpu")
        self.state: dict[str, Any] = {}
        # Three readers have every other tensor cut along its columns.
        has_columns = not self.is_trainer and readers == 3
        self.dims = [at % 2 if has_columns else 0 for at in range(TENSORS)]
        for at, (name, shape) in enumerate(self.shapes.items()):
            dim = self.dims[at]
            local = self._part(shape, dim)
            self.state[name] = DTensor.from_local(
                local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=(shape[1], 1)
            )
            if self.is_trainer:
                local.fill_(float(at))
        self.locals = [one.to_local() for one in self.state.values()]
        self.handle: Any = None
        self.live: Any = None
        self.url = ""

    def _part(self, shape: tuple[int, int], dim: int) -> torch.Tensor:
        first = 0 if self.is_trainer else self.trainers
        count = self.trainers if self.is_trainer else self.readers
        sizes = list(shape)
        chunks = torch.empty(shape[dim]).chunk(count)
        sizes[dim] = len(chunks[self.rank - first])
        return torch.zeros(sizes, dtype=self.dtype)

    def open(self) -> None:
        """Publishes the state."""
        if self.is_trainer:
            self.live = ckpt.publish(self.state, "bench", group=self.group)
            self.url = self.live.url
        found = [self.url]
        dist.broadcast_object_list(found, src=0)
        self.url = found[0]

    def close(self) -> None:
        """Ends the live state; readers may still have it."""
        if self.live is not None:
            self.live.close()

    def before(self) -> None:
        """Ends the last update, and gives the readers other bytes than they are to read."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        if not self.is_trainer:
            for one in self.locals:
                one.fill_(-1.0)

    def check(self) -> None:
        """Raises unless each reader has the trainers' bytes."""
        if not self.is_trainer:
            for at, one in enumerate(self.locals):
                assert bool((one == float(at)).all()), at

    def update(self) -> None:
        """Copies the state; `before` waits for the rest."""
        if self.is_trainer:
            self.handle = self.live.update()

    def update_and_load(self) -> None:
        """Hands a new version over."""
        if self.is_trainer:
            self.live.update().wait()
        dist.barrier()
        self.load()

    def load(self, **options: Any) -> None:
        """Loads the newest version."""
        if not self.is_trainer:
            ckpt.load(self.url, self.state, group=self.group, **options)

    def load_over_tcp(self, **options: Any) -> None:
        """A reader that finds no socket of the server is on another host."""
        before = os.environ.get(RUNTIME)
        os.environ[RUNTIME] = f"{tempfile.gettempdir()}/ckpt-elsewhere-{os.getpid()}"
        try:
            self.load(**options)
        finally:
            os.environ.pop(RUNTIME)
            if before is not None:
                os.environ[RUNTIME] = before

    def gather(self) -> None:
        """The way without a library: the whole model on rank 0 and on each reader."""
        whole: dict[str, torch.Tensor] = {}
        if self.is_trainer:
            for name, one in self.state.items():
                full = one.full_tensor()
                if self.rank == 0:
                    whole[name] = full
            if self.rank:
                return
        for name, shape in self.shapes.items():
            if self.rank:
                whole[name] = torch.empty(shape)
            dist.broadcast(whole[name], src=0, group=self.fan)
        if self.rank:
            for name, one in self.state.items():
                dim = one.placements[0].dim
                part = whole[name].chunk(self.readers, dim)[self.rank - self.trainers]
                one.to_local().copy_(part)

    def through_tmpfs(self, folder: str) -> None:
        """Hands the state over by a checkpoint in memory."""
        if self.is_trainer:
            ckpt.save(f"{folder}/ours", self.state, group=self.group, overwrite=True)
        dist.barrier()
        if not self.is_trainer:
            ckpt.load(f"{folder}/ours", self.state, group=self.group)

    def through_dcp(self, folder: str) -> None:
        """Hands the state over by a checkpoint of torch in memory."""
        if self.is_trainer:
            dcp.save(self.state, checkpoint_id=f"{folder}/dcp", process_group=self.group)
        dist.barrier()
        if not self.is_trainer:
            dcp.load(self.state, checkpoint_id=f"{folder}/dcp", process_group=self.group)
