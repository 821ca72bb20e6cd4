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
from collections.abc import Callable

from ckpt.report import Findings, Problem, Report
from ckpt.sources import Source, open_source
from ckpt.stores.replacement_guard import unless_replaced
from ckpt.stores.store import Options, Store, is_file, open_store, split_url
from ckpt.verify_native import check_native
from ckpt.verify_zip import check_dcp, check_torch
from formats.errors import FormatError, UnsupportedError
from formats.folders import DCP_METADATA
from formats.native.manifest import MANIFEST
from formats.safetensors_header import read_header

__all__ = ["Problem", "Report", "verify"]

SAFETENSORS = ".safetensors"


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
            notes = (*found.notes, *_strays(source))
            return Report(
                text,
                source.catalog.format,
                files,
                found.bytes_checked,
                found.checked,
                found.problems,
                notes,
            )
    except UnsupportedError:
        raise
    except FormatError as error:
        return _unreadable(text, error, options)


def _findings(source: Source, progress: Callable[[int], None] | None) -> Findings:
    """Checks a source by its format."""
    if source.catalog.format == "ckpt":
        return check_native(source.store, progress)
    if source.catalog.format == "torch":
        return check_torch(source.store, source.catalog, progress)
    if source.catalog.format == "dcp":
        return check_dcp(source.store, source.catalog, progress)
    # `open_source` has checked every rule of the headers, and the index against the files.
    return Findings("structure and sizes only: this format has no checksums")


def _strays(source: Source) -> tuple[str, ...]:
    """Returns a note for each file in a checkpoint's folder that does not belong to it."""
    if source.catalog.format in ("safetensors", "torch"):
        return ()  # the checkpoint is one file; its folder may hold any other files
    own = {file.name for file in source.catalog.files}
    strays = [name for name in source.store.names() if name not in own]
    if source.catalog.format == "huggingface":
        # Such a folder also has a configuration and a tokenizer.
        strays = [name for name in strays if name.endswith(SAFETENSORS)]
    return tuple(f"{name} is in the folder and not a part of the checkpoint" for name in strays)


def _unreadable(url: str, error: FormatError, options: Options) -> Report:
    """Returns the report for a checkpoint whose description cannot be read."""
    checked = "only its description, which cannot be read"
    if is_file(url, options):
        name = split_url(url)[1]
        kind = "safetensors" if name.endswith(SAFETENSORS) else "torch"
        kind = "ckpt" if name == MANIFEST else kind
        return Report(url, kind, 0, 0, checked, (Problem.of(error, name),))
    with open_store(url, options) as store:
        names = store.names()
        for name, kind in ((MANIFEST, "ckpt"), (DCP_METADATA, "dcp")):
            if name in names:
                return Report(url, kind, 0, 0, checked, (Problem.of(error, name),))
        # The headers of all files are checked, although the first damaged one ended `open_source`.
        problems = _header_problems(store, names) or (Problem.of(error, url),)
        return Report(url, "huggingface", 0, 0, checked, problems)


def _header_problems(store: Store, names: list[str]) -> tuple[Problem, ...]:
    problems = []
    for name in names:
        if name.endswith(SAFETENSORS):
            try:
                read_header(store, name)
            except FormatError as error:
                problems.append(Problem.of(error, name))
    return tuple(problems)
