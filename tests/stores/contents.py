"""Files of a store, written and read whole."""

from __future__ import annotations

from ckpt.stores.store import Store


def put(store: Store, name: str, *parts: bytes) -> None:
    with store.create(name) as file:
        file.write(parts)


def fail_to_put(store: Store, name: str, rewritable: bool, error: BaseException) -> None:
    """Begin to write a file, and raise."""
    with store.create(name, rewritable=rewritable) as file:
        file.write([b"the first part"])
        raise error


def content_of(store: Store, name: str) -> bytes:
    return store.read(name, 0, store.size(name))
