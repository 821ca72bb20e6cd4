"""Merges checkpoints, or the steps of a run, into one: `ckpt.merge`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt.arguments import DtypeName, FormatName
from ckpt.converting.convert import ConvertReport, convert
from ckpt.converting.weighted_sum import WeightedSum
from ckpt.errors import ArgumentError
from ckpt.mapping.changes import Part
from ckpt.run.steps import run_steps
from ckpt.stores.store import Options, join_url
from formats.native.shard import Progress
from sharding.errors import without_secrets

if TYPE_CHECKING:
    from sharding.agreement.ranks import Group

__all__ = ["merge"]

Url = str | os.PathLike[str]


def merge(
    sources: Sequence[Url],
    dst: Url,
    *,
    weights: Sequence[float] | None = None,
    last: int | None = None,
    ema: float | None = None,
    in_float64: bool = False,
    lora: Url | Sequence[Url] = (),
    to: FormatName | None = None,
    select: str | None = None,
    part: Part | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    config: Url | None = None,
    dtype: DtypeName | Mapping[str, DtypeName | None] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    verify: bool = False,
    group: Group = "self",
    progress: Progress | None = None,
    storage_options: Options = None,
    dst_storage_options: Options = None,
) -> ConvertReport:
    """Writes the weighted sum of checkpoints of one model to `dst`; by default their mean.

    One process calls this, or all ranks of `group`. The sources have any formats and world sizes;
    names, shapes, plain values and files beside the weights are those of the first. A few blocks
    are in memory. The result has equal bits whatever the number of ranks.

    Args:
        sources: checkpoints; with `last`, the folder of a run.
        weights: a number for each source. They need no sum of one: `[1, 0.5, -0.5]` adds half of
            the difference of the last two to the first.
        last: take so many of the newest steps of the one run in `sources`, the newest last.
        ema: the decay of an exponential average, in place of `weights`: each next source counts
            `1 - ema`.
        in_float64: whether all sums are in float64; by default in float32.
        lora: folders of LoRA adapters of PEFT, each of which adds the product of its matrices.
        dst, to, select, part, include, exclude, config, dtype, overwrite, dry_run, resume, verify,
        group, progress, storage_options, dst_storage_options: as for `ckpt.convert`.

    Raises:
        ArgumentError: a tensor that is chosen has no sum: a source lacks it, or has another shape,
            or it has whole numbers that differ; or the number of weights or steps is wrong; or a
            module of an adapter has no tensor.
        UnsupportedError: an adapter is of another kind, such as DoRA.
        Others: as `ckpt.convert`.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (1, 2, 6):
    ...         ckpt.save(f"{folder}/run/step-{step}", {"w": torch.full((2,), float(step))})
    ...     report = ckpt.merge([f"{folder}/run"], f"{folder}/mean", last=3)
    ...     ckpt.read(f"{folder}/mean")
    {'w': tensor([3., 3.])}
    """
    return convert(
        sum_of(sources, weights, last, ema, in_float64, storage_options, lora),
        dst,
        to=to,
        select=select,
        part=part,
        include=include,
        exclude=exclude,
        config=config,
        dtype=dtype,
        overwrite=overwrite,
        dry_run=dry_run,
        resume=resume,
        verify=verify,
        group=group,
        progress=progress,
        storage_options=storage_options,
        dst_storage_options=dst_storage_options,
    )


def sum_of(
    sources: Sequence[Url],
    weights: Sequence[float] | None,
    last: int | None,
    ema: float | None,
    in_float64: bool,
    options: Options,
    lora: Url | Sequence[Url] = (),
) -> WeightedSum:
    """Returns the sum that the arguments of `merge` name."""
    urls, adapters = (
        [
            os.fspath(url)
            for url in ([argument] if isinstance(argument, str | os.PathLike) else argument)
        ]
        for argument in (sources, lora)
    )
    if last is not None:
        if len(urls) != 1 or type(last) is not int or last < 1:
            raise ArgumentError(f"last={last!r} of {len(urls)} sources; give one run and a number")
        steps = [step for step in run_steps(urls[0], storage_options=options) if step.is_sound]
        if len(steps) < last:
            raise ArgumentError(
                f"{without_secrets(urls[0])} has {len(steps)} checkpoints, and last={last}"
            )
        urls = [join_url(urls[0], last_step.name) for last_step in reversed(steps[:last])]
    if weights is not None and ema is not None:
        raise ArgumentError("ema= is in place of weights=; give one of them")
    if ema is not None:
        weights = decaying(len(urls), ema)
    elif weights is None:
        weights = [1 / len(urls)] * len(urls)
    return WeightedSum(tuple(urls), tuple(map(float, weights)), in_float64, tuple(adapters))


def decaying(count: int, decay: float) -> tuple[float, ...]:
    """Returns the weights of an exponential average over `count` sources, the newest last.

    >>> decaying(3, 0.5)
    (0.25, 0.25, 0.5)
    """
    if not 0 <= decay <= 1:
        raise ArgumentError(f"ema={decay}; give a decay from 0 to 1, such as 0.9")
    later = (decay ** (count - 1 - number) for number in range(1, count))
    return (decay ** (count - 1), *((1 - decay) * weight for weight in later))
