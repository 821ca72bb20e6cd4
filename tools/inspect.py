"""`ckpt inspect`: the content of a checkpoint as a tree. Reads no tensor and imports no torch.

Names are split at their dots. A branch with one child shares a line with the child. A branch below
`--depth` is one line with the numbers of its tensors and bytes.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.display import amount, count, printable, size
from ckpt.loading.newest import BEGAN
from ckpt.mapping.changes import parameters_in
from ckpt.run.steps import METRICS, PROVENANCE, metrics_of, program_of
from ckpt.state.patterns import check_names_some, matches
from ckpt.state.saved import by_name
from formats.catalog import (
    Catalog,
    OpaqueValue,
    TensorRecord,
    TensorRef,
    Tree,
    map_tree,
    plain_values,
    str_of,
)
from sharding.layout import FlatShard, Layout, Only, Replicate, Shard, Split, StridedShard
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_storage_options, mapping
from tools.text import columns, date, json_text, numbers, place, shorten

HELP = Help(
    summary="show tensors, values and files of a checkpoint",
    description="""\
Shows the content of a checkpoint as a tree: tensors with dtype, shape, size and layout, plain
values, files, and the program that saved it. No tensor is read.""",
    examples=(
        (
            "ckpt inspect runs/gpt/step-100 --depth 2",
            "the parts of the model and of the optimizer, with their sizes",
        ),
        ("ckpt inspect runs/gpt/step-100 --html page.html", "the same as a page for a browser"),
    ),
    codes=(*OF_A_READER, ExitCode.EXISTS),
)
LEGEND = (
    (Replicate, ("R", "each rank of the axis has the whole")),
    (Shard, ("S(D)", "each rank of the axis has a part of dimension D")),
    (
        StridedShard,
        ("SS(D,N)", "as S(D), of each of N chunks of the dimension"),
    ),
    (FlatShard, ("F(O,N)", "a part of a packed buffer, N elements a rank; the tensor begins at O")),
    (Split, ("split", "the ranks of the axis had the whole, and each has written a part")),
    (Only, ("only(I)", "rank I of the axis alone has it")),
)
"""The placements as `ckpt inspect` shows them, with their meanings."""
MAX_DEPTH = 64
"""The most dots at which a name is split."""


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoint, and the parts to show."""

    url: str
    patterns: list[str]
    depth: int | None
    values: bool
    files: bool
    verbose: bool
    as_json: bool
    html: str | None
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="CHECKPOINT", help="a path or URL")
    add(
        "patterns",
        metavar="NAME",
        nargs="*",
        default=[],  # without it, argparse names NAME among missing arguments
        help="only these names and those below them; may have * and ?",
    )
    add("--depth", type=int, metavar="N", help="fold levels deeper than N")
    add("--values", action="store_true", help="show plain values too")
    add("--files", action="store_true", help="list the files")
    add("-v", "--verbose", action="store_true", help="--values and --files")
    add("--json", dest="as_json", action="store_true", help="everything, as JSON")
    add(
        "--html",
        metavar="FILE",
        help="write a page for a browser, which needs no network; replaces an older page, and no "
        "other file",
    )
    add_storage_options(parser)


def run(options: Options) -> int:
    """Prints the content of the checkpoint."""
    from ckpt.opening.sources import open_source

    if options.depth is not None and options.depth < 1:
        raise ValueError(f"--depth {options.depth}: give at least 1")
    if options.verbose:
        options = replace(options, values=True, files=True)
    if options.html is not None and (options.patterns or options.as_json):
        raise ValueError("--html shows the whole checkpoint: give neither names nor --json with it")
    if options.html is not None:
        from tools.page import check_may_write

        check_may_write(options.html)
    settings = mapping(options.storage_options)
    with open_source(options.url, settings) as source:
        catalog = source.catalog
        values = by_name(plain_values(catalog.tree), source.url)
        names = by_name([*catalog.tensors.items(), *values.items()], source.url)
        for pattern in options.patterns:
            check_names_some(pattern, [*names, *catalog.aliases], options.url, selects)
        chosen = _chosen(options.patterns)
        values = {name: value for name, value in values.items() if chosen(name)}
        if options.html is not None:
            from tools.page import describe_source, write_page

            write_page(options.html, describe_source(source, settings))
            print(printable(options.html))
        elif options.as_json:
            print(json_text(_describe(options.url, catalog, values, chosen)))
        else:
            for line in _lines(options, catalog, values, chosen):
                print(line)
    return ExitCode.FINE


