"""The page of a checkpoint: its data as plain lists and dicts, and one HTML file around them.

Rules:

1. Names come from files of unknown origin. They stand in a JSON block without the character `<`,
   and the script puts them into the page as text.
2. The content security policy allows the page's own scripts and style by their hashes, and no
   network.
3. Each layout stands in the data once. A native checkpoint of 1,024 ranks has millions of pieces
   and few layouts: the page gets the boxes of each layout once, with the ranks that hold them.
   Another format has a table of pieces.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import product
from typing import TYPE_CHECKING, Any

from ckpt.checking.report import file_problems
from ckpt.display import amount, printable, size
from ckpt.errors import ArgumentError, ExistsError
from ckpt.mapping.changes import parameters_in
from ckpt.run.steps import metrics_of
from ckpt.stores.local_store import LocalStore
from ckpt.stores.store import join_url, split_url
from formats.catalog import Catalog, TensorRecord, Tree, plain_values, str_of
from formats.detect import is_shard
from sharding.errors import without_secrets
from sharding.layout import Box, Layout
from tools.text import date, numbers, plain_json

if TYPE_CHECKING:
    from ckpt.checking.diff import Comparison
    from ckpt.opening.sources import Source

BEGINNING = b"<!doctype html>"


def check_may_write(path: str) -> None:
    """Raises ArgumentError for a folder, ExistsError for another file than a page or an empty one.

    A mistake in the order of arguments would otherwise replace a checkpoint.
    """
    if not os.path.basename(path) or os.path.isdir(path):
        raise ArgumentError(f"--html {path!r}: this is no file; give the file of the page")
    if os.path.lexists(path) and not _is_page_or_empty(path):
        raise ExistsError(
            f"{path} is no page, and was not overwritten; give --html another file, or remove it"
        )


def _is_page_or_empty(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(BEGINNING)) in (b"", BEGINNING)


def write_page(path: str, data: Mapping[str, Any]) -> None:
    """Writes the page to a file of the local disk; an older page is replaced once this is whole.

    Raises as `check_may_write` does, and OSError if the file cannot be written.
    """
    check_may_write(path)
    folder, name = os.path.split(path)
    with LocalStore(folder or ".") as store:
        store.commit(name, page(data).encode(), replace=True)


def page(data: Mapping[str, Any]) -> str:
    """Returns the HTML of a page of `tools.page.describe`'s data."""
    style, layout, script = (_asset(name) for name in ("page.css", "layout.js", "page.js"))
    scripts = " ".join(_hash(text) for text in (layout, script))
    policy = f"default-src 'none'; script-src {scripts}; style-src {_hash(style)}"
    parts = {
        "@POLICY@": policy,
        "@TITLE@": escape(printable(data["name"])),
        "@STYLE@": style,
        "@LAYOUT@": layout,
        "@SCRIPT@": script,
        "@DATA@": _json(data),
    }
    text = _asset("page.html")
    head, *rest = text.split("@")
    found = [head]
    for part in rest:
        found.append(parts.get(f"@{part}@", part))
    return "".join(found)


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _json(data: Mapping[str, Any]) -> str:
    r"""Returns JSON that cannot end the block that it stands in.

    >>> _json({"</script>": 1})
    '{"\\u003c/script>":1}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


MOST_PIECES = 200_000
"""The most pieces that a page lists, those of a layout once; the page counts the others."""
MOST_VALUES = 20_000
SHOWN_CHARACTERS = 200

Json = dict[str, Any]


def describe(
    url: str,
    catalog: Catalog,
    chain: Sequence[str],
    shown_pieces: int = MOST_PIECES,
    wrong: str = "",
) -> Json:
    """Returns the data of the page.

    `chain` has the folders of the checkpoints whose chunks this one borrows, its own bases first.
    At most `shown_pieces` pieces are listed; `pieces_left_out` counts the others. `wrong` tells
    missing files and files of other sizes.
    """
    layouts: dict[Layout, int] = {}
    files = {file.name: at for at, file in enumerate(catalog.files)}
    listed, left_out, tensors = 0, 0, []
    for name, record in catalog.tensors.items():
        where: Any = None
        if record.layout is not None:
            where = layouts.setdefault(record.layout, len(layouts))
        else:
            pieces = list(_pieces(record, files))
            where = pieces if listed + len(pieces) <= shown_pieces else []
            listed += len(where)
            left_out += len(pieces) - len(where)
        tensors.append([name, record.dtype.name, list(record.shape), record.nbytes, where])
    boxes = []
    for layout in layouts:
        parts = boxes_of(layout)
        count = sum(len(ranks) for *_, ranks in parts)
        is_listed = listed + count <= shown_pieces
        listed, left_out = (listed + count, left_out) if is_listed else (listed, left_out + count)
        one_rank = f"whole on rank {layout.mesh.lowest}" if layout.mesh.size == 1 else None
        boxes.append([one_rank or str(layout), parts if is_listed else []])
    values = list(_values(catalog.tree))
    return {
        "url": without_secrets(url),
        "name": name_of(url),
        "facts": _facts(catalog, wrong),
        "format": catalog.format,
        "metadata": dict(catalog.metadata),
        "notes": list(catalog.notes),
        "chain": list(chain),
        "layouts": boxes,
        "files": [[file.name, file.size, file.digest, _rank(file.name)] for file in catalog.files],
        "tensors": tensors,
        "aliases": dict(catalog.aliases),
        "values": values[:MOST_VALUES],
        "values_left_out": max(0, len(values) - MOST_VALUES),
        "pieces_left_out": left_out,
    }


def _facts(catalog: Catalog, wrong: str) -> list[list[str]]:
    """Returns the facts that come first: label, value, note, and whether it is good or bad."""
    metadata = catalog.metadata
    rows = [["step", metadata["step"], "", ""]] if "step" in metadata else []
    for name, value in metrics_of(metadata).items():
        rows.append([name, numbers({name: value}).partition("=")[2], "", ""])
    if "time" in metadata:
        day, _, hour = date(metadata["time"]).partition(" ")
        rows.append(["saved", day, hour, ""])
    if parameters := parameters_in(catalog):
        rows.append(["parameters", amount(parameters), f"{parameters:,} in the model", ""])
    files = size(sum(file.size for file in catalog.files))
    rows.append(["size", files, f"{len(catalog.tensors):,} tensors", ""])
    if "world_size" in metadata:
        rows.append(["ranks", metadata["world_size"], "wrote it", ""])
    written = [file.size for file in catalog.files if is_shard(file.name)]
    if len(written) > 1:
        mean = sum(written) / len(written)
        note = f"largest file of a rank, by the mean; {size(min(written))} to {size(max(written))}"
        rows.append(["balance", f"{max(written) / mean:.2f} ×", note, ""])
    native = "all files are there in their sizes; ckpt verify compares every bit"
    is_native = catalog.format == "ckpt"
    note = wrong or (native if is_native else "its structure is; ckpt verify tells what it checks")
    return [*rows, ["state", "damaged" if wrong else "complete", note, "bad" if wrong else "good"]]


def describe_source(source: Source, options: Mapping[str, Any] | None) -> Json:
    """Returns the data of the page of an opened checkpoint, with the bases of its bases."""
    from ckpt.opening.sources import open_source

    above, _ = split_url(source.url)
    chain = list(source.catalog.bases)
    for folder in chain:  # grows meanwhile
        with open_source(join_url(above, folder), options) as base:
            chain.extend(other for other in base.catalog.bases if other not in chain)
    wrong = file_problems(source.store.sizes(), source.catalog)
    return describe(source.url, source.catalog, chain, wrong=wrong)


def name_of(url: str) -> str:
    """Returns the last part of a path or URL, for titles."""
    shown = without_secrets(url)
    return split_url(shown)[1] or shown


def describe_differences(found: Comparison) -> Json:
    """Returns the data of a page of differences: the part that `describe` lacks."""
    values = asdict(found)
    del values["equal_tensors"]
    count = len(found.tensors)
    for tensor in values["tensors"]:
        tensor["largest"] = f"{tensor['max_abs']:.6g}"
    decades = {label for entry in found.tensors for label, _ in entry.histogram}
    values["decades"] = sorted(decades, key=float)
    values["summary"] = (
        f"{found.compared_tensors:,} tensors were compared: {count:,} differ, "
        f"{len(found.equal_tensors):,} are equal or close."
    )
    for key in ("a", "b"):
        values[key] = without_secrets(values[key])
    values["notes"] = [without_secrets(note) for note in found.notes]
    return {key: plain_json(value) for key, value in values.items()}


def boxes_of(layout: Layout) -> list[list[Any]]:
    """Returns the boxes of a layout, each once: `[lo, hi, the ranks that hold it]`."""
    mesh, found, axes = layout.mesh, [], layout.replica_axes
    for rank in layout.holders(Box.whole(layout.shape)):  # the first of the replicas
        at = enumerate(mesh.coordinate(rank) or ())
        places = product(*(range(mesh.sizes[axis]) if axis in axes else (i,) for axis, i in at))
        ranks = list(map(mesh.rank, places))
        found += [[list(p.box.lo), list(p.box.hi), ranks] for p in layout.pieces(rank)]
    return found


def _pieces(record: TensorRecord, files: Mapping[str, int]) -> Iterator[list[Any]]:
    """Yields file, first byte and box of each piece."""
    for piece, extent in record.pieces:
        at = extent.offset + piece.at * record.dtype.itemsize
        yield [files.get(extent.file, -1), at, list(piece.box.lo), list(piece.box.hi)]


def _rank(name: str) -> int | None:
    """Returns the rank whose elements a native shard file holds; None for another file."""
    return int(name.removesuffix(".safetensors").partition("-")[2]) if is_shard(name) else None


def _values(tree: Tree) -> Iterator[list[str]]:
    for name, value in plain_values(tree):
        yield [name, str_of(value)[:SHOWN_CHARACTERS]]
