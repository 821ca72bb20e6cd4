"""Whether the tests see a mistake: one small change of the product after the other, by hand.

    python tests/mutations.py                   all of them, and a table
    python tests/mutations.py engine commit     those whose names begin so
    python tests/mutations.py --check           whether every one still applies; runs no test

A mutation replaces code that stands once in the product by other code, in a copy of the working
tree, and runs a few test files there, as `make test-all` does, until the first failure. Code is
found by its tokens: line breaks, indentation, comments and trailing commas may differ. A mutation
is killed when a test fails, and survives when all pass. The exit status is 1 where one survives or pytest itself fails,
and 2 where the code of one is not in the product, or stands there twice: then the product has
changed, and the table below is to be changed with it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

sys.path.pop(0)  # this folder has a `ckpt` of its own: the tests of it

import hypothesis  # noqa: F401 - once for all
import pytest
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

ROOT = Path(__file__).parent.parent
PRODUCT = ("ckpt", "formats", "sharding", "tools")
TEST_SECONDS = 120
"""That one test may take: some mutations make ranks wait for one another."""
RUN_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change, and the test files that should see it."""

    name: str
    old: str
    new: str
    tests: str
    """Files below `tests`, without `test_` and `.py`, separated by spaces; or files of the product,
    whose docstrings have the tests."""

    @property
    def paths(self) -> list[str]:
        """The test files."""
        found = []
        for name in self.tests.split():
            folder, _, file = name.rpartition("/")
            is_product = file.endswith(".py")
            found.append(name if is_product else f"tests/{folder}/test_{file}.py")
        return found


TRAINING = "sharding/wrapper_training sharding/fully_shard_training"
GRADIENTS = f"sharding/wrapper_gradients {TRAINING}"
STATES = "sharding/state_dicts sharding/optim_state_dicts sharding/dtensor_state_dicts"
RESHARD = "ckpt/load ckpt/reshard ckpt/reshard_in_process"
AGREEING = "sharding/agreeing ckpt/ranks sharding/mismatched_ranks"

