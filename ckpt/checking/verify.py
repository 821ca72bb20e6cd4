"""Verifies a stored checkpoint without a model, a process group or torch.

Rules:

1. Damage is a result, not an exception. The report lists all problems, and a damaged file does not
   stop the check of the others. Only a place that cannot be checked at all raises an error.
2. The report tells which parts the format lets a reader check: without checksums only structure and
   sizes.
3. Memory is bounded: headers, chunk tables and one block of `BLOCK_BYTES` per thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ckpt.checking.report import Findings, Problem, Report
from ckpt.checking.verify_native import check_native
from ckpt.checking.verify_zip import check_counts, check_dcp, check_zip
from ckpt.opening.sources import Source, open_source, placed
from ckpt.stores.replacement_guard import unless_replaced
from ckpt.stores.store import Options, Store, is_file, local_path, open_store, split_url
from formats.catalog import Catalog
from formats.detect import DCP_METADATA, folder_format
from formats.errors import FormatError, UnsupportedError
from formats.joined import Subfolder
from formats.native.manifest import MANIFEST
from formats.safetensors.header import Header, read_header
from formats.storage import Reader
from sharding.errors import listed

__all__ = ["Problem", "Report", "verify"]

SAFETENSORS = ".safetensors"
FILES = frozenset(
    ("safetensors", "torch", "torchscript", "torch-legacy", "pickle", "npz", "npy", "gguf")
)
"""Formats of which a checkpoint is one file."""
SHOWN_NAMES = 20
Progress = Callable[[int], None] | None


def verify(
    url: str | os.PathLike[str],
    progress: Callable[[int], None] | None = None,
    *,
    storage_options: Options = None,
) -> Report:
    """Returns a report of all problems of the checkpoint at a path or URL, of any format.

    One process calls this. The check of a native checkpoint covers every byte.

    Args:
        progress: called with numbers of bytes as they are checked, by several threads.
        storage_options: options of the fsspec driver.

    Raises:
        NotACheckpointError: no checkpoint is at `url`.
        UnsupportedError: this version cannot read the checkpoint.
        ReplacedError: the checkpoint was replaced each time that it was checked.
        StoreError: the disk or object store failed.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"w": torch.ones(2)})
    ...     ckpt.verify(folder).sound
    True
    """
    text = os.fspath(url)
    return unless_replaced(lambda: _verified(text, progress, storage_options))


def _verified(text: str, progress: Callable[[int], None] | None, options: Options) -> Report:
    """Returns the report of `verify`."""
    try:
        with open_source(text, options) as source:
            files = len(source.catalog.files)
            found = _findings(source, progress)
            notes = (*source.catalog.notes, *found.notes, *_strays(source))
            return Report(
                text,
                source.catalog.format,
                files,
                found.bytes_checked,
                found.checked,
                found.problems,
                notes,
                len(source.catalog.tensors),
            )
    except UnsupportedError:
        raise
    except FormatError as error:
        return _unreadable(text, error, options)


def _findings(source: Source, progress: Progress) -> Findings:
    """Checks a source by its format."""
    if source.catalog.format == "ckpt":
        return check_native(source.store, progress)
    return _of_catalog(source.store, source.catalog, progress)


def _of_catalog(reader: Reader, catalog: Catalog, progress: Progress) -> Findings:
    """Checks a catalog of another format; of several parts, each part by its own format."""
    if catalog.parts:
        return _of_parts(
            [(part, _below(reader, folder, part, progress)) for folder, part in catalog.parts]
        )
    if catalog.format in ("torch", "torchscript", "npz"):
        return check_zip(reader, catalog, progress)
    if catalog.format == "torch-legacy":
        return check_counts(catalog)
    if catalog.format == "dcp":
        return check_dcp(reader, catalog, progress)
    if catalog.format == "json":
        return Findings("every value")
    # `open_source` has checked every rule of the headers, and the index against the files.
    checked = "structure and sizes only: this format has no checksums"
    return Findings(checked, problems=tuple(library_problems(reader, catalog)))


def library_problems(reader: Reader, catalog: Catalog) -> Iterator[Problem]:
    """Yields a problem for each local safetensors file that its library does not read as we do.

    The library is the reference for the format. It maps whole files, so none of an object store.
    """
    folder = local_path(reader.url)
    if folder is not None and catalog.format in ("safetensors", "huggingface"):
        for name in [file.name for file in catalog.files]:
            if catalog.format == "safetensors" or name.endswith(SAFETENSORS):
                path = os.path.join(folder, name)
                if said := library_difference(read_header(reader, name), path):
                    said = f"{path}: the safetensors library {said}; convert it to a new file"
                    yield Problem(name, said)


def library_difference(header: Header, path: str) -> str:
    """Returns in which way the library sees another file than `header`; empty if it does not."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            metadata = file.metadata() or {}
    except SafetensorError as error:
        return f"refuses it: {error}"
    theirs = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
    ours = [(entry.name, entry.dtype, entry.shape) for entry in header.entries.values()]
    if others := sorted({name for name, *_ in set(ours) ^ set(theirs)}):
        return f"sees other tensors: {listed(others, SHOWN_NAMES)}"
    # Types and shapes in one order give the bytes. Empty tensors may stand anywhere in it.
    orders = [[name for name, _, shape in seen if all(shape)] for seen in (ours, theirs)]
    is_equal = orders[0] == orders[1] and header.metadata == metadata
    return "" if is_equal else "sees another order or other metadata"


