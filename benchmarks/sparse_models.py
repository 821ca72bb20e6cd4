"""Plans and conversions of models whose files take no place on the disk: their numbers are zeros.

    python benchmarks/sparse_models.py --store DIR [--gigabytes 100]

A folder of Llama 405 B, as Hugging Face stores it, is planned. A smaller one of the same widths, of
that many gigabytes, is converted. `fallocate` gives the zeros of the target back to the disk while
they are written, so that a few gigabytes of room are enough. Memory is the peak of the command's
process above that of the same command for a model of a few kilobytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

from formats.safetensors.file import build

FILE_BYTES = 5 * 10**9
DIG_SECONDS = 1.0

Shapes = dict[str, tuple[int, ...]]


def llama(layers: int, width: int, between: int, words: int, kv_heads: int = 8) -> Shapes:
    """The tensors of a Llama with heads of 128 numbers."""
    found: Shapes = {"model.embed_tokens.weight": (words, width)}
    for number in range(layers):
        layer = f"model.layers.{number}"
        for name, rows in (("q", width), ("k", 128 * kv_heads), ("v", 128 * kv_heads)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = rows, width
        found[f"{layer}.self_attn.o_proj.weight"] = width, width
        for name in ("gate", "up"):
            found[f"{layer}.mlp.{name}_proj.weight"] = between, width
        found[f"{layer}.mlp.down_proj.weight"] = width, between
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = (width,)
    return found | {"model.norm.weight": (width,), "lm_head.weight": (words, width)}


def write_model(folder: Path, shapes: Shapes, width: int, kv_heads: int = 8) -> int:
    """Writes a Hugging Face folder in bfloat16 without its numbers; returns their bytes."""
    folder.mkdir()
    files: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    for name, shape in shapes.items():
        nbytes = 2 * prod(shape)
        if files[-1] and sum(one[3] for one in files[-1]) + nbytes > FILE_BYTES:
            files.append([])
        files[-1].append((name, "BF16", shape, nbytes))
    weights: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header = build(tensors, {"format": "pt"})
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(one[3] for one in tensors))
        weights |= dict.fromkeys((one[0] for one in tensors), name)
        total += sum(one[3] for one in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "num_attention_heads": width // 128, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": kv_heads}))
    return total


@contextmanager
def holes_in(folder: Path) -> Iterator[None]:
    """Gives the zeros in new files below a folder back to the disk, once a second."""
    ended = threading.Event()

    def dig() -> None:
        dug: dict[Path, int] = {}
        while not ended.wait(DIG_SECONDS):
            for path in folder.rglob("*"):
                try:
                    size = path.stat().st_size
                    if path.is_file() and size > dug.get(path, 0) + (64 << 20):
                        start = dug.get(path, 0) >> 20 << 20
                        command = ["fallocate", "-d", "-o", str(start), "-l", str(size - start)]
                        subprocess.run([*command, str(path)], check=False, capture_output=True)
                        dug[path] = size
                except FileNotFoundError:  # renamed: it is found under its new name
                    continue

    thread = threading.Thread(target=dig)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run(*arguments: str) -> tuple[float, float, int, str]:
    """Runs the command: seconds, processor seconds, the peak of its memory, the last line."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt", "convert", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"convert {arguments} ended with {status}")
    lines = [line for line in output.splitlines() if not line.startswith("note")]
    cpu = used.ru_utime + used.ru_stime
    return time.monotonic() - began, cpu, used.ru_maxrss << 10, lines[-1]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--gigabytes", type=float, default=100.0)
    options = parser.parse_args()
    store: Path = options.store / "sparse-models"
    shutil.rmtree(store, ignore_errors=True)
    (store / "targets").mkdir(parents=True)
    how = ["--to", "dcp", "--map", "auto-hf-megatron"]
    target = str(store / "targets" / "out")
    write_model(store / "tiny", llama(1, 256, 64, 64, 2), 256, 2)
    base = run(str(store / "tiny"), target, *how)[2]
    shutil.rmtree(target)
    write_model(store / "405b", llama(126, 16384, 53248, 128256), 16384)
    seconds, cpu, peak, line = run(str(store / "405b"), target, *how, "--dry-run")
    print(f"{line}\n  {seconds:.1f} s ({cpu:.1f} s of processor time), {peak - base >> 20} MiB")
    shapes, layers = llama(1, 16384, 53248, 128256), 1
    while sum(2 * prod(shape) for shape in shapes.values()) < options.gigabytes * 1e9:
        layers += 1
        shapes = llama(layers, 16384, 53248, 128256)
    write_model(store / "large", shapes, 16384)
    with holes_in(store / "targets"):
        seconds, cpu, peak, line = run(str(store / "large"), target, *how)
    print(f"{line}\n  {seconds:.1f} s ({cpu:.1f} s of processor time), {peak - base >> 20} MiB")
    shutil.rmtree(store)


if __name__ == "__main__":
    main()
