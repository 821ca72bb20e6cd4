"""What a state dict of each kind costs: seconds, bytes between ranks, memory; ours and torch's.

    python benchmarks/state_dicts.py --world-size 2
    python benchmarks/state_dicts.py

Eight transformer layers and their AdamW moments, 300 MiB in all, sharded over W gloo ranks of one
thread. Every row makes the state dict of the model and of the optimizer. `sent` is what all ranks
wrote to one another; its floor is what must cross for every rank, or for the first one, to have
what it is to have. A full state dict of the first rank alone is in host memory, as one asks for it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from types import ModuleType

import measure
import report
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from train import FSDP2, OURS, RUNTIMES, Workload

import ckpt
import sharding

WORKLOAD = Workload("8 layers of width 512", 8, 512, 4, FSDP2)
FSDP1, WRAPPER = "torch FSDP1", "ckpt FullyShardedDataParallel"
FULL, FIRST, SHARDED, LOCAL = "full", "full, first rank", "sharded", "local"


class _State:
    """A model under one runtime, and its optimizer after a step."""

    def __init__(self, runtime: str) -> None:
        torch.manual_seed(0)
        self.model = RUNTIMES[runtime](WORKLOAD)
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(1, WORKLOAD.tokens, WORKLOAD.width)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()

    def by_torch(self, kind: str) -> object:
        """By torch's helpers."""
        options = StateDictOptions(full_state_dict=kind != SHARDED, cpu_offload=kind == FIRST)
        return get_state_dict(self.model, self.optim, options=options)

    def by_wrapper(self, package: ModuleType, kind: str) -> object:
        """By the methods of a wrapper class, torch's or ours."""
        types, wrapper = package.StateDictType, package.FullyShardedDataParallel
        arguments = {
            FULL: (
                types.FULL_STATE_DICT,
                package.FullStateDictConfig(),
                package.FullOptimStateDictConfig(offload_to_cpu=False),
            ),
            FIRST: (
                types.FULL_STATE_DICT,
                package.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                package.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
            ),
            SHARDED: (types.SHARDED_STATE_DICT,),
            LOCAL: (types.LOCAL_STATE_DICT,),
        }
        with wrapper.state_dict_type(self.model, *arguments[kind]):
            return self.model.state_dict(), wrapper.optim_state_dict(self.model, self.optim)

    def by_convert(self, kind: str) -> object:
        """By `ckpt.state_dict.convert`."""
        return ckpt.state_dict.convert(
            {"model": self.model, "optim": self.optim},
            to=kind.partition(",")[0],
            rank0_only=kind == FIRST,
            offload_to_cpu=kind == FIRST,
        )


class _Keeping:
    """Makes a state dict and keeps it until the next is made: its memory counts."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make
        self._made: object = None

    def __call__(self) -> None:
        self._made = self._make()

    def drop(self) -> None:
        """Let go of it."""
        self._made = None


def _contestants(kind: str, states: dict[str, _State]) -> dict[str, Callable[[], object]]:
    """By name, whoever can make this kind."""
    ours, wrapper = states[OURS], states[WRAPPER]
    found: dict[str, Callable[[], object]] = {}
    if kind != LOCAL:
        found["torch FSDP2, get_state_dict"] = partial(states[FSDP2].by_torch, kind)
        if kind != FIRST:  # torch 2.13's FSDP1 crashes there: what it returns was freed
            theirs = partial(states[FSDP1].by_wrapper, torch_fsdp, kind)
            found["torch FSDP1, state_dict_type"] = theirs
        found["ckpt fully_shard, get_state_dict"] = partial(ours.by_torch, kind)
    found["ckpt fully_shard, convert"] = partial(ours.by_convert, kind)
    found["ckpt wrapper, state_dict_type"] = partial(wrapper.by_wrapper, sharding, kind)
    found["ckpt wrapper, convert"] = partial(wrapper.by_convert, kind)
    return found


def _drop(keeping: dict[str, _Keeping]) -> None:
    for one in keeping.values():
        one.drop()


def _on_rank(rounds: int) -> tuple[dict[str, measure.Samples], int]:
    """The samples of every kind, and the bytes of the whole state."""
    states = {name: _State(name) for name in (FSDP1, FSDP2, OURS, WRAPPER)}
    samples = {}
    for kind in (FULL, FIRST, SHARDED, LOCAL):
        keeping = {name: _Keeping(make) for name, make in _contestants(kind, states).items()}
        contestants = {
            name: measure.Contestant(make, before=partial(_drop, keeping))
            for name, make in keeping.items()
        }
        samples[kind] = measure.interleaved(contestants, rounds + 1)
        samples[kind] = {name: found[1:] for name, found in samples[kind].items()}
    numel = sum(parameter.numel() for parameter in states[OURS].model.parameters())
    return samples, 3 * 4 * numel


def _least_sent(kind: str, name: str, nbytes: int, world_size: int) -> str:
    """MiB that must go from rank to rank: everybody lacks all but its own part, or the first does.

    Not said where flat parameters become rows: what changes hands depends on where they begin.
    """
    if kind == SHARDED and ("wrapper" in name or name.startswith(FSDP1)):
        return "–"
    lacking = nbytes * (world_size - 1) / world_size
    least = {FULL: lacking * world_size, FIRST: lacking}.get(kind, 0)
    return f"{least / 2**20:,.0f}"


def table(world_size: int, rounds: int) -> report.Table:
    """One row for every kind and whoever makes it."""
    results = measure.on_ranks(world_size, _on_rank, rounds)
    nbytes = results[0][1]
    rows = []
    for kind in results[0][0]:
        samples = measure.joined(found[kind] for found, _ in results)
        first = next(iter(samples.values()))
        for name, found in samples.items():
            sent = statistics.median(sample.written_bytes for sample in found)
            pairs = zip(found, first, strict=True)
            rows.append(
                [
                    kind,
                    name,
                    report.spread([sample.seconds for sample in found]),
                    report.spread([mine.seconds / other.seconds for mine, other in pairs]),
                    f"{sent / 2**20:,.0f}",
                    _least_sent(kind, name, nbytes, world_size),
                    f"{max(sample.extra_bytes for sample in found) / 2**20:,.0f}",
                ]
            )
    title = (
        f"State dicts of a model and its AdamW moments, {nbytes / 2**20:,.0f} MiB over "
        f"{world_size} ranks; ratio to the first row of a kind"
    )
    heads = ("kind", "", "seconds", "ratio", "sent MiB, all ranks", "least", "extra MiB a rank")
    return report.Table(title, heads, rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2, help="by default 2")
    parser.add_argument("--rounds", type=int, default=5, help="by default 5")
    given = parser.parse_args()
    print(report.origin(), end="\n\n")
    print(table(given.world_size, given.rounds))


if __name__ == "__main__":
    main()
