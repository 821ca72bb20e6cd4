"""The checkpoints in a folder: their names, and the facts of manifests that others need.

Rules:

1. A checkpoint exists if its manifest does, in the listing of the moment. Nothing else makes one
   exist, or hides one.
2. In a bucket one listing shows all manifests, with their sizes and tags. A manifest of the same
   size and tag has the same bytes: this process, or an earlier one through the index, knows its
   facts. Only the others are read, several at once. A disk has no tags, and each is read.
3. The index is a file in the folder of a run, written after saves. It is a cache: without it, with
   an old or a damaged one, the facts are the same, by more requests (decision 041).
4. A manifest that cannot be read although the store answers concerns its own checkpoint alone.
   A missing permission, an archive class and an error of one file of a disk are such reasons.
5. In the folder of a run, `step-N` is the folder of a step, and `pin-N-NAME.json` pins the step.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from ckpt.stores.store import Store, split_url
from formats.detect import SHARD
from formats.errors import FormatError, UnsupportedError
from formats.limits import current
from formats.native.manifest import (
    MANIFEST,
    Base,
    BaseFile,
    Manifest,
    checked_body,
    is_table,
    leading_entries,
    load,
    read_manifest,
    with_digest,
)
from formats.storage import Pool
from sharding.errors import ArgumentError

if TYPE_CHECKING:
    from ckpt.stores.driver import ObjectInfo


_FOLDER = re.compile(r"step-(\d{1,18})")
_PIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PIN = re.compile(r"pin-(\d{1,18})-([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.json")


def folder_name(step: int) -> str:
    """Returns the name of the folder of a step.

    >>> folder_name(100)
    'step-100'
    """
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Returns the step whose folder has this name; None for another folder."""
    matched = _FOLDER.fullmatch(name)
    if matched is None or folder_name(int(matched[1])) != name:
        return None
    return int(matched[1])


def pin_file(step: int, name: str) -> str:
    """Returns the name of the file, in the folder of the run, that pins a step under a name.

    Raises ArgumentError for a name that is no name of a file everywhere.

    >>> pin_file(500, "release-1")
    'pin-500-release-1.json'
    """
    if not isinstance(name, str) or _PIN_NAME.fullmatch(name) is None:
        raise ArgumentError(
            f"name={name!r:.80}: give up to 64 letters, digits and '._-', a letter or digit first"
        )
    return f"pin-{step}-{name}.json"


def is_pin(file: str) -> bool:
    """Whether the name of a file, in the folder of the run, is that of a pin."""
    return _PIN.fullmatch(file) is not None


def pins_in(files: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Returns the names of the pins of each step, from the files in the folder of the run.

    >>> pins_in(["pin-500-b.json", "pin-500-a.json", "owner-1.json", "pin-05-a.json"])
    {500: ('a', 'b')}
    """
    pins: dict[int, tuple[str, ...]] = {}
    for file in sorted(files):
        matched = _PIN.fullmatch(file)
        step = None if matched is None else step_of(f"step-{matched[1]}")
        if matched is not None and step is not None:
            pins[step] = (*pins.get(step, ()), matched[2])
    return pins


INDEX = "ckpt-index.json"
"""The name of the index in the folder of a run."""
INDEX_VERSION = 1
HEAD_BYTES = 1 << 16
"""Bytes of a manifest that are read first: they have the writer's metadata and, except with very
many ranks, the names of the files."""
LONG_HEAD_BYTES = 1 << 20
"""Bytes that are read if the writer's metadata is longer."""
WORKERS = 8
"""Manifests that are read at the same time: a server takes time to answer."""
FEW = 2
"""So many unknown manifests are read without a look into the index."""
REMEMBERED = 16
"""The most folders whose facts this process remembers."""
SHARED_CHARS = 24
"""Longer texts stand once in an index, however many checkpoints have them."""
_OWN_REASONS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EIO)
"""The errors of a disk that may concern one file alone."""

_log = logging.getLogger("ckpt.stores")


Listing = Mapping[str, "ObjectInfo"]
"""All files below a folder, by their paths."""