def selects(pattern: str, name: str) -> bool:
    """Whether a pattern names this name or something above it.

    >>> selects("model.layers.0", "model.layers.0.w"), selects("*.w", "model.layers.0.w")
    (True, True)
    >>> selects("model.layers.1", "model.layers.10.w")
    False
    """
    return matches(pattern, name) or matches(f"{pattern}.*", name)


def _chosen(patterns: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: not patterns or any(selects(pattern, name) for pattern in patterns)


@dataclass(slots=True)
class _Branch:
    """A part of the tree of names."""

    children: dict[str, _Branch] = field(default_factory=dict)
    cells: tuple[str, ...] | None = None
    """The text beside a leaf."""
    tensors: int = 0
    """The number of tensors here and below."""
    nbytes: int = 0


def _lines(
    options: Options, catalog: Catalog, values: Mapping[str, Tree], chosen: Callable[[str], bool]
) -> Iterator[str]:
    tensors = {name: record for name, record in catalog.tensors.items() if chosen(name)}
    files = catalog.files
    total = size(sum(file.size for file in files))
    parameters = 0 if options.patterns else parameters_in(catalog)
    weights = f"{amount(parameters)} parameters, " if parameters else ""
    yield (
        f"{place(options.url)}: {catalog.format}, {weights}{count(len(tensors), 'tensor')}, "
        f"{size(sum(record.nbytes for record in tensors.values()))}; "
        f"{count(len(values), 'plain value')}; {count(len(files), 'file')}, {total}"
    )
    yield from _metadata_lines(catalog.metadata)
    for note in catalog.notes:
        yield f"  note: {printable(note)}"
    if catalog.bases:
        folders = ", ".join(map(printable, catalog.bases))
        yield f"  some of its chunks lie beside it, in {folders}"
    root = _tree(tensors, catalog.aliases, chosen, values if options.values else {})
    rows = list(_rows(root, 0, options.depth))
    if rows:
        yield ""
        yield from columns(rows, right=[3])
        yield from legend(record.layout for record in tensors.values())
    if values and not options.values:
        yield ""
        yield f"{count(len(values), 'plain value')}; --values shows them"
    if options.files:
        yield ""
        yield from columns([(printable(f.name), size(f.size)) for f in files] or [("", "")], [1])


def _metadata_lines(metadata: Mapping[str, str]) -> Iterator[str]:
    """Yields the metadata with dates as dates, metrics as numbers and the program's parts."""
    for key, text in metadata.items():
        parts = program_of(metadata) if key == PROVENANCE else {}
        metrics = metrics_of(metadata) if key == METRICS else {}
        shown = date(text) if key in ("time", BEGAN) else numbers(metrics) or text
        yield f"  {printable(key)}:{'' if parts else f' {shorten(shown)}'}"
        for name, value in parts.items():
            value_text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"    {printable(name)}: {shorten(value_text)}"


def legend(layouts: Iterable[Layout | None]) -> Iterator[str]:
    r"""Yields the meanings of the placements that layouts have, after an empty line.

    >>> from sharding.layout import Mesh, Replicate, Shard
    >>> print(*legend([Layout((8, 4), Mesh.grid(("dp",), (2,)), (Shard(0),))]), sep="\n")
    <BLANKLINE>
    layouts: dp:2=S(0) is axis dp of the mesh, 2 ranks, with placement S(0)
      S(D)  each rank of the axis has a part of dimension D
    """
    known = {layout for layout in layouts if layout is not None}
    kinds = {type(each) for stored in known for each in stored.placements}
    if not any(stored.mesh.size > 1 for stored in known):
        return
    name, number, placement = min(
        (printable(name), number, str(placement))
        for stored in known
        for name, number, placement in zip(
            stored.mesh.names, stored.mesh.sizes, stored.placements, strict=True
        )
        if number > 1
    )
    yield ""
    yield (
        f"layouts: {name}:{number}={placement} is axis {name} of the mesh, {number} ranks, with "
        f"placement {placement}"
    )
    yield from columns([(f"  {sign}", text) for kind, (sign, text) in LEGEND if kind in kinds])


def _tree(
    tensors: Mapping[str, TensorRecord],
    aliases: Mapping[str, str],
    chosen: Callable[[str], bool],
    values: Mapping[str, Tree],
) -> _Branch:
    root = _Branch()
    for name, record in tensors.items():
        shape = "[" + ", ".join(map(str, record.shape)) + "]"
        placement = printable(str(record.layout)) if record.layout is not None else ""
        cells = (str(record.dtype), shape, size(record.nbytes), placement)
        _place(root, name, cells, record.nbytes)
    for alias, name in aliases.items():
        if chosen(alias):
            _place(root, alias, ("", "", "", f"tied to {printable(name)}"))
    for name, value in values.items():
        _place(root, name, ("", "", "", f"= {shorten(_text(value))}"))
    return root


def _place(root: _Branch, name: str, cells: tuple[str, ...], nbytes: int | None = None) -> None:
    branch = root
    for part in (None, *name.split(".", MAX_DEPTH)):
        if part is not None:
            branch = branch.children.setdefault(part, _Branch())
        if nbytes is not None:
            branch.tensors += 1
            branch.nbytes += nbytes
    branch.cells = cells


def _rows(branch: _Branch, level: int, depth: int | None) -> Iterator[tuple[str, ...]]:
    for name, child in branch.children.items():
        label = name
        while child.cells is None and len(child.children) == 1:
            ((inner, child),) = child.children.items()
            label = f"{label}.{inner}"
        label = "  " * level + printable(label)
        if child.cells is not None:
            yield (label, *child.cells)
        else:
            tensors = count(child.tensors, "tensor") if child.tensors else ""
            yield (label, "", tensors, size(child.nbytes) if child.tensors else "", "")
        if depth is None or level + 1 < depth:
            yield from _rows(child, level + 1, depth)


def _text(value: Tree) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str_of(value)


def _plain(value: Tree) -> Tree:
    """Returns a value with the text of opaque ones in their place."""
    plain: Tree = map_tree(value, lambda leaf: str(leaf) if isinstance(leaf, OpaqueValue) else leaf)
    return plain


def _describe(
    url: str, catalog: Catalog, values: Mapping[str, Tree], chosen: Callable[[str], bool]
) -> dict[str, object]:
    """Everything, for programs. Values are encoded as in a manifest (docs/format.md)."""
    from formats.native.tree import encode

    def no_tensor(name: str, ref: TensorRef) -> str:
        return ref.name

    records: Iterable[TensorRecord] = catalog.tensors.values()
    return {
        "url": url,
        "format": catalog.format,
        "metadata": catalog.metadata,
        "notes": catalog.notes,
        "bases": catalog.bases,
        "tensors": [
            {
                "name": record.name,
                "dtype": str(record.dtype),
                "shape": record.shape,
                "bytes": record.nbytes,
                "placement": str(record.layout) if record.layout is not None else None,
            }
            for record in records
            if chosen(record.name)
        ],
        "aliases": {alias: name for alias, name in catalog.aliases.items() if chosen(alias)},
        "values": {name: encode(_plain(value), no_tensor) for name, value in values.items()},
        "files": [
            {"name": file.name, "bytes": file.size, "digest": file.digest or None}
            for file in catalog.files
        ],
        "bytes": catalog.nbytes,
    }
