"""Loading a Hugging Face folder into a CPU model: ckpt beside safetensors and two streamers.

    python benchmarks/weights.py --store DIR
    python benchmarks/weights.py --store DIR --s3

The model is that of workload A, with a third of its bytes, in shards of 200 MB. With several ranks
it is sharded by FSDP2; a rank needs its rows. The floor reads as many bytes into the same memory,
or over HTTP from the server. safetensors and fastsafetensors read no S3: files are downloaded.
runai-model-streamer and fastsafetensors (`pip install runai-model-streamer[s3] fastsafetensors`)
are left out where they are not installed.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import floor
import measure
import object_store
import report
import torch
import torch.distributed as dist
import workload
from safetensors import safe_open
from safetensors.torch import load_file

import ckpt

if TYPE_CHECKING:
    from tests.stores.server import Server

SHARD_BYTES = 200_000_000
S3_GIB = 0.5
"""The largest state on the server, which may keep it in memory."""
Rows = dict[str, tuple[torch.Tensor, int]]
"""By name: this rank's rows of a parameter, and the number of the first one."""


def _save(store: str, gib: float) -> None:
    training = workload.build(gib)
    ckpt.save(f"{store}/ours", {"model": training.model})
    ckpt.convert(
        f"{store}/ours", f"{store}/hf", to="hf", select="model", max_shard_bytes=SHARD_BYTES
    )


def _rows_of(model: torch.nn.Module) -> Rows:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // world_size)
        found[name] = (workload.local(parameter), min(rank * rows, parameter.shape[0]))
    return found


def _copy(rows: Rows, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        target, lo = rows[name]
        target.copy_(tensor[lo : lo + target.shape[0]])


def _by_slices(rows: Rows, paths: list[str]) -> None:
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                target, lo = rows[name]
                target.copy_(file.get_slice(name)[lo : lo + target.shape[0]])


def _by_runai(rows: Rows, paths: list[str]) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        _copy(rows, streamer.get_tensors())


def _by_fastsafetensors(rows: Rows, paths: list[str]) -> None:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: paths})
    buffers = loader.copy_files_to_device()
    try:
        _copy(rows, ((name, buffers.get_tensor(name)) for name in buffers.key_to_rank_lidx))
    finally:
        buffers.close()
        loader.close()


def _load(store: str, gib: float, rounds: int) -> measure.Samples:
    training = workload.build(gib)
    model, rows = training.model, _rows_of(training.model)
    folder = f"{store}/hf"
    paths = sorted(glob.glob(f"{folder}/*.safetensors"))
    raw = f"{store}/raw-{dist.get_rank()}"
    buffers = [
        memoryview(target.reshape(-1).view(torch.uint8).numpy())
        for target, _ in rows.values()
        if target.numel()
    ]
    ckpt.load(folder, model)
    floor.write(raw, buffers)
    expected = [bytes(buffer[:4096]) for buffer in buffers]

    def clear() -> None:
        for target, _ in rows.values():
            target.zero_()

    def check() -> None:
        if [bytes(buffer[:4096]) for buffer in buffers] != expected:
            raise RuntimeError("a loaded tensor is not the one that was saved")

    def contestant(run: Callable[[], object]) -> measure.Contestant:
        return measure.Contestant(run, clear, check)

    found = {
        report.FLOOR: contestant(lambda: floor.read(raw, buffers)),
        "ckpt": contestant(lambda: ckpt.load(folder, model)),
        "safetensors, load_file and copy": contestant(
            lambda: [_copy(rows, iter(load_file(path).items())) for path in paths]
        ),
        "safetensors, get_slice and copy": contestant(lambda: _by_slices(rows, paths)),
    }
    if find_spec("runai_model_streamer"):
        found["runai-model-streamer"] = contestant(lambda: _by_runai(rows, paths))
    if find_spec("fastsafetensors"):
        found["fastsafetensors"] = contestant(lambda: _by_fastsafetensors(rows, paths))
    with torch.no_grad():
        return measure.interleaved(found, rounds)