MUTATIONS = (
    # The layout algebra.
    Mutation(
        "layout: strides of a row-major array",
        "strides[dim] = strides[dim + 1] * shape[dim + 1]",
        "strides[dim] = strides[dim + 1] * shape[dim]",
        "layout/box layout/layout",
    ),
    Mutation(
        "layout: the last rows of a span",
        "yield from _rows(whole, whole + 1, span_boxes(rest, 0, hi - whole * inner))",
        "yield from _rows(whole, whole + 1, span_boxes(rest, 0, hi - whole * inner - 1))",
        "layout/box layout/layout",
    ),
    Mutation(
        "layout: the chunk of torch.chunk's rule",
        "return min(numel, index * step), min(numel, (index + 1) * step)",
        "return min(numel, index * step), min(numel, (index + 1) * step + 1)",
        "layout/layout layout/torch_oracles",
    ),
    Mutation(
        "layout: coordinates that touch a range",
        "coordinates.update(range(low // step, (high - 1) // step + 1))",
        "coordinates.update(range(low // step, high // step + 1))",
        "layout/layout layout/copies",
    ),
    Mutation(
        "layout: the range of a flat shard",
        "first, last = lo + max(0, start), min(hi, lo + start + placement.stride)",
        "first, last = lo + max(0, start), min(hi, lo + placement.stride)",
        "layout/layout layout/copies",
    ),
    Mutation(
        "layout: the order of axes that split",
        "part, parts = part * size + index, parts * size",
        "part, parts = part + index * parts, parts * size",
        "layout/layout layout/copies ckpt/save_plan",
    ),
    Mutation(
        "layout: where a piece of a local array begins",
        "Piece(box, at - lo, strides)",
        "Piece(box, at, strides)",
        "layout/layout layout/copies",
    ),
    Mutation(
        "layout: a hole is an error",
        "if covered != target.box.numel:",
        "if covered > target.box.numel:",
        "layout/copies layout/exchange",
    ),
    Mutation(
        "layout: the order of what a rank receives",
        "receives = sorted(copies_to(have, want, rank), key=lambda copy: copy.source_rank)",
        "receives = sorted(copies_to(have, want, rank), key=lambda copy: -copy.source_rank)",
        "sharding/layout/copies.py layout/exchange",
    ),
    Mutation(
        "layout: which replica sends",
        "near = have.mesh.coordinate(target) or (0,) * len(have.placements)",
        "near = have.mesh.coordinate(rank) or (0,) * len(have.placements)",
        "layout/exchange sharding/kinds",
    ),
    # The engine.
    Mutation(
        "engine: a flat shard is a rank's own",
        "return ((rank * self.shard_numel, (rank + 1) * self.shard_numel),)",
        "return (((self.size - 1 - rank) * self.shard_numel, (self.size - rank) * self.shard_numel),)",
        f"sharding/packing {STATES}",
    ),
    Mutation(
        "engine: a slot begins at a multiple",
        "at += -(-prod(shape) // align) * align",
        "at += prod(shape) // align * align",
        f"sharding/packing {TRAINING}",
    ),
    Mutation(
        "engine: a sum has every rank's part",
        "for part in (second, *others):",
        "for part in (second, *others[1:]):",
        f"sharding/transport {GRADIENTS}",
    ),
    Mutation(
        "engine: a sum is in rank order",
        "if self.rank == 0:\nfirst, second = second, first",
        "if self.rank < 2:\nfirst, second = second, first",
        f"sharding/transport {GRADIENTS}",
    ),
    Mutation(
        "engine: small tensors arrive in their places",
        "self._copies[1].extend(small)",
        "self._copies[1].extend(reversed(small))",
        f"sharding/transport {TRAINING}",
    ),
    Mutation(
        "engine: gradients are divided by all ranks",
        "return 1.0, float(size)",
        "return 1.0, float(self.sharing.peers.size)",
        GRADIENTS,
    ),
    Mutation(
        "engine: in float16 the rest comes after",
        "return before, size / before",
        "return before, float(size)",
        "sharding/wrapper_mixed_precision sharding/fully_shard_training",
    ),
    Mutation(
        "engine: sums go on to replicas",
        "return list(torch.split(flat, [part.numel() for part in sums]))",
        "return sums",
        GRADIENTS,
    ),
    Mutation(
        "engine: sums that waited for replicas are added",
        "torch._foreach_add_(sums, self._waiting)",
        "torch._foreach_add_(sums, self._waiting, alpha=0)",
        "sharding/fully_shard_meshes",
    ),
    Mutation(
        "engine: gradients that were held are added",
        "return before + gradient",
        "return gradient",
        f"sharding/wrapper_mixed_precision {GRADIENTS}",
    ),
    Mutation(
        "engine: a parameter without a gradient keeps None",
        "present[:] = [int(gradient is not None) for gradient in gradients]",
        "present[:] = [1] * len(gradients)",
        GRADIENTS,
    ),
    Mutation(
        "engine: a gradient is reduced with its rows first",
        "rows = gradient.movedim(slot.dim, 0) if slot.dim else gradient",
        "rows = gradient.movedim(0, slot.dim) if slot.dim else gradient",
        "sharding/fully_shard_training sharding/fully_shard_api sharding/fully_shard_meshes",
    ),
    Mutation(
        "engine: a shard's gradient has its own shape",
        "return flat.view(moved).movedim(0, parameter.dim).contiguous()",
        "return flat.view(shape)",
        "sharding/fully_shard_training sharding/fully_shard_api sharding/fully_shard_meshes",
    ),
    Mutation(
        "engine: gradients of two backwards add up",
        "sharded.grad._local_tensor += gradient",
        "sharded.grad._local_tensor.copy_(gradient)",
        "sharding/fully_shard_training",
    ),
    Mutation(
        "engine: reductions go in reverse order of use",
        "key=lambda b: (-(b.backward.first or 0), b.index)",
        "key=lambda b: (b.backward.first or 0, b.index)",
        f"sharding/fully_shard_memory sharding/execution_order {TRAINING}",
    ),
    Mutation(
        "engine: a reduction waits for every use",
        "return 0 < self._wanted == len(self.backward.final)",
        "return 0 < self._wanted == len(self.backward.arrived)",
        f"sharding/comm_hooks {TRAINING}",
    ),
    Mutation(
        "engine: what forward skipped is reduced too",
        "self._advance(to_the_end=True)",
        "self._advance()",
        TRAINING,
    ),
    Mutation(
        "engine: the next unit is gathered ahead",
        "self._prefetch(unit, islice(last, position + 1, None))",
        "self._prefetch(unit, islice(last, position + 2, None))",
        "sharding/execution_order sharding/fully_shard_memory sharding/fully_shard_api",
    ),
    Mutation(
        "engine: gathering ahead has a bound",
        "if nbytes > PREFETCH_BYTES and nbytes > other.unsharded_bytes:",
        "if nbytes > 4 * PREFETCH_BYTES and nbytes > other.unsharded_bytes:",
        "sharding/execution_order sharding/fully_shard_memory sharding/fully_shard_api",
    ),
    Mutation(
        "engine: what nobody holds is sharded again",
        "        if not self.holders:\n            self.reshard()",
        "        if not self.holders and False:\n            self.reshard()",
        "sharding/fully_shard_memory sharding/gradients_and_memory",
    ),
    Mutation(
        "engine: shards that changed are gathered again",
        "return self.is_gathered and self._gathered_versions != self.versions()",
        "return False",
        f"{TRAINING} sharding/fully_shard_api",
    ),
    Mutation(
        "engine: a backward that failed is forgotten",
        "                param_group.forget()",
        "                pass",
        "sharding/fully_shard_failures sharding/wrapper_gradients",
    ),
    Mutation(
        "engine: ranks that run another order are told",
        "if index != indices[0]:",
        "if index < indices[0]:",
        "sharding/execution_order",
    ),
    # The planner of saves.
    Mutation(
        "planner: large replicated tensors are split",
        "if _bytes_per_replica(tensor) >= SPLIT_BYTES:",
        "if _bytes_per_replica(tensor) > 4 * SPLIT_BYTES:",
        "ckpt/save_plan ckpt/reshard",
    ),
    Mutation(
        "planner: small tensors are shared out by bytes",
        "owner = before * replicas // total if total else 0",
        "owner = 0",
        "ckpt/save_plan ckpt/differing_replicas",
    ),
    Mutation(
        "planner: replicas that differ are stored by one",
        "return {axis: Only(where[axis]) for axis in layout.replica_axes}",
        "return {axis: Only(0) for axis in layout.replica_axes}",
        "ckpt/save_plan ckpt/differing_replicas",
    ),
    Mutation(
        "planner: replicas that differ are found",
        "for sign, where in ((1, position), (-1, (position + 1) % size)):",
        "for sign, where in ((1, position), (-1, position % size)):",
        "ckpt/replicas ckpt/differing_replicas",
    ),
    # The commit.
    Mutation(
        "commit: every file has its size",
        "        if all(seen.get(file.name) == file.size for file in files):",
        "        if all(file.name in seen for file in files):",
        "faults/concurrency",
    ),
    Mutation(
        "commit: an attempt that took too long is over",
        "if now() - began > GRACE_SECONDS:",
        "if now() - began > GRACE_SECONDS + 3600.0:",
        "ckpt/convert_targets faults/concurrency",
    ),
    Mutation(
        "commit: the old files go after the new manifest",
        "                if not found.cover(folder, name):\n                    try:\n",
        "                if found.cover(folder, name):\n                    try:\n",
        "faults/concurrency ckpt/borrowing",
    ),
    Mutation(
        "commit: a base that went takes the manifest back",
        "if base is not None and not _is_there(base, store, old):",
        "if base is not None and not base:",
        "ckpt/borrowing faults/concurrency",
    ),
    Mutation(
        "commit: a failed rank's files are removed",
        "        store.delete(attempt.file_name)\n        if attempt.is_new",
        "        store.exists(attempt.file_name)\n        if attempt.is_new",
        "ckpt/ranks ckpt/commit faults/rank_failures",
    ),
    Mutation(
        "commit: a manifest that was written wrong is taken back",
        'wrong = "" if old is None else _wrong_with(store, data)',
        'wrong = ""',
        "ckpt/commit faults/misplaced faults/fault_table",
    ),
    Mutation(
        "commit: what is borrowed from is not deleted",
        "try:\n    store.commit(MANIFEST, data, replace=False)\nexcept (ExistsError, UnflushedError):",
        "try:\n    pass\nexcept (ExistsError, UnflushedError):",
        "faults/concurrency ckpt/borrowing ckpt/commit",
    ),
    Mutation(
        "commit: another owner is looked for at the last moment",
        "is_seen or not has_looked):\n            look(0.0)\n",
        "is_seen or not has_looked):\n            pass\n",
        "run/owner interleavings/runs",
    ),
    Mutation(
        "commit: one of two deletions deletes the files",
        "    if now is None or not store.delete(MANIFEST):\n        return False\n",
        "    store.delete(MANIFEST)\n",
        "ckpt/commit interleavings/runs",
    ),
    Mutation(
        "reading: a listing that is out of date is taken again",
        "        if tries_left and listing.newest != before.newest:\n            continue\n",
        "",
        "ckpt/newest interleavings/runs",
    ),
    Mutation(
        "reading: a counter orders the steps of a run, not a clock",
        "        if order is None:\n            others.append",
        "        if order is not None or order is None:\n            others.append",
        "ckpt/newest interleavings/runs",
    ),
    # The manifest.
    Mutation(
        "manifest: a file is named once",
        "if len(values) != len(files):",
        "if len(values) > len(files):",
        "formats/native_hostile formats/native",
    ),
    Mutation(
        "manifest: an alias has a target",
        "if target not in tensors and self._stored:",
        "if target not in aliases and target not in tensors and self._stored:",
        "formats/native_hostile formats/native",
    ),
    Mutation(
        "manifest: a tensor is spread over ranks with files",
        "if layout.numel > files * -(-most // parts):",
        "if layout.numel > files * most:",
        "formats/native_hostile formats/native fuzz/bombs",
    ),
    Mutation(
        "manifest: a key stands once in a $dict",
        "duplicate = key in seen",
        "duplicate = False",
        "formats/native_hostile formats/native ckpt/state",
    ),
    Mutation(
        "manifest: headers and tables fit into a file",
        "if header + table > size:",
        "if header > size:",
        "formats/native_hostile formats/native",
    ),
    # Loading.
    Mutation(
        "loading: a chunk's checksum is looked at",
        'if digest(data) + len(data).to_bytes(4, "little") != table[record : record + 20]:',
        'if digest(data)[:0] + len(data).to_bytes(4, "little") != table[record + 16 : record + 20]:',
        "formats/native ckpt/corruption ckpt/verify",
    ),
    Mutation(
        "loading: a compressed chunk's checksum is looked at",
        "if xxhash.xxh3_128_digest(stored[at : at + chunk.stored_bytes]) != chunk.digest:",
        "if not chunk.digest:",
        "ckpt/corruption ckpt/verify faults/flips",
    ),
    Mutation(
        "loading: elements that are missing are an error",
        "if covered != copies.numel(piece):",
        "if covered > copies.numel(piece):",
        "ckpt/transfer ckpt/load ckpt/corruption",
    ),
    Mutation(
        "loading: partial chunks go by scratch memory",
        "last = hi if not unit or hi == extent.nbytes else hi // unit * unit",
        "last = hi if not unit or hi == extent.nbytes else -(-hi // unit) * unit",
        f"ckpt/transfer {RESHARD}",
    ),
    Mutation(
        "loading: where a range goes in its target",
        "target = box_copy.target.at + start - box_copy.source.at",
        "target = box_copy.target.at",
        f"ckpt/transfer {RESHARD}",
    ),
    Mutation(
        "loading: gaps that are read for nothing have a bound",
        "lo - end > limits.gap_bytes\n",
        "lo - end > 64 * limits.gap_bytes\n",
        "ckpt/transfer ckpt/lazy",
    ),
    Mutation(
        "loading: a shape that differs is an error",
        "record.shape != tensor.shape",
        "len(record.shape) != len(tensor.shape)",
        "ckpt/load ckpt/match_entries ckpt/bad_state",
    ),
    Mutation(
        "loading: a tensor with two names is filled once",
        "first = self._filled.setdefault(key, item)",
        "first = self._filled.setdefault(name, item)",
        "ckpt/load ckpt/overlaps ckpt/load_together",
    ),
    Mutation(
        "loading: who reads for others takes turns",
        "self._world.size // savers + turn) % self._world.size",
        "self._world.size // savers) % self._world.size",
        "ckpt/scatter_reads ckpt/scattered_loads ckpt/lot_memory",
    ),
    Mutation(
        "loading: an older checkpoint is taken where one is damaged",
        "return [older.name for older in beside[at + 1 :]]",
        "return [older.name for older in beside[at + 2 :]]",
        "ckpt/fallback ckpt/newest",
    ),
    # Agreement.
    Mutation(
        "agreement: hashes of every rank are compared",
        "same = [all(row[i] == value for row in others) for i, value in enumerate(first, 1)]",
        "same = [all(row[i] == value for row in others[:1]) for i, value in enumerate(first, 1)]",
        AGREEING,
    ),
    Mutation(
        "agreement: the lowest rank's failure is told",
        "return self._tell(call, failures[min(causes)])",
        "return self._tell(call, failures[max(causes)])",
        AGREEING,
    ),
    Mutation(
        "agreement: ranks in other calls are told so",
        "if (found.op, found.name, found.stage) != (mine.op, mine.name, mine.stage):",
        "if found.op != mine.op:",
        AGREEING,
    ),
    Mutation(
        "agreement: who is late hears of each call that is over",
        "return self._ended[1] if self._ended and self._ended[0] >= call.number else None",
        "return self._ended[1] if self._ended and self._ended[0] == call.number else None",
        AGREEING,
    ),
    Mutation(
        "agreement: a rank that ended is noticed",
        "return process_failure(mine.stage, rank) if link.is_lost else None",
        "return None",
        "sharding/agreeing faults/rank_failures",
    ),
    # Stores.
    Mutation(
        "stores: what passes is tried again",
        "if class_of(error) is not ErrorClass.PASSING or is_over():",
        "if class_of(error) is not ErrorClass.LASTING or is_over():",
        "ckpt/object_store stores/contract",
    ),
    Mutation(
        "stores: a commit does not replace another",
        "if check is not None:\n    check()\nself._give_name(part, name, replace, written)",
        "if check is not None:\n    check()\nself._give_name(part, name, True, written)",
        "ckpt/store ckpt/commit stores/contract",
    ),
    Mutation(
        "stores: files are durable before the manifest",
        "self.flush()\nif check is not None:",
        "if check is not None:",
        "ckpt/commit faults/power_loss",
    ),
    Mutation(
        "stores: a put whose answer was lost is our own",
        "            if tries > 1 and self._has(name, data):\n                return None\n",
        "",
        "ckpt/object_store stores/faults_over_http",
    ),
    Mutation(
        "stores: a part of an upload has its number",
        "return self.part_bytes if number < self.first_later else self.later_bytes",
        "return self.part_bytes if number <= self.first_later else self.later_bytes",
        "ckpt/object_store stores/library",
    ),
    Mutation(
        "stores: only what is old is removed",
        "for left_over in _find_left_overs(store, place, places, age)\n                if left_over.is_old",
        "for left_over in _find_left_overs(store, place, places, age)\n",
        "ckpt/collecting tools/gc",
    ),
    # Live states, runs and conversions.
    Mutation(
        "live: a renewed lease lasts longer",
        "lease.ends = now + self.lease_seconds",
        "pass",
        "live/table",
    ),
    Mutation(
        "loading: columns are read evenly by all ranks",
        "return cut > 0 and prod(most[:cut]) > 1",
        "return False and prod(most[:cut]) > 1",
        "ckpt/scatter_reads",
    ),
    Mutation(
        "redistribute: a sender waits until its messages are read",
        "        self._send_and_receive(received, notes)  # the answers\n",
        "",
        "sharding/redistribute",
    ),
    Mutation(
        "live: a last chunk is compared by each rank that reads it",
        "for lo, hi in (mine, (last, last + 1)):",
        "for lo, hi in (mine,):",
        "ckpt/check_shares",
    ),
    Mutation(
        "live: a share of the chunks has no gap to the next",
        "last * (self.index + 1) // self.count",
        "last // self.count * (self.index + 1)",
        "ckpt/check_shares",
    ),
    Mutation(
        "live: memory that a reader holds is told after an update that failed, too",
        "slot.held, slot.version = max(slot.held, dropped), None",
        "slot.version = None",
        "live/publish",
    ),
    Mutation(
        "live: all ranks give the version that they update to",
        "agree_on_attempt(ranks, state, options, check, arguments, choice)",
        "agree_on_attempt(ranks, state, options, check, None, choice)",
        "live/publish",
    ),
    Mutation(
        "reads: tensors of one geometry lie at places of their own",
        "lo=piece.lo + by, hi=piece.hi + by",
        "lo=piece.lo, hi=piece.hi",
        "ckpt/transfer",
    ),
    Mutation(
        "reads: a row ends where one end has a gap",
        "steps[-1] == other_steps[-1] == row",
        "steps[-1] == row",
        "ckpt/transfer",
    ),
    Mutation(
        "state dicts: a cast that fails lets the other ranks have their messages",
        "_, error = result_or_error(partial(self._cast, name, into, target))",
        "self._cast(name, into, target)",
        "ckpt/state_dict",
    ),
    Mutation(
        "groups: a destroyed group is no single process",
        "    if not is_here:\n        raise DestroyedGroupError(",
        "    if False:\n        raise DestroyedGroupError(",
        "ckpt/some_ranks",
    ),
    Mutation(
        "live: rows longer than a chunk are compared by each rank",
        "not 0 < self.periods.get(name, 0) <= size",
        "name not in self.periods",
        "ckpt/check_shares",
    ),
    Mutation(
        "live: columns of the checkpoint are compared by each rank",
        "return all(cut.dim < dims for cut in cuts)",
        "return True",
        "ckpt/check_shares",
    ),
    Mutation(
        "live: ranks that opened other versions open the one of rank 0",
        'if agreed.same["source"] or not is_newest(url):',
        "if True:",
        "live/load_live",
    ),
    Mutation(
        "live: a lease over the socket ends with its connection",
        "                self._host.release(client.leases)\n",
        "                pass\n",
        "live/control",
    ),
    Mutation(
        "live: the answer to an interrupted request is skipped",
        "            self._interrupted = seconds\n",
        "            pass\n",
        "live/control",
    ),
    Mutation(
        "live: each descriptor belongs to one file",
        "if sorted(used) != list(range(len(received))):",
        "if max(used, default=-1) >= len(received):",
        "live/control",
    ),
    Mutation(
        "live: a forked child has its own connections",
        "        idle, client._idle = client._idle, []\n",
        "        idle: list[http.client.HTTPConnection] = []\n",
        "live/served_store",
    ),
    Mutation(
        "memory: no other file is opened in its place",
        "if _memory_name(number) not in os.readlink(path):",
        "if False:",
        "sharding/redistribute",
    ),
    Mutation(
        "live: a lease ends at its time",
        "if lease.ends <= now or is_late:",
        "if lease.ends < now or is_late:",
        "live/table",
    ),
    Mutation(
        "live: a lease that was not released leaves its version overdue",
        "                version.is_overdue = True\n",
        "",
        "live/table",
    ),
    Mutation(
        "live: a second retirement waits no longer",
        "deadline = min(deadline, row.deadline)",
        "deadline = max(deadline, row.deadline)",
        "live/table",
    ),
    Mutation(
        "live: a server has one name over HTTP",
        "        if name != self.table.name:\n            raise unknown_name(name)\n        if not rest:",
        "        if not rest:",
        "live/server",
    ),
    Mutation(
        "live: a retired version has no files",
        "if row is None or size is None or is_retired:",
        "if row is None or size is None:",
        "live/table",
    ),
    Mutation(
        "live: the newest number does not fall",
        "self._newest = max(version, self._newest)",
        "self._newest = version",
        "live/table",
    ),
    Mutation(
        "live: a lease is on one version",
        "monotonic()) == version\n",
        "monotonic()) >= 0\n",
        "live/server",
    ),
    Mutation(
        "run: the newest checkpoint stays",
        "newest[: keep.last or 1]",
        "newest[: keep.last or 0]",
        "run/retention",
    ),
    Mutation(
        "run: a metric that is NaN is never the best",
        "known = [step for step in steps if not math.isnan(step.metrics.get(metric, math.nan))]",
        "known = [step for step in steps if metric in step.metrics]",
        "run/retention",
    ),
    Mutation(
        "run: of equally good checkpoints the newest is the best",
        "sorted(newest_steps(known), key",
        "sorted(newest_steps(known)[::-1], key",
        "run/retention",
    ),
    Mutation(
        "run: a damaged checkpoint takes no place",
        "newest_steps(step for step in steps if not step.is_damaged)",
        "newest_steps(steps)",
        "run/retention",
    ),
    Mutation(
        "run: the counter decides, not the clock",
        "    counted.sort(key=lambda row: row[0], reverse=True)",
        "    counted.sort(key=lambda row: row[1], reverse=True)",
        "run/retention",
    ),
    Mutation(
        "run: a start is after all that it found",
        "self.epoch = 1 + max(",
        "self.epoch = max(",
        "ckpt/run/steps.py run/checkpointer",
    ),
    Mutation(
        "run: a step whose save failed can be saved again",
        "self.last_step = step - 1",
        "self.last_step = step",
        "run/checkpointer",
    ),
    Mutation(
        "run: the seconds between saves begin anew",
        "self._saves.is_retrying, self._began = False, time.monotonic()",
        "self._saves.is_retrying = False",
        "run/checkpointer",
    ),
    Mutation(
        "run: steps are decided anew after a restore",
        "self._decided, self._exchange_at = None, 0",
        "self._exchange_at = 0",
        "run/checkpointer",
    ),
    Mutation(
        "run: a folder such as step-007 is no step",
        "if matched is None or folder_name(int(matched[1])) != name:",
        "if matched is None:",
        "run/checkpointer",
    ),
    Mutation(
        "run: a local step of other hosts does not count",
        "            if hosts == mine:\n",
        "            if hosts:\n",
        "run/local_tier",
    ),
    Mutation(
        "mapping: tensors of one rule must have one dtype",
        "other = next((member for member in others if member.dtype != first.dtype), None)",
        "other = None",
        "mapping/apply",
    ),
    Mutation(
        "mapping: a size is a whole number",
        "if number < 1 or (dividing and value % number):",
        "if number < 1:",
        "mapping/apply",
    ),
    Mutation(
        "mapping: 01 is no index",
        'f"(?P<{axis[1]}>0|[1-9][0-9]{{0,8}})"',
        'f"(?P<{axis[1]}>[0-9]{{1,9}})"',
        "mapping/apply",
    ),
    Mutation(
        "mapping: floats of two dtypes have none in common",
        "if is_for_all and len(dtypes) == 1 else None",
        "if is_for_all else None",
        "mapping/casts",
    ),
    Mutation(
        "convert: one process goes on in a folder",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "ckpt/convert_resume",
    ),
    Mutation(
        "convert: a file has the digest of the journal",
        "if content is not None and [*content] == line[1:]:",
        "if content is not None:",
        "ckpt/convert_resume",
    ),
    Mutation(
        "convert: files of another conversion are removed",
        "                    remove(other)\n",
        "                    pass\n",
        "ckpt/convert_resume",
    ),
    Mutation(
        "convert: other options begin anew",
        "options = (target.format, changes, changes.parameters_of(source), total)",
        "options = (target.format,)",
        "ckpt/convert_resume",
    ),
    Mutation(
        "convert: a folder that has appeared stays",
        "                if not overwrite:\n"
        "                    raise ExistsError(_has_come(target))\n"
        "                check_replaceable(target, options, overwrite)\n",
        "                check_replaceable(target, options, overwrite)\n",
        "ckpt/convert_targets",
    ),
    Mutation(
        "convert: a result has the dtypes of its source",
        "if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):",
        "if tensor.shape != other.shape:",
        "ckpt/read_back",
    ),
    Mutation(
        "convert: a result has the values of its source",
        "if name not in found and not is_empty:",
        "if False:",
        "ckpt/read_back",
    ),
    Mutation(
        "convert: records that are read in part are compared",
        "                if plan is plans[-1]:\n                    self.finish()\n",
        "",
        "ckpt/convert",
    ),
)


