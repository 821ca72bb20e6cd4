"""`ckpt ls`: the checkpoints in a folder, or the tensors in a checkpoint, one a line.

The list shows checkpoints whose save was not finished, or whose files are missing or damaged, as
such: a user decides by it which checkpoint to resume from, and which ones to delete. The
checkpoints of a run (`ckpt.run`) show their steps, ages and metrics.
"""

from __future__ import annotations

import re
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt.checking.report import file_problems
from ckpt.display import amount, printable, size
from ckpt.errors import NotACheckpointError
from ckpt.mapping.changes import parameters_in
from ckpt.stores.store import natural
from formats.catalog import Catalog
from formats.detect import DCP_METADATA, OF_WEIGHTS, SHARD
from formats.errors import FormatError
from formats.native.borrowed import beside
from formats.native.manifest import MANIFEST
from formats.storage import Reader
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_storage_options, mapping
from tools.text import (
    Meaning,
    age,
    colour,
    columns,
    date,
    json_text,
    numbers,
    shorten,
    versions_kept,
)

if TYPE_CHECKING:
    from ckpt.loading.newest import Committed

HELP = Help(
    summary="list the checkpoints in a folder, or the tensors in a checkpoint",
    description="""\
Lists the checkpoints in a folder, with those that are damaged or unfinished marked as such, or the
tensors in a checkpoint. Of a run it shows steps, ages and metrics. No tensor is read.""",
    examples=(
        ("ckpt ls runs/gpt", "the checkpoints of a run, with step, age, size, state and metrics"),
        ("ckpt ls s3://bucket/model.safetensors", "the tensors in a file of a bucket"),
    ),
    codes=OF_A_READER,
)
_SHARD = re.compile(rf"\.?{SHARD.pattern}(\..+\.part)?")
"""The name of a native shard file, also of an unfinished one."""


