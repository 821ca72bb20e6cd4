"""Makes one error of the differences between a target and a checkpoint on all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from warnings import warn

import xxhash

from ckpt.errors import NOT_STRICT, Difference, MismatchError, skipped_warning
from ckpt.match.match_builder import Match
from ckpt.match.overlaps import Placed, conflict
from ckpt.match.selection import Claim
from sharding.agreement.ranks import HASH_BITS, Ranks


class Fingerprints(NamedTuple):
    """Hashes of one rank's match. Ranks with equal hashes exchange no names."""

    unexpected: int
    """The hash of the checkpoint's names that this rank's target lacks."""
    idle: int
    """The hash of the patterns that choose no name on this rank."""
    differing: int
    """The hash of the names of all other differences on this rank."""


def fingerprints(matched: Match) -> Fingerprints:
    """Returns the hashes of this rank's match."""
    names = "\n".join(each.name for each in matched.differences)
    return Fingerprints(
        _hash("\n".join(matched.unexpected).encode()),
        _hash(_dump(matched.idle)),
        _hash(names.encode(errors="surrogatepass")),
    )


def differences(
    ranks: Ranks, matched: Match, same_unexpected: bool, same_idle: bool
) -> list[Difference]:
    """Returns this rank's differences, the names that no rank's target has, and idle patterns.

    All ranks call this. A flag is true if the ranks have the same hash in `Fingerprints`.
    """
    names = matched.unexpected
    if not same_unexpected:
        here = set(names)
        common = ranks.common(bytes(name in here for name in matched.saved_names))
        names = [name for name, flag in zip(matched.saved_names, common, strict=True) if flag]
    known = [*dict.fromkeys((*matched.saved_names, *matched.own_names))]
    idle = matched.idle if same_idle else _idle_everywhere(ranks, matched.idle, known)
    return [
        *(Difference(claim.role, "pattern", claim.advice(known)) for claim in idle),
        *matched.differences,
        *(
            Difference(name, "unexpected", "is in the checkpoint and not in the target")
            for name in names
        ),
    ]


def _idle_everywhere(ranks: Ranks, idle: Sequence[Claim], known: Sequence[str]) -> list[Claim]:
    """Returns the patterns that choose no name of any rank.

    All ranks call this. A pattern that is idle on one rank may name a part of the model that only
    another rank has.
    """

    def join(records: Sequence[bytes]) -> bytes:
        return _dump([*dict.fromkeys(claim for record in records for claim in _load(record))])

    every = _load(ranks.joined("comparing selections", _dump(idle), join))
    flags = ranks.common(bytes(claim.is_idle(known) for claim in every))
    return [claim for claim, flag in zip(every, flags, strict=True) if flag]


def _dump(idle: Sequence[Claim]) -> bytes:
    return json.dumps([(claim.include, claim.exclude) for claim in idle]).encode()


def _load(data: bytes) -> list[Claim]:
    return [Claim(tuple(include), tuple(exclude)) for include, exclude in json.loads(data)]


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> (64 - HASH_BITS)


def check_fits(
    url: str,
    found: list[Difference],
    strict: bool,
    warns: bool,
    stacklevel: int = 7,
    call: str = "ckpt.load",
) -> None:
    """Raises MismatchError with all differences, except those that `strict=False` skips.

    A warning names the skipped ones if `warns`. `call` is the call to repeat with other arguments.
    """
    if not strict:
        skipped = [d for d in found if d.problem in NOT_STRICT]
        found = [d for d in found if d not in skipped]
        if skipped and warns:
            warn(skipped_warning(url, skipped), stacklevel=stacklevel)
    if found:
        raise MismatchError(url, found, call)


def check_preflight_scalars(
    url: str, matched: Match, placed: Iterable[Sequence[Placed]] = ()
) -> None:
    """Raises MismatchError if preflight scalars differ that must be equal. Call it after the reads.

    Each group of `placed` holds the values for memory that targets share. These must be equal too.
    """
    checked = (*(check() for check in matched.checks), *map(conflict, placed))
    found = [difference for difference in checked if difference is not None]
    if found:
        raise MismatchError(url, found)
