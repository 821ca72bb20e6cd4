"""Keys of dicts that somebody chose so that they are slow: found before there are many.

Python keeps the hashes of texts and bytes secret; those of numbers and tuples anybody can work out.
Inserting n keys that share one hash takes n² comparisons.
"""

from __future__ import annotations

import sys

from formats.errors import HostileError
from formats.limits import ALIKE_KEYS

_APART = sys.hash_info.modulus
"""Of integers between minus this and this, no three have the same hash."""


class KeysApart:
    """Sees to it that no dict or set that is being made has many keys with one hash."""

    def __init__(self, where: str = "") -> None:
        """`where` begins the message, where nobody else puts it before."""
        self._where = f"{where}: " if where else ""
        self._alike: dict[int, int] = {}

    def check(self, key: object, owner: object) -> None:
        """Raise HostileError if `key`, harmless to hash, is one too many like it in `owner`."""
        kind = type(key)
        if kind is str or (kind is int and -_APART < key < _APART):  # type: ignore[operator]
            return
        slot = hash(key) ^ id(owner)
        count = self._alike[slot] = self._alike.get(slot, 0) + 1
        if count > ALIKE_KEYS:
            raise HostileError(
                f"{self._where}over {ALIKE_KEYS} keys of one dict have the same hash, which does "
                "not happen by chance"
            )