class Beside(NamedTuple):
    """The folder around a checkpoint, at the moment of a listing."""

    names: Collection[str]
    """The names in it, with a slash behind folders."""
    listing: Listing | None = None
    """All files below it, if the same listing has shown them."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one manifest."""

    metadata: Mapping[str, str]
    """The writer's and the user's; empty if the manifest is damaged."""
    bases: tuple[Base, ...] | None
    """The checkpoints that it borrows from; None if that is unknown."""
    shards: Mapping[str, int] | None
    """The number of its files by the first 16 digits of their names, which each attempt to save
    has of its own; None if that is unknown, or if it has files of other names."""
    damaged: bytes = b""
    """The whole manifest if it is damaged behind its metadata."""
    stored_bytes: int = 0
    """The bytes of all its files; 0 if unknown."""
    structure: str = ""
    """A digest of the names and shapes of its tensors; empty if unknown."""

    def files_among(self, names: Iterable[str]) -> list[str] | None:
        """Returns the files of the checkpoint among the names in its folder; None if unknown."""
        if self.shards is None:
            return None
        counts: Counter[str] = Counter()
        files = []
        for name in names:
            matched = SHARD.fullmatch(name)
            if matched is not None and matched[1] in self.shards:
                counts[matched[1]] += 1
                files.append(name)
        return files if counts == self.shards else None


