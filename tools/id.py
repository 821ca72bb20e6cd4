"""`ckpt id`: the digest of a checkpoint's weights, whatever its format and number of ranks."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, field

from ckpt.display import printable
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_name_patterns, add_storage_options, mapping
from tools.text import json_text, place, progress, tensor_bytes

HELP = Help(
    summary="print a digest of the weights that no format or number of ranks changes",
    description="""\
Prints a SHA-256 of the names, dtypes, shapes and elements of all tensors. Equal weights have equal
digests, in any format and of any number of ranks; `ckpt.id(model)` has that of a module. -v prints
a line for each tensor, to compare with diff(1).""",
    examples=(
        ("ckpt id runs/gpt/step-100 --select model", "the digest of the weights of a training"),
        ("ckpt id -v model.safetensors", "also that of each tensor"),
    ),
    codes=OF_A_READER,
)


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoints, and what of them counts."""

    checkpoints: list[str]
    select: str | None
    include: list[str] | None
    exclude: list[str] | None
    verbose: bool
    as_json: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoints", metavar="CHECKPOINT", nargs="+", help="paths or URLs")
    add("--select", metavar="KEYPATH", help="only what is below this key path, without it in names")
    add_name_patterns(parser)
    add("-v", "--verbose", action="store_true", help="a line for each tensor, too")
    add("--json", dest="as_json", action="store_true", help="the digests as JSON")
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints a line for each checkpoint, in the form of sha256sum(1)."""
    from ckpt.checking.identity import id as identity

    storage = mapping(options.storage_options)
    rows = []
    for url in options.checkpoints:
        with progress("id", lambda url=url: tensor_bytes(url, storage)) as advance:  # type: ignore[misc]
            checkpoint = identity(
                url,
                select=options.select,
                include=options.include,
                exclude=options.exclude,
                progress=advance,
                storage_options=storage,
            )
        rows.append({"checkpoint": url, "digest": checkpoint.digest, "tensors": checkpoint.tensors})
        if not options.as_json:
            for name, digest in checkpoint.tensors.items() if options.verbose else ():
                print(f"{digest}  {printable(name)}")
            print(f"{checkpoint.digest}  {printable(place(url))}")
    if options.as_json:
        print(json_text(rows))
    return ExitCode.FINE