def _save_to_s3(server: Server, gib: float) -> None:
    training = workload.build(gib)
    options = dict(server.options)
    ckpt.save(server.url("ours"), {"model": training.model}, storage_options=options)
    to_hf = {"to": "hf", "select": "model", "max_shard_bytes": SHARD_BYTES}
    ckpt.convert(server.url("ours"), server.url("hf"), storage_options=options, **to_hf)


def _load_from_s3(server: Server, gib: float, rounds: int) -> measure.Samples:
    """The floor is what s3fs takes for a rank's share of the bytes, in ranges."""
    training = workload.build(gib)
    rows, rank, world_size = _rows_of(training.model), dist.get_rank(), dist.get_world_size()
    options = dict(server.options)
    fs = object_store.driver(options)
    files = [found for found in fs.ls(f"{server.bucket}/hf") if found.endswith(".safetensors")]
    sizes = [fs.info(file)["size"] for file in files]
    os.environ.update(server.environment)
    os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    url = server.url("hf")
    ckpt.load(url, training.model, storage_options=options)
    expected = training.digest()

    def check() -> None:
        if training.digest() != expected:
            raise RuntimeError("what was loaded is not what was saved")

    def clear() -> None:
        for target, _ in rows.values():
            target.zero_()

    def contestant(run: Callable[[], object]) -> measure.Contestant:
        return measure.Contestant(run, clear, check)

    def read() -> None:
        for file, size in zip(files, sizes, strict=True):
            lo, hi = (size * at // world_size for at in (rank, rank + 1))
            starts = list(range(lo, hi, object_store.PIECE_BYTES))
            ends = [min(start + object_store.PIECE_BYTES, hi) for start in starts]
            fs.cat_ranges([file] * len(starts), starts, ends)

    def downloaded() -> None:
        with TemporaryDirectory(dir="/dev/shm") as folder:
            paths = [f"{folder}/{at}.safetensors" for at in range(len(files))]
            fs.get(files, paths)
            for path in paths:
                _copy(rows, iter(load_file(path).items()))

    found = {
        report.FLOOR: measure.Contestant(read),
        "ckpt": contestant(lambda: ckpt.load(url, training.model, storage_options=options)),
        "s3fs download, load_file and copy": contestant(downloaded),
    }
    if find_spec("runai_model_streamer_s3"):
        paths = [f"s3://{file}" for file in files]
        found["runai-model-streamer"] = contestant(lambda: _by_runai(rows, paths))
    with torch.no_grad():
        return measure.interleaved(found, rounds)


def tables(options: report.Options) -> list[report.Table]:
    """From a disk, a block of rows for each world size."""
    rows = []
    for world_size in options.world_sizes:
        with options.folder() as store:
            measure.on_ranks(1, _save, store, options.gib)
            ranks = measure.on_ranks(world_size, _load, store, options.gib, options.rounds)
        rows += report.rows(str(world_size), measure.joined(ranks), report.read_mib)
    columns = report.columns("W", "MiB read by calls")
    title = f"Hugging Face folder to a CPU model, {options.gib / 3:.2g} GiB, {options.where}"
    return [report.Table(title, columns, rows)]


def s3_tables(options: report.Options) -> list[report.Table]:
    """From an S3 server on this machine, a block of rows for each world size."""
    gib = min(options.gib, S3_GIB)
    rows = []
    with object_store.servers(None) as (server, _):
        measure.on_ranks(1, _save_to_s3, server, gib)
        for world_size in options.world_sizes:
            ranks = measure.on_ranks(world_size, _load_from_s3, server, gib, options.rounds)
            rows += report.rows(str(world_size), measure.joined(ranks), report.read_mib)
        columns = report.columns("W", "MiB read by calls")
        title = f"Hugging Face folder in S3 ({server.name}) to a CPU model, {gib / 3:.2g} GiB"
    return [report.Table(title, columns, rows)]


def everything(options: report.Options) -> list[report.Table]:
    """From the disk and, on the tmpfs alone, from S3."""
    return tables(options) + (s3_tables(options) if options.where == "tmpfs" else [])


if __name__ == "__main__":
    if "--s3" in sys.argv:
        sys.argv.remove("--s3")
        report.main(__doc__, s3_tables)
    else:
        report.main(__doc__, tables)