def _below(reader: Reader, folder: str, part: Catalog, progress: Progress) -> Findings:
    """Checks a part in a sub-folder, or in the folder itself. Problems name the sub-folder."""
    if not folder:
        return _of_catalog(reader, part, progress)
    found = _of_catalog(Subfolder(reader, folder), part, progress)
    moved = [replace(each, file=f"{folder}/{each.file}") for each in found.problems]
    return replace(found, problems=tuple(moved))


def _of_parts(found: Sequence[tuple[Catalog, Findings]]) -> Findings:
    """Returns the findings of several parts as one."""
    checked = dict.fromkeys(f"{part.format}: {each.checked}" for part, each in found)
    return Findings(
        "; ".join(checked),
        sum(each.bytes_checked for _, each in found),
        tuple(problem for _, each in found for problem in each.problems),
        tuple(dict.fromkeys(note for _, each in found for note in each.notes)),
    )


def _strays(source: Source) -> tuple[str, ...]:
    """Returns notes that name each entry of a folder at which the check did not look."""
    catalog = source.catalog
    if catalog.format in FILES:
        return ()  # the checkpoint is one file; its folder may hold any other files
    own = {file.name for file in catalog.files}
    folders = sorted({name.rpartition("/")[0] for name in own if "/" in name})
    there = source.store.entries()
    for folder in folders:
        there += [f"{folder}/{name}" for name in source.store.entries(folder)]
    own |= {name for name in there if any(note.startswith(f"{name} ") for note in catalog.notes)}
    strays = [name for name in there if name not in own and name.rstrip("/") not in folders]
    if catalog.format in ("ckpt", "dcp"):
        foreign = [name for name in strays if not name.endswith("/")]
    else:
        # Such a folder also has a configuration and a tokenizer.
        foreign = [name for name in strays if name.endswith(SAFETENSORS)]
    others = [name for name in strays if name not in foreign]
    line = f"not checked: {listed(others, SHOWN_NAMES)}"
    return (
        *(f"{name} is in the folder and not a part of the checkpoint" for name in foreign),
        *((line,) if others else ()),
    )


def _unreadable(url: str, error: FormatError, options: Options) -> Report:
    """Returns the report for a checkpoint whose description cannot be read."""
    checked = "only its description, which cannot be read"
    if is_file(url, options):
        name = split_url(url)[1]
        ending = name.rpartition(".")[2]
        kind = "ckpt" if name == MANIFEST else ending if ending in FILES else "torch"
        return Report(url, kind, 0, 0, checked, (Problem.of(error, name),))
    with open_store(url, options) as store:
        names = store.names()
        for name, kind in ((MANIFEST, "ckpt"), (DCP_METADATA, "dcp")):
            if name in names:
                return Report(url, kind, 0, 0, checked, (Problem.of(error, name),))
        found = folder_format(store.entries())
        kind = "huggingface" if found is None else found.name
        # The headers of all files are checked, although the first damaged one ended `open_source`.
        problems = _header_problems(store, names) or (Problem.of(error, url),)
        return Report(url, kind, 0, 0, checked, problems)


def _header_problems(store: Store, names: list[str]) -> tuple[Problem, ...]:
    problems = []
    for name in [name for name in names if name.endswith(SAFETENSORS)]:
        try:
            with placed(store.url, name):
                read_header(store, name)
        except FormatError as error:
            problems.append(Problem.of(error, name))
    return tuple(problems)