class Known(NamedTuple):
    """The facts of a manifest with this size and tag."""

    size: int
    tag: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints directly in a folder, at the moment of a listing."""

    facts: Mapping[str, Facts]
    """By the names of their folders, sorted."""
    unreadable: Mapping[str, OSError]
    """The reasons why other folders cannot be read."""
    files: Mapping[str, Mapping[str, ObjectInfo]] | None
    """The files of each folder by name, and of this one itself under ""; None if the store lists
    folder by folder."""
    known: Mapping[str, Known]
    """Those of `facts` that are as the listing shows them."""
    is_recent: bool = True
    """Whether hardly any manifest was read after the listing, so that it is of this moment."""

    @property
    def listing(self) -> Listing | None:
        """All files by their paths; None if the store lists folder by folder."""
        if self.files is None:
            return None
        return {
            f"{folder}/{name}".removeprefix("/"): file
            for folder, files in self.files.items()
            for name, file in files.items()
        }

    @property
    def unclear(self) -> dict[str, str]:
        """The reasons why it is unknown of which others some need files."""
        found = {name: str(error) for name, error in self.unreadable.items()}
        for name, facts in self.facts.items():
            if facts.bases is None and not facts.damaged:
                found[name] = "its manifest is damaged"
        return found

    def is_bare(self, name: str) -> bool:
        """Whether no file of a checkpoint is there: its manifest came back after a delete."""
        own = self.facts[name].shards if name in self.facts else None
        if self.files is None or not own:
            return False
        found = (SHARD.fullmatch(file) for file in self.files.get(name, ()))
        return not any(match is not None and match[1] in own for match in found)

    def names(self) -> list[str] | None:
        """Returns the files directly in the folder itself; None if the listing lacks them."""
        return None if self.files is None else [*self.files[""]]

    def written_at(self, store: Store, folder: str) -> float | None:
        """Returns when the manifest in a folder was written at the latest; None if unknown."""
        if self.files is not None:
            seen = self.files.get(folder, {}).get(MANIFEST)
            return None if seen is None else seen.modified
        for name in (f"{folder}/{MANIFEST}", folder):
            with suppress(OSError):
                return store.modified(name)
        return None


def checkpoints_in(
    store: Store, with_bases: bool = True, listing: Listing | None = None
) -> Checkpoints:
    """Returns the checkpoints directly in a folder. Raises OSError if the store fails.

    Without `with_bases` the bases and files of a checkpoint may be unknown, where a server would
    have to read a manifest a second time for them. `listing` is one of all files, if the caller has
    it.
    """
    listing = store.below() if listing is None else listing
    files: dict[str, dict[str, ObjectInfo]] | None = None
    known: dict[str, Known] = {}
    manifests: dict[str, ObjectInfo] = {}
    if listing is None:
        names = store.folders()
    else:
        files = {"": {}}
        for path, info in listing.items():
            folder, _, name = path.rpartition("/")
            files.setdefault(folder, {})[name] = info
            if name == MANIFEST and folder and "/" not in folder:
                manifests[folder] = info
        names = sorted(manifests)
        known = _find_all_known(store, manifests, INDEX in files[""], with_bases)
    unknown = [name for name in names if name not in known]
    look = partial(_read, store, with_bases, files is not None)
    if files is None and (with_bases or len(unknown) <= WORKERS):
        # On a disk threads cost more than a few reads, and a deletion holds other descriptors.
        read = {name: look(name) for name in unknown}
    else:
        with Pool(WORKERS, "ckpt-list") as pool:
            read = dict(zip(unknown, pool.map(look, unknown), strict=True))
    facts, unreadable = {}, {}
    for name in names:
        checkpoint = known.get(name) or read[name]
        if isinstance(checkpoint, OSError):
            unreadable[name] = checkpoint
        elif checkpoint is not None:
            facts[name] = checkpoint.facts
            seen = manifests.get(name)
            if seen is not None and seen.tag and checkpoint[:2] == (seen.nbytes, seen.tag):
                known[name] = checkpoint
    if files is not None:
        _remember(str(store.url), known)
    return Checkpoints(facts, unreadable, files, known, len(unknown) <= FEW)


def concerns_one_file(error: OSError) -> bool:
    """Whether an error may concern one file alone, and not the whole store."""
    return error.errno in _OWN_REASONS


def _read(store: Store, with_bases: bool, for_index: bool, folder: str) -> Known | OSError | None:
    """Returns the facts of the manifest in a folder; None without one. An index wants all facts.

    Returns the error of a manifest that cannot be read (rule 4).
    """
    name = f"{folder}/{MANIFEST}"
    try:
        head, size, tag = store.read_start(name, HEAD_BYTES)
        facts = _facts_in(head)
        if not facts.metadata and size > HEAD_BYTES:
            head, size, tag = store.read_start(name, LONG_HEAD_BYTES)
            facts = _facts_in(head)
        if (with_bases and facts.bases is None) or (for_index and len(head) == size):
            data = head if len(head) == size else read_manifest(store, name)
            facts = _facts_of(data, facts.metadata, f"{store.url}/{name}")
            tag = tag if data is head else ""
        return Known(size, tag, facts)
    except FileNotFoundError:
        return None
    except FormatError:  # the place is no file, or an empty one
        return Known(0, "", Facts({}, None, None))
    except OSError as error:
        if not concerns_one_file(error):
            raise
        return error


def _facts_in(head: bytes) -> Facts:
    """Returns the facts in the start of a manifest, which may be damaged."""
    text = head.decode("utf-8", "replace")
    known = leading_entries(text)
    metadata = known.get("writer")
    if metadata is None:
        metadata = _writer_anywhere(text)
    if not isinstance(metadata, dict):
        metadata = {}
    # A manifest without bases goes on with its meshes. Names of bases are read from a manifest
    # whose digest was compared: a changed bit would make a base that is in use look free.
    bases = () if "meshes" in known and "bases" not in known else None
    shards = _shards(row[0] for row in known["files"]) if is_table(known.get("files")) else None
    return Facts(_texts(metadata), bases, shards)


def _facts_of(data: bytes, metadata: Mapping[str, str], file: str) -> Facts:
    """Returns the facts of a whole manifest."""
    try:
        manifest: Manifest = load(data, file)
    except FormatError:
        return Facts(metadata, None, None, data)
    return facts_of(manifest)


def facts_of(manifest: Manifest) -> Facts:
    hasher = xxhash.xxh3_128(repr(manifest.optimizers).encode())
    for name, stored in manifest.tensors.items():
        hasher.update(f"{name}\n{stored.shape}\n".encode("utf-8", "surrogatepass"))
    return Facts(
        _texts(manifest.writer),
        tuple(base for base in manifest.bases if base is not None),
        _shards(file.name for file in manifest.files),
        stored_bytes=sum(shard.size for shard in manifest.files),
        structure=hasher.hexdigest(),
    )


def _writer_anywhere(text: str) -> object:
    """Returns the writer's metadata in a manifest whose beginning is damaged."""
    at = text.find('"writer":')
    if at < 0:
        return None
    try:
        return json.JSONDecoder().raw_decode(text, at + len('"writer":'))[0]
    except (ValueError, RecursionError):
        return None


def _texts(metadata: Mapping[str, object]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if isinstance(value, str)}


def _shards(names: Iterable[str]) -> dict[str, int] | None:
    """Returns the number of files by attempt; None with files of other names."""
    matched = [SHARD.fullmatch(name) for name in names]
    return (
        dict(Counter(match[1] if match is not None else "" for match in matched))
        if all(matched)
        else None
    )


# [Note: remembered facts] The facts of manifests by folder, size and tag, for the next listing of
# this process. They are as good as the manifests themselves, because a tag is of one content.
_memory: OrderedDict[str, Mapping[str, Known]] = OrderedDict()
_indexed: dict[str, Mapping[str, Known]] = {}
"""The content of the index of each remembered folder, as it was last read or written."""
_lock = threading.Lock()


