"""`ckpt cp`: a run, or one checkpoint, as it is, to another disk or bucket."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field
from functools import partial

from ckpt.display import count, printable, size
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_quiet, add_storage_options, add_storage_options_of, mapping
from tools.text import colour, json_text, place, progress

HELP = Help(
    summary="copy a run or a checkpoint to another disk or bucket, and check the copy",
    description="""\
Copies a checkpoint of ckpt's own format, or all of a run with their pins, as they are. The bytes
of a copy are read back and compared with their checksums before it appears. A copy that was
interrupted goes on when the command is repeated; checkpoints that are there stay.""",
    examples=(
        ("ckpt cp runs/gpt s3://bucket/gpt", "copies all checkpoints of a run into a bucket"),
        ("ckpt cp s3://bucket/gpt/step-100 best", "copies one checkpoint to this disk"),
    ),
    codes=(*OF_A_READER, ExitCode.EXISTS),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The place to copy from, and that of the copy."""

    src: str
    dst: str
    quiet: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)
    dst_storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a folder of checkpoints, or one checkpoint")
    parser.add_argument("dst", metavar="DST", help="the folder of the copy, as a path or URL")
    add_quiet(parser)
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="the copied checkpoints as JSON"
    )
    add_storage_options(parser)
    add_storage_options_of(parser, "DST")


def run(options: Options) -> int:
    """Prints each checkpoint as soon as its copy is whole."""
    from ckpt.run.copy import copy, nbytes_of

    storage = mapping(options.storage_options)
    done = []
    with progress("cp", partial(nbytes_of, options.src, storage), options.quiet) as advance:
        for step in copy(
            options.src,
            options.dst,
            progress=advance,
            storage_options=storage,
            dst_storage_options=mapping(options.dst_storage_options),
        ):
            done.append(step)
            if not (options.quiet or options.as_json):
                what = "copied and checked" if step.copied_bytes else "is there"
                text = f"{count(step.files, 'file')}, {size(step.nbytes)}; "
                print(f"{place(step.url)}: {text}{colour(what, 'sound')}")
    if options.as_json:
        rows = [asdict(step) for step in done]
        print(json_text({"src": options.src, "dst": options.dst, "checkpoints": rows}))
    elif not options.quiet and len(done) > 1:
        copied = sum(step.copied_bytes > 0 for step in done)
        total = size(sum(step.copied_bytes for step in done))
        there = f", {len(done) - copied:,} were there" if len(done) > copied else ""
        print(f"{printable(place(options.dst))}: {count(copied, 'checkpoint')}, {total}{there}")
    return ExitCode.FINE
