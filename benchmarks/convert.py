"""Converting workload A, saved by two ranks, merging and comparing models: ckpt beside rivals.

    python benchmarks/convert.py --store DIR

The floor of a conversion copies as many bytes from file to file. That of a merge reads three files
of 16-bit floats in parts, adds their products in float32, and writes the sum. Rivals' files are
flushed to the disk as ours are. MERGEKIT=PROGRAM names the `mergekit-pytorch` of an environment of
its own, which then takes part, as a whole process beside `ckpt merge` as one. That of a comparison
reads both models.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import dcp
import floor
import measure
import report
import torch
import workload
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpt

SAVED_BY = 2
"""Ranks that wrote the checkpoints."""
SHARD_BYTES = 500_000_000
"""The largest file of a Hugging Face folder."""
WEIGHTS = (0.5, 0.3, 0.2)
"""Those of a merge, whose sources have as many bytes together as the workload."""
PART_BYTES = 4 << 20


def _save(store: str, gib: float) -> None:
    training = workload.build(gib)
    ckpt.save(f"{store}/ours", training.state)
    dcp.save(f"{store}/dcp", training.state_dicts())
    floor.write(f"{store}/raw-{torch.distributed.get_rank()}", training.buffers())


def _convert(store: str, rounds: int) -> measure.Samples:
    ours, theirs = f"{store}/ours", f"{store}/dcp"
    safetensors, pt, hf = f"{store}/out.safetensors", f"{store}/out.pt", f"{store}/out-hf"
    own = f"{store}/out-own"

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

    def check_hf() -> None:
        with ckpt.open(hf) as checkpoint:
            _check_weight(ours, checkpoint["model.norm.weight"][:])

    def check_own() -> None:
        with ckpt.open(own) as checkpoint:
            _check_weight(ours, checkpoint["model.norm.weight"][:])

    def contestant(run: Callable[[], object], check: Callable[[], None]) -> measure.Contestant:
        return measure.Contestant(run, fresh, check)

    def ours_of(source: str, to: Any, target: str, check: Callable[[], None]) -> measure.Contestant:
        options: dict[str, Any] = {"max_shard_bytes": SHARD_BYTES} if to in ("ckpt", "hf") else {}
        options |= {"select": ""} if to == "hf" else {}  # the optimizer's state too
        return contestant(lambda: ckpt.convert(source, target, to=to, **options), check)

    contestants = {
        report.FLOOR: contestant(copied, fresh),
        "cp, flushed": contestant(lambda: _cp(store), fresh),
        "ckpt, to one safetensors file": ours_of(
            ours, "safetensors", safetensors, check_safetensors
        ),
        "ckpt, to a torch.save file": ours_of(ours, "torch", pt, check_pt),
        "ckpt, to a Hugging Face folder": ours_of(ours, "hf", hf, check_hf),
        "ckpt, to ckpt's own format": ours_of(ours, "ckpt", own, check_own),
        "ckpt, DCP's folder to ckpt's own format": ours_of(theirs, "ckpt", own, check_own),
        "ckpt, DCP's folder to one safetensors file": ours_of(
            theirs, "safetensors", safetensors, check_safetensors
        ),
        "ckpt, DCP's folder to a torch.save file": ours_of(theirs, "torch", pt, check_pt),
        "ckpt, DCP's folder to a Hugging Face folder": ours_of(theirs, "hf", hf, check_hf),
        "torch's dcp_to_torch_save": contestant(
            lambda: floor.flushed(lambda: dcp_to_torch_save(theirs, pt), pt), check_pt
        ),
        "torch DCP and safetensors' save_file": contestant(
            lambda: floor.flushed(lambda: _save_file(theirs, safetensors), safetensors),
            check_safetensors,
        ),
    }
    return measure.interleaved(contestants, rounds)


def _cp(store: str) -> None:
    for rank in range(SAVED_BY):
        target = f"{store}/out-{rank}"
        copy = ["cp", f"{store}/raw-{rank}", target]
        floor.flushed(lambda copy=copy: subprocess.run(copy, check=True), target)  # type: ignore[misc]


def _save_file(theirs: str, target: str) -> None:
    """A safetensors file out of DCP's folder, by torch and safetensors: as dcp_to_torch_save."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=FileSystemReader(theirs), planner=planner, no_dist=True)
    flat, _ = flatten_state_dict(state)
    save_file({name: value for name, value in flat.items() if torch.is_tensor(value)}, target)