class Place(NamedTuple):
    """Where the code of a mutation stands."""

    path: Path
    lo: int
    """The first character."""
    hi: int

    def with_code(self, code: str) -> str:
        """The text of the file with other code here, indented as the code before."""
        text = self.path.read_text()
        start = text.rfind("\n", 0, self.lo) + 1
        margin = text[start : self.lo]
        indent = margin if not margin.strip() else margin[: len(margin) - len(margin.lstrip())]
        lines = dedent(code).strip().replace("\n", "\n" + indent)
        return text[: self.lo] + (lines or "pass") + text[self.hi :]


LAYOUT = frozenset({tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})
BETWEEN = "\0"
"""Stands between two tokens, and at both ends."""


class Code(NamedTuple):
    """A text as tokens, without layout, comments and trailing commas."""

    joined: str
    places: list[tuple[int, int]]
    """The first character of each token, and the end."""

    @classmethod
    def of(cls, text: str) -> Code:
        """The tokens of a whole file, or of a part of one that may end anywhere."""
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        found: list[tuple[str, int, int]] = []
        try:
            for token in tokenize.generate_tokens(StringIO(text).readline):
                if token.type in LAYOUT or token.type == tokenize.COMMENT or not token.string:
                    continue
                if token.string in ")]}" and found and found[-1][0] == ",":
                    found.pop()
                (row, column), (last, end) = token.start, token.end
                found.append((token.string, starts[row - 1] + column, starts[last - 1] + end))
        except (tokenize.TokenError, IndentationError):  # a part ends within brackets, or a block
            pass
        joined = "".join(BETWEEN + string for string, _, _ in found) + BETWEEN
        return cls(joined, [(lo, hi) for _, lo, hi in found])

    def find(self, part: Code) -> Iterator[tuple[int, int]]:
        """Yields the first character, and the end, of each place where a part stands."""
        at = self.joined.find(part.joined)
        while at >= 0:
            first = self.joined.count(BETWEEN, 0, at)
            yield self.places[first][0], self.places[first + len(part.places) - 1][1]
            at = self.joined.find(part.joined, at + 1)