def forget() -> None:
    """Forgets all facts, as a new process does."""
    with _lock:
        _memory.clear()
        _indexed.clear()


def note(store: Store, facts: Facts, size: int) -> None:
    """Remembers the facts of a manifest that was written just now, so that it need not be read."""
    tag = store.tag(MANIFEST)
    if tag:
        folder, name = split_url(store.url)
        with _lock:
            before = _memory.get(folder, {})
        _remember(folder, {**before, name: Known(size, tag, facts)})


def find_known(folder: str, name: str) -> Known | None:
    """Returns the facts of a checkpoint that this process has read or written; None if unknown."""
    with _lock:
        return _memory.get(folder, {}).get(name)


def _remember(url: str, known: Mapping[str, Known]) -> None:
    with _lock:
        _memory[url] = known
        _memory.move_to_end(url)
        while len(_memory) > REMEMBERED:
            _indexed.pop(_memory.popitem(last=False)[0], None)


def _find_all_known(
    store: Store, there: Mapping[str, ObjectInfo], has_index: bool, with_bases: bool
) -> dict[str, Known]:
    """Returns the checkpoints whose manifests have known facts, from memory or the index."""

    def same(known: Known | None, seen: ObjectInfo) -> bool:
        if known is None or not seen.tag or known[:2] != (seen.nbytes, seen.tag):
            return False
        return not with_bases or known.facts.bases is not None or bool(known.facts.damaged)

    with _lock:
        before = _memory.get(str(store.url), {})
    known = {name: before[name] for name, seen in there.items() if same(before.get(name), seen)}
    if has_index and len(there) - len(known) > FEW:
        index = _read_index(store)
        more = (name for name, seen in there.items() if same(index.get(name), seen))
        known |= {name: index[name] for name in more if name not in known}
    return known


def _read_index(store: Store) -> Mapping[str, Known]:
    """Returns the checkpoints in the index of a folder; none if it cannot be used."""
    index: dict[str, Known] = {}
    try:
        index = _index_in(store.read_whole(INDEX, current().manifest_bytes))
    except (
        OSError,
        FormatError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
    ) as error:
        _log.debug("%s/%s: not used: %s: %s", store, INDEX, type(error).__name__, error)
    with _lock:
        _indexed[str(store.url)] = index
    return index


def write_index(store: Store, found: Checkpoints) -> None:
    """Writes the index of a folder if it lacks facts that are known now. Raises OSError.

    A run's rank 0 calls this after a commit. Of two processes that write it at once, one wins.
    """
    sound = {name: known for name, known in found.known.items() if known.facts.bases is not None}
    with _lock:
        before = _indexed.get(str(store.url))
    if found.files is None or not sound or before == sound:
        return
    store.commit(INDEX, _index_of(sound), replace=True)
    with _lock:
        _indexed[str(store.url)] = sound


def _index_of(known: Mapping[str, Known]) -> bytes:
    shared: dict[str, int] = {}

    def text(value: str) -> str | int:
        return value if len(value) < SHARED_CHARS else shared.setdefault(value, len(shared))

    steps = {}
    for name, (size, tag, facts) in known.items():
        metadata = {key: text(value) for key, value in facts.metadata.items()}
        bases = [
            [base.folder, [[file.name, file.rank, file.size] for file in base.files]]
            for base in facts.bases or ()
        ]
        more = [facts.stored_bytes, text(facts.structure)]
        steps[name] = [size, tag, metadata, bases, facts.shards, *more]
    body = json.dumps(
        {"format": "ckpt-index", "version": INDEX_VERSION, "steps": steps, "texts": [*shared]},
        separators=(",", ":"),
    ).encode()
    return with_digest(body)


def _index_in(data: bytes) -> dict[str, Known]:
    """Returns the content of an index. Raises FormatError or an error of its content."""
    content = json.loads(checked_body(data, INDEX))
    if content["version"] != INDEX_VERSION:
        raise UnsupportedError(f"it has the version {content['version']}")
    texts = content["texts"]
    known = {}

    def text(value: str | int) -> str:
        return texts[value] if isinstance(value, int) else value

    for name, (size, tag, metadata, bases, shards, nbytes, structure) in content["steps"].items():
        facts = Facts(
            {key: text(one) for key, one in metadata.items()},
            tuple(
                Base(folder, tuple(BaseFile(*file) for file in files)) for folder, files in bases
            ),
            shards,
            stored_bytes=nbytes,
            structure=text(structure),
        )
        known[name] = Known(size, tag, facts)
    return known