def _check_weight(ours: str, found: torch.Tensor) -> None:
    with ckpt.open(ours) as checkpoint:
        if not torch.equal(found, checkpoint["model.norm.weight"][:]):
            raise RuntimeError("the converted file has other values than the checkpoint")


def _save_models(store: str, gib: float) -> None:
    rows = int(gib * (1 << 30)) // (len(WEIGHTS) * 2 * 16 * 1024)
    for number in range(len(WEIGHTS)):
        made = torch.Generator().manual_seed(number)
        state = {f"l{n}": torch.randn(rows, 1024, generator=made).bfloat16() for n in range(16)}
        save_file(state, f"{store}/model-{number}.safetensors")
        ckpt.save(f"{store}/steps/step-{number}", state)


def _merge(store: str, rounds: int) -> measure.Samples:
    files = [f"{store}/model-{number}.safetensors" for number in range(len(WEIGHTS))]
    out = f"{store}/out.safetensors"

    def fresh() -> None:
        report.remove(out)

    def check() -> None:
        expected = torch.zeros(1024)
        for file, weight in zip(files, WEIGHTS, strict=True):
            with safe_open(file, "pt") as opened:
                expected += opened.get_slice("l3")[5].float() * weight
        with safe_open(out, "pt") as opened:
            found = opened.get_slice("l3")[5].float()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)  # of 16 bits

    def contestant(run: Callable[[], object]) -> measure.Contestant:
        return measure.Contestant(run, fresh, check)

    contestants = {
        report.FLOOR: contestant(lambda: floor.flushed(lambda: _stream(files, out), out)),
        "ckpt.merge of safetensors files": contestant(
            lambda: ckpt.merge(files, out, weights=WEIGHTS)
        ),
        "ckpt.merge of the last steps of a run": contestant(
            lambda: ckpt.merge([f"{store}/steps"], out, last=len(WEIGHTS), weights=WEIGHTS)
        ),
        "safetensors' load_file, torch, save_file": contestant(
            lambda: floor.flushed(lambda: _sum_whole(files, out), out)
        ),
    }
    mergekit = os.environ.get("MERGEKIT")
    if mergekit is not None:
        weights = ",".join(map(str, WEIGHTS))
        own = [sys.executable, "-m", "ckpt", "merge", *files, out, "--weights", weights, "-q"]
        models = "".join(
            f"  - {{model: {file}, parameters: {{weight: {weight}}}}}\n"
            for file, weight in zip(files, WEIGHTS, strict=True)
        )
        head = "merge_method: linear\nparameters: {normalize: false}\ndtype: float32\n"
        with open(f"{store}/mergekit.yml", "w") as file:
            file.write(f"{head}out_dtype: bfloat16\nmodels:\n{models}")

        def theirs() -> None:
            measure.process([mergekit, f"{store}/mergekit.yml", f"{store}/mk"])
            os.replace(f"{store}/mk/model.safetensors", out)

        contestants |= {
            "ckpt merge, a process": contestant(lambda: measure.process(own)),
            "mergekit-pytorch, a process": contestant(lambda: floor.flushed(theirs, out)),
        }
    return measure.interleaved(contestants, rounds)


