"""Converting workload A, saved by two ranks, to one file: ckpt beside torch DCP and a copy.

    python benchmarks/convert.py --store DIR

The floor copies as many bytes from file to file. Rivals' files are flushed to the disk as ours are.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import dcp
import floor
import measure
import report
import torch
import workload
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt

SAVED_BY = 2
"""Ranks that wrote the checkpoints."""


def _save(store: str, gib: float) -> None:
    training = workload.build(gib)
    ckpt.save(f"{store}/ours", training.state)
    dcp.save(f"{store}/dcp", training.state_dicts())
    floor.write(f"{store}/raw-{torch.distributed.get_rank()}", training.buffers())


def _convert(store: str, rounds: int) -> measure.Samples:
    ours, theirs = f"{store}/ours", f"{store}/dcp"
    safetensors, pt = f"{store}/out.safetensors", f"{store}/out.pt"

    def fresh() -> None:
        for name in os.listdir(store):
            if name.startswith("out"):
                report.remove(f"{store}/{name}")

    def copied() -> None:
        for rank in range(SAVED_BY):
            floor.copy(f"{store}/raw-{rank}", f"{store}/out-{rank}")

    def check_safetensors() -> None:
        with safe_open(safetensors, "pt") as file:
            _check_weight(ours, file.get_tensor("model.norm.weight"))

    def check_pt() -> None:
        loaded = torch.load(pt, weights_only=True, mmap=True)
        _check_weight(ours, loaded["model"]["norm.weight"])

    def contestant(run: Callable[[], object], check: Callable[[], None]) -> measure.Contestant:
        return measure.Contestant(run, fresh, check)

    contestants = {
        report.FLOOR: contestant(copied, fresh),
        "ckpt, to one safetensors file": contestant(
            lambda: ckpt.convert(ours, safetensors, to="safetensors"), check_safetensors
        ),
        "ckpt, to a torch.save file": contestant(
            lambda: ckpt.convert(ours, pt, to="torch"), check_pt
        ),
        "torch DCP, to a torch.save file": contestant(
            lambda: floor.flushed(lambda: dcp_to_torch_save(theirs, pt), pt), check_pt
        ),
        "ckpt, DCP's folder to a torch.save file": contestant(
            lambda: ckpt.convert(theirs, pt, to="torch"), check_pt
        ),
    }
    return measure.interleaved(contestants, rounds)


def _check_weight(ours: str, found: torch.Tensor) -> None:
    with ckpt.open(ours) as checkpoint:
        if not torch.equal(found, checkpoint["model.norm.weight"][:]):
            raise RuntimeError("the converted file has other values than the checkpoint")


def tables(options: report.Options) -> list[report.Table]:
    """One table; converting is the work of one process, whatever the world sizes."""
    with options.folder() as store:
        measure.on_ranks(SAVED_BY, _save, store, options.gib)
        ranks = measure.on_ranks(1, _convert, store, options.rounds)
    rows = report.rows(str(SAVED_BY), measure.joined(ranks), report.write_calls)
    columns = report.columns("saved by", "write calls")
    return [report.Table(f"Convert, {options.gib:g} GiB, {options.where}", columns, rows)]


if __name__ == "__main__":
    report.main(__doc__, tables)
