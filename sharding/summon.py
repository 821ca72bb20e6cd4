"""Whole parameters for a user to look at and to change: in memory of their own, for a while."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn

from sharding.flat_bucket import FlatBucket, flat_buckets
from sharding.full_buffer import FullBuffer
from sharding.runtime import UNIT, units_of
from sharding.unit import Unit


@contextmanager
def summoned(
    module: nn.Module,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """Inside, modules have whole parameters; see `FullyShardedDataParallel.summon_full_params`."""
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in "
            "the whole parameters being copied to CPU memory on every rank of the same machine, "
            "which may not have memory for all of them. Use rank0_only=True as well.",
            stacklevel=4,
        )
    units = list(units_of((module,)))
    if not recurse:
        units = [unit for unit in units if module in unit.modules]
    for unit in units:
        if unit.is_running:
            raise AssertionError("Cannot manually unshard parameters during forward/backward")
        if unit.summoned:
            raise AssertionError(
                "Cannot manually unshard parameters when already unsharding parameters"
            )
    with ExitStack() as stack:
        for unit in units:
            for bucket in flat_buckets(unit.buckets):
                stack.enter_context(
                    _whole(bucket, writeback, rank0_only, offload_to_cpu, with_grads)
                )
            stack.enter_context(_marked(unit))
        yield


@contextmanager
def whole_unit(unit: Unit, writeback: bool) -> Iterator[None]:
    """Inside, one unit's parameters are whole in its modules."""
    with ExitStack() as stack:
        for bucket in flat_buckets(unit.buckets):
            stack.enter_context(_whole(bucket, writeback, False, False, False))
        yield


@contextmanager
def _marked(unit: Unit) -> Iterator[None]:
    unit.summoned = True
    try:
        yield
    finally:
        unit.summoned = False


@contextmanager
def _whole(
    bucket: FlatBucket, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    bucket.reshard()
    buffer = bucket.fetch()
    gradients = bucket.fetch_gradients() if with_grads else None
    shown = not rank0_only or bucket.is_first
    wholes: list[nn.Parameter] = []
    changed: list[torch.Tensor | None] = []
    if shown:
        if offload_to_cpu:
            buffer = buffer.to(torch.device("cpu"))
        wholes = bucket.place_full(buffer)
        if gradients is not None:
            for whole, gradient in zip(wholes, gradients, strict=True):
                whole.grad = gradient
    try:
        yield
    finally:
        if shown:
            changed = [whole.grad for whole in wholes]
            bucket.absorb(buffer)
            bucket.place_full_no_more()
        if writeback or not bucket.is_divided:  # else there would be nothing to go back to
            _write_back(bucket, buffer, rank0_only)
            if gradients is not None and shown:
                bucket.write_back_gradients(changed)


def _write_back(bucket: FlatBucket, buffer: FullBuffer, from_first: bool) -> None:
    if from_first:
        for peers in (bucket.sharing.peers, bucket.sharing.replicas):
            if peers.group is not None:
                dist.broadcast(buffer.raw, dist.get_global_rank(peers.group, 0), group=peers.group)
    bucket.write_back(buffer)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a module that was given to a front door."""
    unit: Unit | None = getattr(module, UNIT, None)
    return unit
