"""`ckpt convert`: any checkpoint into a file or folder that others open."""

from __future__ import annotations

import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from ckpt.arguments import DtypeName, FormatName, KindName
from ckpt.display import count, printable, size
from tools.exit_codes import ExitCode
from tools.name_patterns import add_name_patterns
from tools.progress import progress, tensor_bytes
from tools.quantities import size_of
from tools.storage_options import Option, add_storage_options, add_storage_options_of, mapping
from tools.text import json_text

SUMMARY = "write a checkpoint in another format, in bounded memory"
MAX_SHARD_BYTES = 5_000_000_000
SHOWN_LEFT_OUT = 5


@dataclass(frozen=True, slots=True)
class Options:
    """What to convert, and into what."""

    src: str
    dst: str
    to: FormatName | None
    select: str | None
    include: list[str] | None
    exclude: list[str] | None
    max_shard_bytes: int
    overwrite: bool
    compress: bool
    dtype: DtypeName | None
    kind: KindName | None
    world_size: int | None
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)
    dst_storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("src", metavar="SRC", help="a path or URL; its format is seen from what is there")
    add("dst", metavar="DST", help="a path or URL that does not exist yet")
    add(
        "--to",
        choices=get_args(FormatName),
        help="the format to write; without it safetensors or torch where DST ends in "
        ".safetensors, .pt, .pth or .bin, else a folder of ckpt's own",
    )
    add("--select", metavar="KEYPATH", help="only what is below this key path, which is dropped")
    add_name_patterns(parser)
    add(
        "--max-shard-size",
        dest="max_shard_bytes",
        metavar="SIZE",
        type=size_of,
        default=MAX_SHARD_BYTES,
        help="the largest file of a Hugging Face folder: 5GB, 500M, 2GiB; default 5GB",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace what is at DST; in a bucket, a file or a checkpoint of ckpt's own",
    )
    add("--compress", action="store_true", help="zstd; only for ckpt's own format")
    add(
        "--dtype",
        metavar="DTYPE",
        help="cast tensors of 16-bit floats and larger (example: bfloat16); smaller floats, which "
        "mean little without their scales, stay as they are and are named",
    )
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
        type=_ranks,
        help="the number of ranks, 1 or more; goes with --kind only, and has to be given for "
        "sharded and local; any format but ckpt holds full tensors of 1 rank",
    )
    add("--json", dest="as_json", action="store_true", help="the summary as JSON")
    add_storage_options(parser)
    add_storage_options_of(parser, "DST")


def run(options: Options) -> int:
    """Convert, and print what was written and what was left out."""
    from ckpt.converting import convert

    began = time.monotonic()
    told = mapping(options.storage_options)
    with progress("convert", lambda: tensor_bytes(options.src, told)) as advance:
        report = convert(
            options.src,
            options.dst,
            to=options.to,
            select=options.select,
            include=options.include,
            exclude=options.exclude,
            max_shard_bytes=options.max_shard_bytes,
            overwrite=options.overwrite,
            compress=options.compress,
            dtype=options.dtype,
            kind=options.kind,
            world_size=options.world_size,
            progress=advance,
            storage_options=told,
            dst_storage_options=mapping(options.dst_storage_options),
        )
    seconds = time.monotonic() - began
    left_out = tuple(report.left_out)
    if options.as_json:
        summary = {
            "src": report.src,
            "dst": report.dst,
            "source_format": report.source_format,
            "target_format": report.target_format,
            "kind": report.kind,
            "world_size": report.world_size,
            "tensors": report.tensors,
            "bytes": report.nbytes,
            "left_out": left_out,
            "became_text": report.became_text,
            "not_cast": report.not_cast,
            "beside": report.beside,
            "seconds": round(seconds, 3),
        }
        print(json_text(summary))
        return ExitCode.FINE
    written = report.target_format
    if report.kind is not None and report.world_size is not None:
        written += f", {report.kind} over {count(report.world_size, 'rank')}"
    print(
        f"{printable(str(report.src))} ({report.source_format}) -> {printable(str(report.dst))} "
        f"({written}): {count(report.tensors, 'tensor')}, {size(report.nbytes)} in "
        f"{seconds:.1f} s"
    )
    if left_out:
        print(
            f"note: {count(len(left_out), 'value')} left out, which {report.target_format} cannot "
            f"hold: {_shown(left_out)}"
        )
    if report.beside:
        print(
            f"note: only the weights were converted; --select takes one of {_shown(report.beside)}"
        )
    if report.became_text:
        print(
            f"note: {report.target_format} has no keys but text; those that were numbers are text "
            f"now in {_shown(report.became_text)}"
        )
    if report.not_cast:
        print(
            f"note: {count(len(report.not_cast), 'tensor')} of smaller floats not cast: "
            f"{_shown(report.not_cast)}"
        )
    return ExitCode.FINE


def _shown(names: Sequence[str]) -> str:
    """The first few names."""
    more = len(names) - SHOWN_LEFT_OUT
    first = ", ".join(printable(name) for name in names[:SHOWN_LEFT_OUT])
    return first + (f" and {more} more" if more > 0 else "")


def _ranks(text: str) -> int:
    """A number of ranks, for argparse."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ArgumentTypeError(f"{text!r} is no number of ranks: 1, 2, 3 ...")
    return int(text)
