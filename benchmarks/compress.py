"""Compression: what it saves and costs for each kind of tensor, in a save, and what checksums cost.

    python benchmarks/compress.py --world-size 2 --store DIR

Values are drawn as training leaves them: weights are normal, each row with a scale of its own; the
first moment is the mean of gradients, far smaller, and the second their mean square. GB/s are of
raw bytes per second of one core.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

import floor
import measure
import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import xxhash
import zstandard
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from formats.native import codec
from formats.native.shard import CHUNK_BYTES, COMPRESSED_CHUNK_BYTES

COLUMNS = 4096
KIND_BYTES = 32 << 20
"""Of each kind of tensor, where the codec alone is measured."""
REPEATS = 5
MOST_GIB = 0.5
"""Of the state that is saved."""


def weights(rows: int, generator: torch.Generator) -> torch.Tensor:
    """float32 weights of this many rows."""
    scale = torch.randn(rows, 1, generator=generator).mul_(0.3).exp_().mul_(0.02)
    return torch.randn(rows, COLUMNS, generator=generator).mul_(scale)


def first_moment(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Adam's `exp_avg`."""
    return weights(rows, generator).mul_(1e-3)


def second_moment(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Adam's `exp_avg_sq`."""
    return first_moment(rows, generator).square_().add_(1e-12)


def kinds() -> Mapping[str, torch.Tensor]:
    """One tensor of each kind."""
    generator = torch.Generator().manual_seed(0)
    rows = KIND_BYTES // (4 * COLUMNS)
    made = weights(rows, generator)
    words = torch.randint(0, 128256, (rows, COLUMNS // 2), generator=generator)
    return {
        "weights, bfloat16": made.bfloat16(),
        "weights, float16": made.half(),
        "weights, float32": made,
        "float32 masters of bfloat16": made.bfloat16().float(),
        "exp_avg, float32": first_moment(rows, generator),
        "exp_avg_sq, float32": second_moment(rows, generator),
        "word numbers, int64": words,
        "noise, uint8": torch.randint(
            0, 256, (KIND_BYTES,), dtype=torch.uint8, generator=generator
        ),
    }


def _chunks(tensor: torch.Tensor, nbytes: int) -> list[memoryview]:
    data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    return [data[at : at + nbytes] for at in range(0, len(data), nbytes)]


def _speed(action: Callable[[], object], nbytes: int) -> float:
    """GB/s of one core, the best of some repeats."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.process_time()
        action()
        best = min(best, time.process_time() - start)
    return nbytes / best / 1e9


def _codec_row(kind: str, tensor: torch.Tensor) -> list[str]:
    chunks, width = _chunks(tensor, COMPRESSED_CHUNK_BYTES), tensor.element_size()
    frames = [codec.compress(chunk, width) for chunk in chunks]
    stored = sum(
        len(chunk if frame is None else frame) for chunk, frame in zip(chunks, frames, strict=True)
    )
    target = memoryview(bytearray(COMPRESSED_CHUNK_BYTES))

    def decompress() -> None:
        for chunk, frame in zip(chunks, frames, strict=True):
            if frame is not None:
                codec.decompress(frame, width, target[: len(chunk)], "here")

    plain = zstandard.ZstdCompressor(level=1)
    unshuffled = sum(len(plain.compress(chunk)) for chunk in chunks)
    packing = _speed(lambda: [codec.compress(chunk, width) for chunk in chunks], tensor.nbytes)
    is_kept_raw = all(frame is None for frame in frames)
    unpacking = "–" if is_kept_raw else f"{_speed(decompress, tensor.nbytes):.2f}"
    return [
        kind,
        f"{tensor.nbytes / stored:.3f}",
        f"{packing:.2f}",
        unpacking,
        f"{tensor.nbytes / unshuffled:.3f}",
        *_zipnn_cells(tensor),
    ]


def _zipnn_cells(tensor: torch.Tensor) -> list[str]:
    """Ratio and speeds of ZipNN with one thread, where it is installed and knows the dtype."""
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    if find_spec("zipnn") is None or tensor.dtype not in names:
        return ["–", "–", "–"]
    from zipnn import ZipNN

    codec = ZipNN(bytearray_dtype=names[tensor.dtype], threads=1)
    whole = bytes(tensor.reshape(-1).view(torch.uint8).numpy())

    def copied() -> bytearray:
        return bytearray(whole)  # it compresses in place

    packed = bytes(codec.compress(copied()))
    if bytes(codec.decompress(packed)) != whole:
        raise RuntimeError("ZipNN gives other bytes back")
    packing = _speed(lambda: codec.compress(copied()), len(whole))
    unpacking = _speed(lambda: codec.decompress(packed), len(whole))
    return [f"{len(whole) / len(packed):.3f}", f"{packing:.2f}", f"{unpacking:.2f}"]


def codec_table() -> report.Table:
    """Row Z1: ratio and speed of each kind of tensor."""
    rows = [_codec_row(kind, tensor) for kind, tensor in kinds().items()]
    columns = ("", "ratio", "GB/s a core, in", "out", "plain zstd 1", "ZipNN", "in", "out")
    return report.Table("Compression of chunks of 1 MiB", columns, rows)


def checksum_table() -> report.Table:
    """Row K1: GB/s of one core, in chunks as they are stored."""
    chunks = _chunks(kinds()["weights, float32"], CHUNK_BYTES)
    nbytes = sum(map(len, chunks))
    hashes: dict[str, Callable[[memoryview], object]] = {
        "xxh3_128, as ckpt does": xxhash.xxh3_128_digest,
        "xxh64": xxhash.xxh64_digest,
        "crc32, as torch.save does": zlib.crc32,
        "sha256": lambda chunk: hashlib.sha256(chunk).digest(),
    }
    rows = [
        [name, f"{_speed(lambda d=digest: [d(chunk) for chunk in chunks], nbytes):.1f}"]
        for name, digest in hashes.items()
    ]
    title = f"Checksums of chunks of {CHUNK_BYTES >> 10} KiB"
    return report.Table(title, ("", "GB/s a core"), rows)


def _state(gib: float) -> tuple[dict[str, object], list[memoryview]]:
    """bfloat16 weights, float32 masters and moments, cut over the ranks; and their bytes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(dist.get_rank())
    layers = 8
    rows = max(1, int(gib * 2**30 / (14 * COLUMNS * layers * dist.get_world_size())))
    state: dict[str, object] = {}
    buffers: list[memoryview] = []

    def parts(layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        made = weights(rows, generator)
        yield f"model.{layer}", made.bfloat16()
        yield f"master.{layer}", made
        yield f"exp_avg.{layer}", first_moment(rows, generator)
        yield f"exp_avg_sq.{layer}", second_moment(rows, generator)

    for layer in range(layers):
        for name, part in parts(layer):
            state[name] = DTensor.from_local(part, mesh, [Shard(0)])
            buffers.append(memoryview(part.reshape(-1).view(torch.uint8).numpy()))
    return state, buffers


def _on_rank(store: str, gib: float, rounds: int) -> tuple[measure.Samples, dict[str, int]]:
    state, buffers = _state(gib)
    raw, rank = f"{store}/raw-{dist.get_rank()}", dist.get_rank()

    def fresh() -> None:
        report.remove(raw)
        if rank == 0:
            for name in FOLDERS.values():
                report.remove(f"{store}/{name}")

    def theirs(*extensions: ZStandard) -> None:
        name = FOLDERS["torch DCP, its zstd" if extensions else "torch DCP"]
        writer = torch_dcp.FileSystemWriter(f"{store}/{name}", _extensions=extensions)
        torch_dcp.save(state, storage_writer=writer)

    contestants = {
        report.FLOOR: measure.Contestant(lambda: floor.write(raw, buffers), fresh),
        "ckpt": measure.Contestant(lambda: ckpt.save(f"{store}/ours", state), fresh),
        "ckpt, compress=True": measure.Contestant(
            lambda: ckpt.save(f"{store}/packed", state, compress=True), fresh
        ),
        "torch DCP": measure.Contestant(theirs, fresh),
        "torch DCP, its zstd": measure.Contestant(lambda: theirs(ZStandard()), fresh),
    }
    samples = measure.interleaved(contestants, rounds)
    sizes = {report.FLOOR: sum(map(len, buffers)) * dist.get_world_size()}
    for name, folder in FOLDERS.items():
        contestants[name].before()
        dist.barrier()
        contestants[name].run()
        dist.barrier()
        sizes[name] = report.size_of(f"{store}/{folder}")
    return samples, sizes


FOLDERS = {
    "ckpt": "ours",
    "ckpt, compress=True": "packed",
    "torch DCP": "dcp",
    "torch DCP, its zstd": "dcp-zstd",
}
"""Where each writes."""


def saving_table(options: report.Options) -> report.Table:
    """A save with and without, beside DCP's."""
    gib, rows = min(options.gib, MOST_GIB), []
    for world_size in options.world_sizes[:1]:
        with options.folder() as store:
            ranks = measure.on_ranks(world_size, _on_rank, store, gib, options.rounds)
        samples, sizes = measure.joined(found for found, _ in ranks), ranks[0][1]
        for row in report.rows(str(world_size), samples, lambda _: ""):
            rows.append([*row[:-1], f"{sizes[report.FLOOR] / sizes[row[1]]:.2f}"])
    columns = report.columns("W", "raw ÷ stored")
    return report.Table(f"Save with compression, {gib:g} GiB, {options.where}", columns, rows)


def tables(options: report.Options) -> list[report.Table]:
    """Three tables."""
    return [codec_table(), saving_table(options), checksum_table()]


if __name__ == "__main__":
    report.main(__doc__, tables)
