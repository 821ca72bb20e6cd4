"""`ckpt convert`: any checkpoint into a file or folder that others open.

`torchrun --nproc-per-node N -m ckpt convert SRC DST` does it with N processes on one host or many.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from ckpt.arguments import DtypeName, FormatName, KindName
from ckpt.display import count, printable, size
from formats.detect import WRITTEN
from sharding.errors import format_names
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import (
    MappingOption,
    Option,
    Pair,
    add_name_changes,
    add_name_patterns,
    add_quiet,
    add_storage_options,
    add_storage_options_of,
    by_first,
    mapping,
    mappings_of,
    ranks_in,
)
from tools.text import columns, json_text, place, progress, size_of, tell, tensor_bytes

if TYPE_CHECKING:
    from ckpt.converting.convert import ConversionPlan, ConvertReport
    from ckpt.converting.weighted_sum import WeightedSum
    from ckpt.mapping.changes import Part
    from sharding.agreement.ranks import Group

HELP = Help(
    summary="write a checkpoint in another format, in bounded memory",
    description="""\
Writes a checkpoint, or a part of it, in another format. The checksums of all that is read are
compared, memory stays bounded, and a loss of weights is an error that names them.
`torchrun --nproc-per-node N -m ckpt convert SRC DST` shares the work among N processes.""",
    examples=(
        (
            "ckpt convert runs/gpt/step-100 llama --to hf --model-only",
            "a folder for from_pretrained",
        ),
        (
            "ckpt convert runs/gpt/step-100 model.safetensors --model-only --dtype bfloat16",
            "the weights as one file, in 16 bits",
        ),
    ),
    codes=(*OF_A_READER, ExitCode.EXISTS),
)
SHOWN_LEFT_OUT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The target, what of the source is written, and what is printed: as `ckpt merge` has them."""

    dst: str
    to: FormatName | None
    select: str | None
    part: Part | None
    include: list[str] | None
    exclude: list[str] | None
    config: str | None
    dtype: list[Pair] | None
    overwrite: bool
    resume: bool
    dry_run: bool
    verify: bool
    verbose: bool
    quiet: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)
    dst_storage_options: list[Option] | None = field(default=None, repr=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `ckpt.convert` and `ckpt.merge` with these values."""
        names = "to select part include exclude config overwrite resume dry_run verify"
        return {name: getattr(self, name) for name in names.split()} | {
            "dtype": dtypes_of(self.dtype),
            "storage_options": mapping(self.storage_options),
            "dst_storage_options": mapping(self.dst_storage_options),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Written):
    """The source, the target, and the changes on the way."""

    src: str
    mappings: list[MappingOption] | None
    parameters: list[tuple[str, int]] | None
    rename: list[Pair] | None
    prefix: str
    max_shard_bytes: int | None
    allow_loss: bool
    compress: bool
    kind: KindName | None
    world_size: int | None
    since: str | None


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        help="a path or URL; its format is seen from what is there, and the checksums of the parts "
        "that are read are compared",
    )
    add("dst", metavar="DST", help="a path or URL that does not exist yet")
    add_parts(parser, "SRC", "model", "optimizer")
    add_name_changes(parser, "SRC")
    add("--prefix", default="", metavar="NAME", help="put NAME and a dot before all names, last")
    add(
        "--max-shard-size",
        dest="max_shard_bytes",
        metavar="SIZE",
        type=size_of,
        help="the largest file of hf or ckpt: 5GB, 500M, 2GiB; default 5GB",
    )
    add(
        "--allow-loss",
        action="store_true",
        help="convert also if weights of SRC are left out or change their dtype, and name them; "
        "without it that is an error, and nothing is written",
    )
    add("--compress", action="store_true", help="zstd; only for ckpt's own format")
    add(
        "--kind",
        choices=get_args(KindName),
        help="write what N ranks would have saved, in a file for each rank: whole tensors whose "
        "bytes they divide evenly (full), rows as torch.chunk cuts them (sharded), or even runs "
        "of row-major elements (local); loading fits any number of ranks in any case",
    )
    add(
        "--world-size",
        metavar="N",
        type=ranks_in,
        help="the number of ranks, 1 or more; goes with --kind only, and has to be given for "
        "sharded and local; any format but ckpt holds full tensors of 1 rank",
    )
    add(
        "--since",
        metavar="OLD",
        help="for hf: write only what is different from OLD, an earlier version, into a folder "
        "weight_v000007, as slime and SGLang's pull_weights read it",
    )
    add_target(parser)


def add_parts(parser: ArgumentParser, whose: str, *parts: str) -> None:
    """Declares the format to write and the entries of `whose` that are written."""
    parser.add_argument(
        "--to",
        choices=get_args(FormatName),
        help=f"the format to write; without it that of DST's ending ({', '.join(WRITTEN)}), or "
        "without an ending a folder of ckpt's own",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--select", metavar="KEYPATH", help="only what is below this key path, which is dropped"
    )
    for part in parts:
        group.add_argument(
            f"--{part}-only",
            dest="part",
            action="store_const",
            const=part,
            help=f"only the {part}, wherever it is in {whose}: --select without its key path",
        )
    add_name_patterns(parser)


def add_target(parser: ArgumentParser) -> None:
    """Declares the ways to write and to tell of it."""
    add = parser.add_argument
    add(
        "--overwrite",
        action="store_true",
        help="replace what is at DST; in a bucket, a file or a checkpoint of ckpt's own",
    )
    add(
        "--dtype",
        action="append",
        type=dtype_pair,
        metavar="[PATTERN=]DTYPE",
        help="cast tensors of 16-bit floats and larger (example: bfloat16), or those with such new "
        "names (example: '*norm.weight=float32'; keep casts none); repeatable, the first pattern "
        "counts; smaller floats, which mean little without their scales, stay and are named",
    )
    add("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    add(
        "--resume",
        action="store_true",
        help="go on where this command was interrupted; for hf and dcp on a disk",
    )
    add("--verify", action="store_true", help="read the result back and compare every byte")
    add("-v", "--verbose", action="store_true", help="print each name with the names it comes from")
    add_quiet(parser)
    add("--json", dest="as_json", action="store_true", help="the summary as JSON; -v: and the plan")
    add_storage_options(parser)
    add_storage_options_of(parser, "DST")


def run(options: Options) -> int:
    """Convert, and print what was written and what was left out."""
    return write(
        options,
        "convert",
        options.src,
        options.src,
        mapping=mappings_of(options.mappings),
        rename=by_first(options.rename, "--rename"),
        prefix=options.prefix,
        parameters=by_first(options.parameters, "--set"),
        max_shard_bytes=options.max_shard_bytes,
        allow_loss=options.allow_loss,
        compress=options.compress,
        kind=options.kind,
        world_size=options.world_size,
        since=options.since,
    )


def write(
    options: Written, label: str, src: str | WeightedSum, measured: str, **arguments: Any
) -> int:
    """Converts `src` with further arguments, on all ranks of torchrun, and prints the result.

    The progress is that of as many bytes as the checkpoint `measured` has.
    """
    from ckpt.converting.convert import convert

    began = time.monotonic()
    storage = mapping(options.storage_options)
    with (
        ranks_of_torchrun() as (group, is_first),
        progress(label, lambda: tensor_bytes(measured, storage), options.quiet) as advance,
    ):
        advance = advance if is_first else None
        arguments = {**arguments, **options.arguments}
        report = convert(src, options.dst, group=group, progress=advance, **arguments)
    if is_first:
        _show(options, report, time.monotonic() - began)
    return ExitCode.FINE


def _show(options: Written, report: ConvertReport, seconds: float) -> None:
    if options.as_json:
        print(json_text(_summary(options, report, seconds)))
    elif not options.quiet:
        for line in _lines(options, report, seconds):
            print(line)
    if report.model_files == () and not options.quiet:
        has, again = ("would have", "") if options.dry_run else ("has", " --overwrite")
        print(end="", flush=True)  # the warning is the last line
        tell(
            f"warning: {place(report.dst)} {has} no config.json, and from_pretrained needs one: "
            f"repeat the command with --config FOLDER{again}, the folder of the model with its "
            "config.json and tokenizer"
        )


def _summary(options: Written, report: ConvertReport, seconds: float) -> dict[str, object]:
    summary = {each.name: getattr(report, each.name) for each in fields(report)}
    del summary["plan"]
    summary |= {
        "bytes": summary.pop("nbytes"),
        "written": not options.dry_run,
        "verified": options.verify and not options.dry_run,
        "seconds": round(seconds, 3),
    }
    if report.plan is not None and (options.dry_run or options.verbose):
        summary["plan"] = asdict(report.plan)
    return summary


def _lines(options: Written, report: ConvertReport, seconds: float) -> Iterator[str]:
    plan = report.plan
    if plan is not None and (options.dry_run or options.verbose):
        yield from _plan_lines(plan)
    written = report.target_format
    if report.kind is not None and report.world_size is not None:
        written += f", {report.kind} over {count(report.world_size, 'rank')}"
    done = f"in {seconds:.1f} s"
    if options.dry_run and plan is not None:
        done = (
            f"to write, {size(plan.read_bytes)} to read, at most {size(plan.memory_bytes)} in "
            "memory; a dry run: nothing was written"
        )
    elif options.verify:
        done += ", read back and equal"
    yield (
        f"{place(report.src)} ({report.source_format}) -> {place(report.dst)} "
        f"({written}): {count(report.tensors, 'tensor')}, {size(report.nbytes)} {done}"
    )
    if plan is not None and plan.excluded:
        names = _format_names(plan.excluded)
        yield f"note: {count(len(plan.excluded), 'name')} left out by the mapping: {names}"
    for line in report.lost:
        yield f"lost: {printable(line)}"
    if report.left_out:
        yield (
            f"note: {count(len(report.left_out), 'value')} left out, which {report.target_format} "
            f"cannot hold: {_format_names(report.left_out)}"
        )
    if report.beside:
        took = "would take" if options.dry_run else "took"
        first, *others = report.beside
        more = f" (or {_format_names(others)})" if others else ""
        yield (
            f"note: {took} the weights alone, {printable(report.weights)}; for another part pass "
            f"--select {printable(shlex.quote(first))}{more}, for everything --select ''"
        )
    if report.prefix:
        yield (
            f"note: names of the model keep the prefix '{printable(report.prefix)}.'; --model-only "
            "takes the model alone, with its own names"
        )
    if report.model_files:
        copied = "would be copied" if options.dry_run else "copied"
        yield f"note: {copied} beside the weights: {_format_names(report.model_files)}"
    if report.not_copied:
        yield f"note: not copied, copy them if they belong: {_format_names(report.not_copied)}"
    if report.tied:
        yield (
            f"note: {count(len(report.tied), 'tied name')} stored once, under the other name: "
            f"{_format_names(report.tied)}"
        )
    if report.became_text:
        yield (
            f"note: {report.target_format} has no keys but text; those that were numbers are text "
            f"now in {_format_names(report.became_text)}"
        )
    if report.not_cast:
        yield (
            f"note: {count(len(report.not_cast), 'tensor')} of smaller floats not cast: "
            f"{_format_names(report.not_cast)}"
        )


def _plan_lines(plan: ConversionPlan) -> Iterator[str]:
    """A line for each tensor: the names that it comes from, its own, dtype, shape and bytes."""
    rows = []
    for tensor in plan.tensors:
        dtype = tensor.dtype
        if tensor.source_dtype != dtype:
            dtype = f"{tensor.source_dtype} -> {dtype}"
        shape = "[" + ", ".join(map(str, tensor.shape)) + "]"
        nbytes = size(tensor.nbytes) if tensor.tied_to is None else "tied"
        sources = " + ".join(map(printable, tensor.sources[:SHOWN_LEFT_OUT]))
        more = len(tensor.sources) - SHOWN_LEFT_OUT
        sources += f" and {more} more" if more > 0 else ""
        rows.append((sources, "->", printable(tensor.name), dtype, shape, nbytes))
    if rows:
        yield from columns(rows, right=[5])


def _format_names(names: Sequence[str]) -> str:
    return printable(format_names(names, SHOWN_LEFT_OUT))


def dtype_pair(text: str) -> Pair:
    """A dtype with the pattern of its names, for argparse.

    >>> dtype_pair("bfloat16"), dtype_pair("*norm=float32"), dtype_pair("/a=b/=keep")
    (('*', 'bfloat16'), ('*norm', 'float32'), ('/a=b/', 'keep'))
    """
    pattern, _, dtype = text.rpartition("=")
    return pattern or "*", dtype


def dtypes_of(pairs: Sequence[Pair] | None) -> dict[str, DtypeName | None]:
    """The dtypes by pattern; that for all other names last."""
    ordered = sorted(by_first(pairs, "--dtype").items(), key=lambda pair: pair[0] == "*")
    return {
        pattern: None if dtype == "keep" else cast(DtypeName, dtype) for pattern, dtype in ordered
    }


if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    runpy.run_module("ckpt", run_name="__main__")


_OF_A_RANK = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""The variables that torchrun sets for a process; together no other process has their values."""


def _is_inherited() -> bool:
    """Whether the variables of torchrun are those of the parent; False where it cannot be read."""
    try:
        environ = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(os.fsencode(f"{name}={os.environ.get(name, '')}") in environ for name in _OF_A_RANK)


@contextmanager
def ranks_of_torchrun() -> Iterator[tuple[Group, bool]]:
    """Returns the group of all processes that torchrun has started, and whether this is rank 0.

    Without torchrun the group is this process alone, and so it is for a command that a process of
    torchrun starts: the other ranks do not call it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _is_inherited():
        yield "self", True
        return
    import torch.distributed as dist  # a second of start-up, which one process does not need

    dist.init_process_group("gloo")
    try:
        yield None, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
