"""The cost per tensor: 10,000 tensors of 16 KiB in one process, in CPU seconds.

    python benchmarks/small.py --store DIR

The floor is torch.save and torch.load; safetensors stands beside, with neither nest nor values.
"""

from __future__ import annotations

import dcp
import floor
import measure
import report
import torch
from safetensors.torch import load_file, save_file

import ckpt

COUNT = 10_000
ELEMENTS = 4_096
"""Of float32: 16 KiB."""


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = (f"layers.{i // 10}.part_{i % 10}.weight" for i in range(COUNT))
    return {name: torch.rand(ELEMENTS, generator=generator) for name in names}


def _on_rank(store: str, rounds: int) -> tuple[measure.Samples, measure.Samples]:
    state, target = _state(0), _state(1)
    pt, safetensors = f"{store}/small.pt", f"{store}/small.safetensors"
    ours, theirs = f"{store}/ours", f"{store}/dcp"

    def fresh() -> None:
        for path in (pt, safetensors, ours, theirs):
            report.remove(path)

    saved = measure.interleaved(
        {
            report.FLOOR: measure.Contestant(
                lambda: floor.flushed(lambda: torch.save(state, pt), pt), fresh
            ),
            "safetensors": measure.Contestant(
                lambda: floor.flushed(lambda: save_file(state, safetensors), safetensors), fresh
            ),
            "ckpt": measure.Contestant(lambda: ckpt.save(ours, state), fresh),
            "torch DCP": measure.Contestant(lambda: dcp.save(theirs, dict(state)), fresh),
        },
        rounds,
    )
    fresh()
    torch.save(state, pt)
    save_file(state, safetensors)
    ckpt.save(ours, state)
    dcp.save(theirs, dict(state))

    def clear() -> None:
        for tensor in target.values():
            tensor.zero_()

    def check() -> None:
        for name, tensor in target.items():
            if not torch.equal(tensor, state[name]):
                raise RuntimeError(f"{name}: what was loaded is not what was saved")

    loaded = measure.interleaved(
        {
            report.FLOOR: measure.Contestant(lambda: torch.load(pt, weights_only=True)),
            "safetensors": measure.Contestant(lambda: load_file(safetensors)),
            "ckpt": measure.Contestant(lambda: ckpt.load(ours, target), clear, check),
            "ckpt.read": measure.Contestant(lambda: ckpt.read(ours)),
            "torch DCP": measure.Contestant(lambda: dcp.load(theirs, dict(target)), clear, check),
        },
        rounds,
    )
    return saved, loaded


def tables(options: report.Options) -> list[report.Table]:
    """Two tables, save and load; the floor's row is torch.save's or torch.load's."""
    with options.folder() as store:
        ((saved, loaded),) = measure.on_ranks(1, _on_rank, store, options.rounds)
    return [
        _table(f"Save 10,000 tensors of 16 KiB, {options.where}", "torch.save", saved),
        _table(f"Load 10,000 tensors of 16 KiB, {options.where}", "torch.load", loaded),
    ]


def _table(title: str, floor: str, samples: measure.Samples) -> report.Table:
    rows = [
        [
            floor if name == report.FLOOR else name,
            report.spread([sample.cpu_seconds for sample in found]),
            report.spread(report.ratios(samples, name, lambda s: s.cpu_seconds)),
            report.spread([sample.seconds for sample in found]),
        ]
        for name, found in samples.items()
    ]
    return report.Table(title, ("", "CPU seconds", f"÷ {floor}", "seconds"), rows)


if __name__ == "__main__":
    report.main(__doc__, tables)
