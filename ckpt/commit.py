"""What is committed at a place: the files its manifest names."""

from __future__ import annotations

from ckpt.store import Store
from formats.errors import FormatError
from formats.native.manifest import MANIFEST, load


def committed_files(store: Store) -> list[str]:
    """The shard files of the native checkpoint in a folder; none where there is none.

    A manifest that is damaged, or of another version, names nothing that is safe to delete: then
    the list is empty as well.
    """
    if not store.exists(MANIFEST):
        return []
    try:
        data = store.read(MANIFEST, 0, store.size(MANIFEST))
        return [file.name for file in load(data, f"{store.url}/{MANIFEST}").files]
    except FormatError:
        return []