@cache
def codes(root: Path) -> dict[Path, Code]:
    """The product's files as tokens."""
    files = (path for package in PRODUCT for path in sorted((root / package).rglob("*.py")))
    return {path: Code.of(path.read_text()) for path in files}


def located(mutation: Mutation, root: Path) -> list[Place]:
    """The places of the product that have the code of a mutation."""
    part = Code.of(dedent(mutation.old))
    return [Place(path, *place) for path, code in codes(root).items() for place in code.find(part)]


def copied(target: Path) -> None:
    """A copy of the working tree, of the files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def outcome(mutation: Mutation, root: Path, log: Path) -> str:
    """`killed by TEST`, `survived`, or `no answer` of pytest; the mutation is taken back."""
    [place] = located(mutation, root)
    path, text = place.path, place.path.read_text()
    path.write_text(place.with_code(mutation.new))
    try:
        status = tested(mutation.paths, root, log)
    finally:
        path.write_text(text)
    if status > 1:
        print(log.read_text()[-3000:], file=sys.stderr)
        return f"no answer: pytest ended with status {status}"
    if status < 0:
        return f"killed by signal {-status}"
    failed = [line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"killed by {failed[0].split()[1] if failed else 'a test'}" if status else "survived"


def tested(paths: Sequence[str], root: Path, log: Path) -> int:
    """The exit status of pytest in a forked process, which has imported all but the product."""
    process = os.fork()
    if not process:
        status = 70
        try:
            with log.open("wb") as file:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
            os.chdir(root)
            sys.path.insert(0, str(root))
            os.environ |= {"PYTHONPATH": str(root), "CKPT_TESTS_HASH_SEEDS": "1"}
            signal.alarm(RUN_SECONDS)
            options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
            options += ["-m", "not slow and not gpu"]  # as `make test-all`
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            status = int(pytest.main([*options, *paths]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def chosen(names: Sequence[str]) -> Iterator[Mutation]:
    """The mutations whose names begin with one of these; all of them for none."""
    for mutation in MUTATIONS:
        if not names or mutation.name.startswith(tuple(names)):
            yield mutation


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = [
        f"{mutation.name}: the code is {len(found)} times in the product"
        for mutation in chosen(options.names)
        if len(found := located(mutation, ROOT)) != 1
    ]
    stale += [
        f"{mutation.name}: there is no {path}"
        for mutation in chosen(options.names)
        for path in mutation.paths
        if not (ROOT / path).is_file()
    ]
    print("\n".join(stale), file=sys.stderr)
    if stale or options.check:
        return 2 if stale else 0
    survivors = 0
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder, "copy")
        copied(root)
        for mutation in chosen(options.names):
            began = time.monotonic()
            [place] = located(mutation, root)
            told = outcome(mutation, root, Path(folder, "log"))
            survivors += not told.startswith("killed")
            seconds = time.monotonic() - began
            where = place.path.relative_to(root)
            print(f"{mutation.name} | {where} | {told} | {seconds:.0f} s", flush=True)
    print(f"{survivors} survived", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
