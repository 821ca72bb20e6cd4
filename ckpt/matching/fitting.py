"""Whether a target and what is to fill it fit together, as all ranks see it."""

from __future__ import annotations

from warnings import warn

import xxhash

from ckpt.errors import Difference, MismatchError
from ckpt.matching.ledger import Match
from ckpt.ranks import HASH_BITS, Ranks
from formats.url_secrets import without_secrets


def mark(matched: Match) -> int:
    """A hash of the names this rank's target lacks."""
    names = "\n".join(matched.unexpected).encode()
    return xxhash.xxh3_64_intdigest(names) >> (64 - HASH_BITS)


def differences(ranks: Ranks, matched: Match, same: bool) -> list[Difference]:
    """What does not fit here, and the names that no rank's target has.

    Called by all ranks; `same` when all lack the same names.
    """
    names = matched.unexpected
    if not same:
        here = set(names)
        common = ranks.common(bytes(name in here for name in matched.saved_names))
        names = [name for name, flag in zip(matched.saved_names, common, strict=True) if flag]
    return matched.differences + [
        Difference(name, "unexpected", "is in the checkpoint and not in the target")
        for name in names
    ]


def check_fits(
    url: str, found: list[Difference], strict: bool, warns: bool, stacklevel: int = 7
) -> None:
    """Raise MismatchError with all differences; those that `strict=False` skips are warned of."""
    if not strict:
        skipped = [d for d in found if d.problem in ("missing", "unexpected", "shape")]
        found = [d for d in found if d not in skipped]
        if skipped and warns:
            shown = "; ".join(map(str, skipped[:3])) + ("; ..." if len(skipped) > 3 else "")
            where = without_secrets(url)
            warn(f"{where}: strict=False skips {len(skipped)}: {shown}", stacklevel=stacklevel)
    if found:
        raise MismatchError(url, found)


def check_numbers(url: str, matched: Match) -> None:
    """Raise MismatchError where numbers that must agree do not, once they are read."""
    found = [difference for check in matched.checks if (difference := check()) is not None]
    if found:
        raise MismatchError(url, found)
