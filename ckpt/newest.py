"""The newest checkpoint in a folder of checkpoints, and whether one is worth trying.

Rules:

1. What counts are folders with a manifest, ckpt's own format: a save that was not finished left
   none, and other formats do not say when they are complete.
2. Newest is what was committed last, by the time in the manifest, which copying a folder does not
   change. Those of the same second go by name, numbers in names by their value. A run that went
   back to step 100 so goes on from its own step 200, not from the step 300 that it gave up.
3. A checkpoint that is passed over although it was committed is told of, and so is a folder that
   this process may not look into.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from time import gmtime, strftime
from typing import NamedTuple
from warnings import warn

from ckpt.errors import FallbackWarning, NotACheckpointError, Skipped
from ckpt.stores.replacement_guard import MANIFEST_HEAD_BYTES, head_now, replaced, unless_replaced
from ckpt.stores.store import Options, Store, absolute, join_url, open_store, split_url
from ckpt.verifying import verify as verify_all
from formats.errors import CorruptError, FormatError, UnsupportedError
from formats.limits import current
from formats.native.manifest import MANIFEST, Manifest
from formats.native.manifest_loader import load
from formats.threads import Pool

__all__ = ["latest"]

HEAD_BYTES = 4096
"""Of a manifest: what the writer says of itself, its time with it, stands near the beginning."""
LONG_HEAD_BYTES = 1 << 20
"""Of one whose writer says more than that."""
WORKERS = 8
"""Folders that are looked into at once: a server takes time to answer."""
SHOWN = 5
UNREADABLE = "unreadable"
"""The kind of what a process has no right to read, or what is a link that leads to itself."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class Committed(NamedTuple):
    """A checkpoint of a folder."""

    name: str
    """Of its own folder."""
    time: str
    """When it was committed, in ISO 8601."""
    metadata: Mapping[str, str]
    """The text that its manifest begins with: of the writer, and of whoever saved it."""

    @property
    def age_key(self) -> tuple[str, object]:
        """Larger for a newer one."""
        return self.time, natural(self.name)


def latest(
    folder: str | os.PathLike[str], *, verify: bool = False, storage_options: Options = None
) -> str:
    """The path or URL of the newest sound checkpoint among those in a folder.

    It is one of ckpt's own format that was committed, whose manifest is what was written and whose
    files are all there and as long as they were; with `verify` every bit of it is what was written,
    which takes as long as reading it. Newer ones that are not are skipped with a FallbackWarning.
    What was not committed is no checkpoint. No process group is involved.

    Raises:
        NotACheckpointError: there is no committed checkpoint in the folder.
        CorruptError: there are, and none is sound; what is wrong with them is said.
        OSError: there is no other folder in it than those that may not be read.
        ReplacedError: one was replaced while it was looked at, again and again.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         ckpt.save(f"{folder}/step-{step}", {"w": torch.ones(2)})
    ...     ckpt.latest(folder).removeprefix(folder)
    '/step-10'
    """
    found, skipped = newest_sound(folder, verify, storage_options)
    if skipped:
        warn(FallbackWarning(found, skipped), stacklevel=2)
    return found


def newest_sound(
    folder: str | os.PathLike[str], verify: bool, options: Options
) -> tuple[str, list[Skipped]]:
    """What `latest` returns, and the newer ones that are not sound. Raises as it does."""
    names, unreadable = _looked_into(folder, options)
    skipped = [
        Skipped(join_url(folder, name), UNREADABLE, str(error))
        for name, error in unreadable.items()
    ]
    for url in (join_url(folder, found.name) for found in names):
        wrong = wrong_with(url, verify, options)
        if wrong is None:
            return url, skipped
        skipped.append(wrong)
    if not names:
        for error in unreadable.values():
            raise error
    if skipped:
        said = "; ".join(wrong.message for wrong in skipped[:SHOWN])
        more = f"; and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
        raise CorruptError(
            f"{os.fspath(folder)}: none of the {len(skipped)} checkpoints in it is sound: "
            f"{said}{more}"
        )
    raise NotACheckpointError(f"{os.fspath(folder)}: {_what_is_there(folder, options)}")


def committed(folder: str | os.PathLike[str], options: Options) -> list[Committed]:
    """The checkpoints in a folder that can be looked into, sound or not, newest first."""
    return _looked_into(folder, options)[0]


def _looked_into(
    folder: str | os.PathLike[str], options: Options
) -> tuple[list[Committed], dict[str, OSError]]:
    """The checkpoints in a folder, newest first, and why others cannot be looked into, by name."""
    with open_store(folder, options) as store, Pool(WORKERS, "ckpt-list") as pool:
        names = store.folders()
        found = list(pool.map(lambda name: _committed(store, name), names))
    known = sorted(
        (one for one in found if isinstance(one, Committed)),
        key=lambda one: one.age_key,
        reverse=True,
    )
    pairs = zip(names, found, strict=True)
    return known, {name: error for name, error in pairs if isinstance(error, OSError)}


