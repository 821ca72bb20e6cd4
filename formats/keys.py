"""Refuses dict keys with equal hashes, which an attacker has chosen to be slow.

Python randomizes the hashes of text and bytes. The hashes of numbers and tuples are predictable. To
insert n keys with one hash takes n² comparisons.
"""

from __future__ import annotations

import sys

from formats.errors import HostileError
from formats.limits import ALIKE_KEYS

_APART = sys.hash_info.modulus
"""No three integers between minus this number and this number have the same hash."""


class KeysApart:
    """Checks that no dict or set that is being made has many keys with one hash."""

    def __init__(self, where: str = "") -> None:
        """`where` begins the message, unless the caller adds it."""
        self._where = f"{where}: " if where else ""
        self._alike: dict[int, int] = {}

    def check(self, key: object, owner: object) -> None:
        """Raises HostileError if `owner` has too many keys with the hash of `key`."""
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