@dataclass(frozen=True, slots=True)
class Options:
    """The folder or checkpoint to list."""

    url: str
    as_json: bool
    verbose: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint of a folder."""

    name: str
    format: str
    tensors: int
    parameters: int
    """The elements in the weights of the model, tied ones once."""
    bytes: int
    """The size of its files; chunks that it borrows from another checkpoint are not in them."""
    world_size: str
    """The number of ranks that wrote it; empty if the format does not tell."""
    time: str
    """The time of the save by the writer's clock; empty if the format does not tell."""
    state: str
    """`complete`, `unfinished` (no commit), or the missing or damaged parts."""
    step: int | None = None
    """The step of a run; None for a checkpoint that no run saved."""
    age_seconds: float | None = None
    """The time since the save began."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    program: Mapping[str, object] = field(default_factory=dict)
    """The program of the run: its command line, git revision, versions and hosts."""
    pins: Sequence[str] = ()
    """The names under which the step of a run is pinned."""
    nonfinite: int | None = None
    """How many of its numbers are NaN or infinite, if its save has counted them."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="FOLDER", nargs="?", default=".", help="a path or URL; default: here"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="the list as JSON")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="below each checkpoint of a run, the program that saved it",
    )
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints the list. Raises NotACheckpointError if there is nothing to list."""
    from ckpt.opening.sources import open_source

    settings = mapping(options.storage_options)
    try:
        rows = _list_at_once(options.url, settings)
        if rows is not None:
            return _print_rows(options, rows)
        with open_source(options.url, settings) as source:
            catalog = source.catalog
            signs = (MANIFEST,) if catalog.weights else (MANIFEST, DCP_METADATA)
            if catalog.format == "ckpt" or not _has_checkpoints(options.url, settings, signs):
                _print_tensors(options, catalog)
                return ExitCode.FINE
            rows = list(_checkpoints(options.url, settings))
    except (NotACheckpointError, FormatError):
        rows = list(_checkpoints(options.url, settings))
        if not rows:
            raise
    return _print_rows(options, rows)


def _print_rows(options: Options, rows: Sequence[Row]) -> int:
    if options.as_json:
        print(json_text({"url": options.url, "checkpoints": [asdict(row) for row in rows]}))
        return ExitCode.FINE
    is_run = any(row.step is not None for row in rows)
    lines = _run_lines(rows) if is_run else _lines(rows)
    print(lines[0])
    for line, row in zip(lines[1:], rows, strict=True):
        print(line)
        if options.verbose:
            for key, value in row.program.items():
                print(f"    {printable(key)}: {shorten(_text(value))}")
    if kept := versions_kept(options.url, mapping(options.storage_options)):
        print(kept)
    return ExitCode.FINE


def _lines(rows: Sequence[Row]) -> list[str]:
    head = ("NAME", "FORMAT", "TENSORS", "PARAMETERS", "SIZE", "RANKS", "SAVED", "STATE")
    cells = [
        (
            printable(row.name),
            row.format or "-",
            f"{row.tensors:,}",
            _parameters(row),
            size(row.bytes),
            printable(row.world_size or "-"),
            printable(date(row.time) if row.time else "-"),
            _state(row),
        )
        for row in rows
    ]
    return columns([head, *cells], right=[2, 3, 4, 5])


def _run_lines(rows: Sequence[Row]) -> list[str]:
    head = ("NAME", "STEP", "AGE", "PARAMETERS", "SIZE", "RANKS", "STATE", "METRICS")
    cells = [
        (
            printable(row.name),
            "-" if row.step is None else str(row.step),
            "-" if row.age_seconds is None else age(row.age_seconds),
            _parameters(row),
            size(row.bytes),
            printable(row.world_size or "-"),
            _state(row),
            numbers(row.metrics),
        )
        for row in rows
    ]
    return columns([head, *cells], right=[1, 2, 3, 4, 5])


def _parameters(row: Row) -> str:
    return amount(row.parameters) if row.parameters else "-"


def _state(row: Row) -> str:
    counted = f", {row.nonfinite} NaN or infinite" if row.nonfinite else ""
    pinned = f", pinned: {', '.join(row.pins)}" if row.pins else ""
    state = colour(printable(row.state), _MEANINGS.get(row.state, "damaged"))
    return f"{state}{counted}{printable(pinned)}"


_MEANINGS: Mapping[str, Meaning] = {"complete": "sound", "unfinished": "changed"}


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_tensors(options: Options, catalog: Catalog) -> None:
    records = catalog.tensors
    named = {**{name: name for name in records}, **catalog.aliases}
    rows = [(name, records[stored]) for name, stored in named.items()]
    if options.as_json:
        tensors = [
            {
                "name": name,
                "dtype": str(record.dtype),
                "shape": record.shape,
                "bytes": record.nbytes,
            }
            for name, record in rows
        ]
        print(json_text({"url": options.url, "format": catalog.format, "tensors": tensors}))
        return
    cells = [
        (printable(name), str(record.dtype), str(list(record.shape)), size(record.nbytes))
        for name, record in rows
    ]
    for line in columns(cells, right=[3]):
        print(line)


def _has_checkpoints(url: str, settings: Mapping[str, object] | None, signs: Sequence[str]) -> bool:
    """Whether a place is a folder of checkpoints, in which a converted file may lie too.

    `signs` are the files that show one. A folder of a training has DCP's as parts of its own.
    """
    from ckpt.stores.store import is_file, open_store
    from ckpt.transfer.facts import step_of

    if is_file(url, settings):
        return False
    with open_store(url, settings) as store:
        return any(
            step_of(name) is not None or not set(signs).isdisjoint(store.entries(name))
            for name in store.folders()
        )


def _checkpoints(url: str, settings: Mapping[str, object] | None) -> Iterator[Row]:
    """Yields the checkpoints directly in a folder, by name, with numbers in names by value."""
    from ckpt.stores.store import is_file, join_url, open_store
    from ckpt.transfer.facts import pins_in

    if is_file(url, settings):
        return
    with open_store(url, settings) as store:
        files = [
            name
            for name in store.names()
            if name.endswith(OF_WEIGHTS) and not _SHARD.fullmatch(name)
        ]
        names = sorted([*files, *store.folders()], key=natural)
        pins = pins_in(store.names())
    for name in names:
        row = _row(join_url(url, name), name, settings)
        if row is not None:
            yield row if row.step not in pins else replace(row, pins=pins[row.step])


def _list_at_once(url: str, settings: Mapping[str, object] | None) -> list[Row] | None:
    """Returns the checkpoints in a folder of a bucket, by a listing of all files and the index.

    Opens one checkpoint of several with the same tensors, and each that is not whole. Returns None
    for another place: on a disk, a checkpoint itself, or a folder without checkpoints.
    """
    from ckpt.loading.newest import Committed
    from ckpt.stores.store import join_url, local_path, open_store
    from ckpt.transfer.facts import checkpoints_in, pins_in

    if local_path(url) is not None:
        return None
    with open_store(url, settings) as store:
        found = checkpoints_in(store)
    if found.files is None or not found.facts or MANIFEST in found.files[""]:
        return None
    own = [name for name in found.files[""] if name.endswith(OF_WEIGHTS)]
    names = {*filter(None, (path.partition("/")[0] for path in found.files))}
    names.update(name for name in own if not _SHARD.fullmatch(name))
    pins, alike, rows = pins_in(found.files[""]), dict[str, Row](), list[Row | None]()
    for name in sorted(names, key=natural):
        facts, files = found.facts.get(name), found.files.get(name, {})
        whole = None if facts is None else facts.files_among(files)
        sizes = [files[file].nbytes or 0 for file in whole or ()]
        stored_bytes, bases = (0, ()) if facts is None else (facts.stored_bytes, facts.bases or ())
        is_whole, needed = 0 < sum(sizes) == stored_bytes, {base.folder for base in bases}
        model = None if facts is None else alike.get(facts.structure)
        if facts is None or model is None or not is_whole or not needed <= found.facts.keys():
            row = _row(join_url(url, name), name, settings)
            if facts is not None and facts.structure and row is not None and is_whole:
                alike[facts.structure] = row
        else:
            metadata, nbytes = facts.metadata, sum(sizes) + (files[MANIFEST].nbytes or 0)
            committed = Committed(name, metadata.get("time", ""), metadata)
            row = _row_of(committed, "ckpt", model.tensors, model.parameters, nbytes, "complete")
        rows.append(row)
    return [
        row if row.step not in pins else replace(row, pins=pins[row.step])
        for row in rows
        if row is not None
    ]


def _row(url: str, name: str, settings: Mapping[str, object] | None) -> Row | None:
    """Returns the row of a place; None unless it is a checkpoint, or an unfinished one."""
    from ckpt.loading.newest import Committed
    from ckpt.opening.sources import open_source
    from ckpt.stores.store import open_store

    try:
        with open_source(url, settings, with_advice=False) as source:
            catalog, wrong = source.catalog, file_problems(source.store.sizes(), source.catalog)
            gone = [base for base in catalog.bases if not _is_there(source.store, base)]
    except NotACheckpointError:
        with open_store(url, settings) as store:
            begun = any(_SHARD.fullmatch(file) for file in store.names())
        return Row(name, "ckpt", 0, 0, 0, "", "", "unfinished") if begun else None
    except FormatError as error:
        return Row(name, "", 0, 0, 0, "", "", f"{error.kind}: {error}")
    except OSError as error:
        return Row(name, "", 0, 0, 0, "", "", f"unreadable: {error}")
    return _row_of(
        Committed(name, catalog.metadata.get("time", ""), catalog.metadata),
        catalog.format,
        len(catalog.tensors),
        parameters_in(catalog),
        sum(file.size for file in catalog.files),
        wrong or (f"its base {', '.join(gone)} missing" if gone else "complete"),
    )


def _row_of(
    committed: Committed, kind: str, tensors: int, parameters: int, nbytes: int, state: str
) -> Row:
    """Returns the row of a checkpoint of a format."""
    from ckpt.run.steps import STEP, run_step

    found, metadata, values = run_step(committed), committed.metadata, dict[str, Any]()
    if found is not None and STEP in metadata:
        values = {"step": found.step, "age_seconds": time.time() - found.time}
        values |= {"metrics": found.metrics, "program": found.program}
        values |= {"nonfinite": found.nonfinite}
    world_size, saved = metadata.get("world_size", ""), metadata.get("time", "")
    return Row(
        committed.name, kind, tensors, parameters, nbytes, world_size, saved, state, **values
    )


def _is_there(reader: Reader, base: str) -> bool:
    """Whether a base of a checkpoint is still beside it."""
    try:
        return reader.size(beside(base, MANIFEST)) > 0
    except FileNotFoundError:
        return False