def _compare(store: str, rounds: int) -> measure.Samples:
    """Two models that differ in one element."""
    places = [f"{store}/steps/step-0", f"{store}/twin"]
    files = [f"{store}/model-0.safetensors", f"{store}/twin.safetensors"]
    state = load_file(files[0])
    state["l7"][100, 100] += 1
    ckpt.save(places[1], state)
    save_file(state, files[1])
    expected, buffer = ckpt.id(files[0]), memoryview(bytearray(PART_BYTES))

    def differing(**how: Any) -> None:
        (one,) = ckpt.diff(*places, **how).tensors
        if (one.name, one.first) != ("l7", (100, 100)):
            raise RuntimeError("the comparison found another difference")

    def read() -> None:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def by_safetensors() -> None:
        a, b = map(load_file, files)
        if [name for name in a if not torch.equal(a[name], b[name])] != ["l7"]:
            raise RuntimeError("the comparison found another difference")

    def identity() -> None:
        if ckpt.id(places[0]) != expected:
            raise RuntimeError("the identity depends on the format")

    def digest() -> None:
        with open(files[0], "rb") as file:
            hashlib.file_digest(file, "sha256")

    actions: dict[str, Callable[[], object]] = {
        report.FLOOR: read,
        "ckpt.diff, by checksums": differing,
        "ckpt.diff, read_all=True": lambda: differing(read_all=True),
        "safetensors' load_file, torch.equal": by_safetensors,
        "ckpt.id of one of them": identity,
        "hashlib's SHA-256 of one file": digest,
    }
    found = {name: measure.Contestant(action) for name, action in actions.items()}
    return measure.interleaved(found, rounds)


def _stream(files: list[str], out: str) -> None:
    """The sum of files of one header and one dtype, part by part."""
    data, part = memoryview(bytearray(PART_BYTES)), torch.empty(PART_BYTES // 2)
    with ExitStack() as stack:
        opened = [stack.enter_context(open(file, "rb", buffering=0)) for file in files]
        target = stack.enter_context(open(out, "wb", buffering=0))
        (header,) = struct.unpack("<Q", opened[0].read(8))
        opened[0].seek(0)
        target.write(opened[0].read(8 + header))
        for file in opened[1:]:
            file.seek(8 + header)
        while True:
            total = part.zero_()
            for file, weight in zip(opened, WEIGHTS, strict=True):
                nbytes = file.readinto(data)
                if not nbytes:
                    return
                source = torch.frombuffer(data, dtype=torch.bfloat16, count=nbytes // 2)
                total = total[: nbytes // 2].add_(source.float().mul_(weight))
            target.write(total.bfloat16().view(torch.uint8).numpy().data)


def _sum_whole(files: list[str], out: str) -> None:
    total = {name: tensor.float().mul_(WEIGHTS[0]) for name, tensor in load_file(files[0]).items()}
    for file, weight in zip(files[1:], WEIGHTS[1:], strict=True):
        for name, tensor in load_file(file).items():
            total[name].add_(tensor.float().mul_(weight))
    save_file({name: tensor.bfloat16() for name, tensor in total.items()}, out)


def tables(options: report.Options) -> list[report.Table]:
    """Three tables; all are the work of one process, whatever the world sizes."""
    with options.folder() as store:
        measure.on_ranks(SAVED_BY, _save, store, options.gib)
        ranks = measure.on_ranks(1, _convert, store, options.rounds)
    rows = report.rows(str(SAVED_BY), measure.joined(ranks), report.write_calls)
    columns = report.columns("saved by", "write calls")
    found = [report.Table(f"Convert, {options.gib:g} GiB, {options.where}", columns, rows)]
    with options.folder() as store:
        measure.on_ranks(1, _save_models, store, options.gib)
        ranks = measure.on_ranks(1, _merge, store, options.rounds)
        compared = measure.on_ranks(1, _compare, store, options.rounds)
    rows = report.rows("1", measure.joined(ranks), report.write_calls)
    found.append(report.Table(f"Merge, 3 in {options.gib:g} GiB, {options.where}", columns, rows))
    title = f"Compare, 2 of {options.gib / len(WEIGHTS):.2g} GiB, {options.where}"
    rows = report.rows("1", measure.joined(compared), report.read_mib)
    found.append(report.Table(title, report.columns("saved by", "MiB read"), rows))
    return found


if __name__ == "__main__":
    report.main(__doc__, tables)