def wrong_with(url: str, verify: bool, options: Options) -> Skipped | None:
    """What keeps a checkpoint from being loaded, as far as it is seen from its manifest and sizes.

    With `verify` from every bit. Raises UnsupportedError for one of a later version, ReplacedError
    for one that is replaced each time it is looked at.
    """
    try:
        unless_replaced(lambda: _check_whole(url, options))
        if verify:
            for problem in verify_all(url, storage_options=options).problems[:1]:
                return Skipped(url, problem.kind, problem.message)
    except UnsupportedError:
        raise
    except (FormatError, NotACheckpointError) as error:
        return Skipped(url, error.kind, str(error))
    except OSError as error:
        if not _is_out_of_reach(error):
            raise
        return Skipped(url, UNREADABLE, f"{url}: {error}")
    return None


def _is_out_of_reach(error: OSError) -> bool:
    """Whether it is this place that cannot be read, rather than the store that fails."""
    return isinstance(error, PermissionError) or error.errno == errno.ELOOP


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that puts step-9 before step-10."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def _committed(store: Store, name: str) -> Committed | OSError | None:
    """What stands in a folder of a store: None without a manifest, or why that cannot be read."""
    manifest = f"{name}/{MANIFEST}"
    try:
        size = store.size(manifest)
        metadata = _metadata_in(store.read(manifest, 0, min(HEAD_BYTES, size)))
        if not metadata and size > HEAD_BYTES:
            metadata = _metadata_in(store.read(manifest, 0, min(LONG_HEAD_BYTES, size)))
    except FileNotFoundError:
        return None
    except FormatError:  # replaced by a shorter one since its size was asked for, or no file
        metadata = {}
    except OSError as error:
        if not _is_out_of_reach(error):
            raise
        return error
    time = metadata.get("time", "")
    if not _TIME.fullmatch(time):
        time = _store_time(store, manifest)
    return Committed(name, time, metadata)


def _metadata_in(head: bytes) -> dict[str, str]:
    """The text in the beginning of a manifest, which may be damaged; empty where there is none."""
    text = head.decode("utf-8", "replace")
    at = text.find('"writer":')
    if at < 0:
        return {}
    try:
        writer, _ = json.JSONDecoder().raw_decode(text, at + len('"writer":'))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(writer, dict):
        return {}
    return {key: value for key, value in writer.items() if isinstance(value, str)}


def _store_time(store: Store, manifest: str) -> str:
    """When the store says that a manifest was written."""
    try:
        return strftime(_TIME_FORMAT, gmtime(store.modified(manifest)))
    except FileNotFoundError:
        return ""


def _check_whole(url: str, options: Options) -> None:
    """Raise unless the manifest is sound, and all files that it names have their sizes.

    Raises ReplacedError where they have not because there is another manifest now.
    """
    with open_store(url, options) as store:
        try:
            data = store.read_whole(MANIFEST, current().manifest_bytes)
        except FileNotFoundError as error:
            raise NotACheckpointError(f"{url}: no checkpoint: there is no {MANIFEST}") from error
        manifest = load(data, f"{url}/{MANIFEST}")
        try:
            _check_all_sizes(url, store, manifest, options)
        except CorruptError as error:
            now = head_now(absolute(url), store)
            if now != data[:MANIFEST_HEAD_BYTES]:
                raise replaced(url, "a file of it", now) from error
            raise


def _check_all_sizes(url: str, store: Store, manifest: Manifest, options: Options) -> None:
    _check_sizes(url, store, {file.name: file.size for file in manifest.files})
    parent, _ = split_url(url)
    for base in manifest.bases:
        if base is not None:
            with open_store(join_url(parent, base.folder), options) as beside:
                sizes = {file.name: file.size for file in base.files}
                _check_sizes(f"{url}: it borrows from {beside.url}", beside, sizes)


def _check_sizes(where: str, store: Store, wanted: dict[str, int]) -> None:
    there = store.sizes()
    for name, size in wanted.items():
        if name not in there:
            raise CorruptError(f"{where}/{name}: the file is missing")
        if there[name] != size:
            raise CorruptError(
                f"{where}/{name}: the file has {there[name]} bytes, {size} were written"
            )


def _what_is_there(folder: str | os.PathLike[str], options: Options) -> str:
    with open_store(folder, options) as store:
        if store.exists(MANIFEST):
            return "is a checkpoint itself; give the folder that it lies in"
        folders: Sequence[str] = store.folders()
    if not folders:
        return "no folder is in it, so no checkpoint"
    more = f" and {len(folders) - SHOWN} more" if len(folders) > SHOWN else ""
    shown = ", ".join(sorted(folders, key=natural)[-SHOWN:])
    return f"no checkpoint of ckpt's own format was committed in its folders ({shown}{more})"
