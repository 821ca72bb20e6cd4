"""All errors and warnings, grouped by the remedy of a caller.

This module also has the errors of bytes, from `formats`, and those of tensors, arguments and ranks,
from `sharding.errors`, with the root `CkptError` and the rules of `kind`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from formats import errors as bytes_errors
from formats.errors import *  # noqa: F403 - every error has one list, in its own module
from formats.errors import CorruptError
from sharding import errors as root_errors
from sharding.errors import *  # noqa: F403
from sharding.errors import CkptError, Picklable, describe_mixed, format_names, without_secrets

__all__ = [
    "AccessDeniedError",
    "BackgroundError",
    "BusyError",
    "ClosedError",
    "DamagedLoadError",
    "Difference",
    "ExistsError",
    "FallbackWarning",
    "InUseError",
    "LeftOverWarning",
    "MismatchError",
    "MismatchedLoadError",
    "NotACheckpointError",
    "NotDurableWarning",
    "NotOwnerError",
    "PartialLoadError",
    "ProtocolError",
    "ReplacedError",
    "ReplacedLoadError",
    "ReplicasWarning",
    "SaveFailedWarning",
    "SecondOutputWarning",
    "Skipped",
    "SkippedWarning",
    "StateChangedError",
    "StateError",
    "StoreError",
    "StoreTimeoutError",
    "TensorIndexError",
    "UnknownNameError",
    "UnreachableError",
    "UnreadableWarning",
    "UnverifiedWarning",
    "ValuesWarning",
    "VersionGoneError",
    "WaitTimeoutError",
    "WireWarning",
]
__all__ += bytes_errors.__all__
__all__ += root_errors.__all__


class StateError(CkptError, ValueError):
    """The state has a value that cannot be stored, or two entries of one name."""

    kind = "state"


class ExistsError(CkptError, FileExistsError):
    """A committed checkpoint or file is at the target, and was not overwritten."""

    kind = "exists"


class InUseError(ExistsError):
    """Other checkpoints borrow from this one, so it can be neither deleted nor overwritten."""

    kind = "in_use"


class NotOwnerError(CkptError):
    """Another job has begun to save to this run since: this one saves and removes nothing."""

    kind = "not_owner"


class NotACheckpointError(CkptError, FileNotFoundError):
    """No committed checkpoint of a known format is at this place."""

    kind = "not_a_checkpoint"


class StoreError(CkptError, OSError):
    """The disk or object store failed. Checkpoints that were committed before are unchanged."""

    kind = "store"


class ReplacedError(StoreError):
    """The checkpoint was replaced or deleted during the read. It is not damaged: read it again."""

    kind = "replaced"


class VersionGoneError(ReplacedError):
    """A version of a live state was replaced by newer ones, or its lease has ended: load again."""

    kind = "version_gone"

    def __init__(self, where: str, version: int, newest: int | None) -> None:
        self.version = version
        self.newest = newest
        """The newest version of the moment; None if the state has no version, or is gone."""
        now = "there is no newer one" if newest is None else f"{newest} is the newest"
        super().__init__(f"{where}: version {version} was replaced ({now}): load again")


class UnreachableError(StoreError, ConnectionError):
    """No server answers at this address: it has ended, or the address is stale or wrong."""

    kind = "unreachable"


class StoreTimeoutError(StoreError, TimeoutError):
    """A server accepted a connection and then sent nothing within the time-out."""

    kind = "store_timeout"


class AccessDeniedError(StoreError, PermissionError):
    """The disk refuses this user, or a server of ckpt the token, or wants one."""

    kind = "access_denied"


class ProtocolError(StoreError):
    """The other side sent a message that does not follow the protocol of live states."""

    kind = "protocol"


class BusyError(CkptError):
    """A background save is in flight on a rank, and the call does not wait for it."""

    kind = "busy"


class StateChangedError(CkptError):
    """A tensor was changed in place before the save had copied it; there is no new checkpoint."""

    kind = "state_changed"


class BackgroundError(CkptError):
    """An earlier background save failed, and no caller has seen its error."""

    kind = "background"


class ClosedError(CkptError, ValueError):
    """The checkpoint is closed: open it again to read."""

    kind = "closed"


class UnknownNameError(CkptError, KeyError):
    """An open checkpoint has no tensor of this name."""

    kind = "unknown_name"
    __str__ = Exception.__str__  # KeyError's would put the sentence in quotes


class TensorIndexError(CkptError, IndexError):
    """An index does not fit the shape of a stored tensor."""

    kind = "tensor_index"


class WaitTimeoutError(CkptError, TimeoutError):
    """A background save has not ended, or no newer version has come, within the timeout."""

    kind = "wait_timeout"


class MismatchError(CkptError, ValueError):
    """The checkpoint does not match the target, which is unchanged. Lists all differences."""

    kind = "mismatch"

    def __init__(
        self,
        url: str,
        differences: Sequence[Difference],
        call: str = "ckpt.load",
        has_nothing: bool = False,
        other_names: str | None = None,
        hint: str = "",
        fitting: Set[str] = frozenset(),
    ) -> None:
        """`call` is the call to repeat with the arguments that help.

        `has_nothing` tells that the checkpoint has no name of the target, so that a load with
        `strict=False` would load nothing. `other_names` is the origin of the checkpoint's names if
        they are not its own, and `hint` an argument with which fewer would differ;
        `fitting` are the names that both sides have.
        """
        self.url = url
        self.differences = tuple(differences)
        kinds: dict[str, list[Difference]] = {}
        for difference in self.differences:
            kinds.setdefault(difference.problem, []).append(difference)
        shown = []
        for kind, found in kinds.items():
            shown += [f"  {difference}" for difference in found[:SHOWN_DIFFERENCES]]
            if len(found) > SHOWN_DIFFERENCES:
                shown.append(f"  ... and {len(found) - SHOWN_DIFFERENCES} more ({kind})")
        names = {kind: [difference.name for difference in found] for kind, found in kinds.items()}
        remedy = _remedy(names, call, has_nothing, other_names is None, fitting)
        fits = "has nothing for" if has_nothing else "does not fit"
        by = f", by {other_names}" if other_names else ""
        fewer = f"\n  Fewer differ if {call} gets {hint}." if hint else ""
        super().__init__(
            f"{url} {fits} the target, which was not touched{by}:\n"
            + "\n".join(shown)
            + fewer
            + remedy
        )


SHOWN_DIFFERENCES = 6
"""The most differences of a kind in a message; the exception has all of them."""
NOT_STRICT = frozenset({"missing", "unexpected", "shape"})
"""The differences that `strict=False` skips."""
DCP_LOAD = "ckpt.dcp.load"
"""A call that has torch's arguments."""


def _remedy(
    names: Mapping[str, Sequence[str]],
    call: str,
    has_nothing: bool = False,
    may_rename: bool = True,
    fitting: Set[str] = frozenset(),
) -> str:
    """Returns the last line of a mismatch: the arguments of `call` that help.

    `names` has the names of the differences by kind. `strict=False` is the last advice: it keeps
    what a mistake has left without its values. A load with `rename=` takes no other names by
    itself, so that it is no advice where it has done so, unless `may_rename`. `fitting` are the
    names that both sides have.

    >>> _remedy({"missing": ["w"], "unexpected": ["a.w", "b.w"]}, "ckpt.load").rpartition("{")[2]
    "'a': ''} and exclude=['b.*']"
    """
    if not NOT_STRICT & names.keys():
        return ""
    if call == DCP_LOAD:
        partly = "planner=DefaultLoadPlanner(allow_partial_load=True), which keeps what is missing"
        return (
            f"\n  Call {call} with {partly}; or ckpt.load with strict=False, exclude= or rename=."
            if "missing" in names
            else "\n  Call ckpt.load, which takes strict=False, exclude= and rename=."
        )
    missing, unexpected = names.get("missing", ()), {*names.get("unexpected", ())}
    renamed, number = _most_by_one_rename(missing, unexpected) if may_rename else ({}, 0)
    if number:
        is_sure = not all(*renamed.items())
        some = "Every missing name" if number == len(missing) else f"{number} of these names"
        some += " may be" if not is_sure else " is" if number == len(missing) else " are"
        also = _excluding(missing, unexpected, renamed, fitting)
        kept = sorted({name.partition(".")[0] for name in fitting}) if "" in renamed else ()
        renamed |= {top: top for top in kept}
        other = "" if is_sure else " under another name"
        return f"\n  {some} in the checkpoint{other}: call {call} with rename={renamed}{also}"
    if has_nothing and may_rename:
        return f"\n  Call {call} with rename= if names have changed; or give another checkpoint."
    if names.keys() == {"unexpected"}:
        others = _excluding((), unexpected, {"": ""}, fitting).removeprefix(" and ")
        return (
            f"\n  Give the target these entries as well. Or call {call} with {others}, with "
            "include= and patterns of the target's names, or with strict=False, which skips them."
        )
    renaming = "rename= if names have changed; with " if may_rename and missing else ""
    return (
        f"\n  Call {call} with {renaming}exclude= and patterns of these names, which then stay "
        "as they are; or with strict=False, which leaves all that differs in name or shape as it "
        "is."
    )


def _excluding(
    missing: Sequence[str], unexpected: Set[str], renamed: Mapping[str, str], fitting: Set[str]
) -> str:
    """Returns the `exclude=` of the names that the target lacks after `rename=`; empty if none."""
    (old, new) = next(iter(renamed.items()))
    part = old.rpartition(".")[2] if new else ""  # the states of optimizers follow their parameters
    after = {_after(extra, old, new) for extra in unexpected if part not in extra.split(".")}
    rest, wanted = after - {*missing}, {*missing} | fitting
    tops = {f"{extra.partition('.')[0]}.*" if "." in extra else extra for extra in rest}
    is_theirs = any(name.startswith(top.removesuffix("*")) for top in tops for name in wanted)
    patterns = sorted(rest if is_theirs else tops)
    if len(patterns) > SHOWN_DIFFERENCES:
        return " and exclude= with patterns of these names"
    return f" and exclude={patterns}" if patterns else ""


def _after(name: str, old: str, new: str) -> str:
    """Returns a name with the prefix `new` in the place of `old`; either may be empty."""
    rest = name.removeprefix(f"{old}.") if old else name
    return f"{new}.{rest}" if new and (rest != name or not old) else rest


def _most_by_one_rename(missing: Sequence[str], unexpected: Set[str]) -> tuple[dict[str, str], int]:
    """Returns the `rename=` of one prefix or part that finds at least half of the missing names.

    Returns also how many it finds; 0 if there is none, or if two parts would do as well.

    >>> _most_by_one_rename(["m.out.w", "m.out.b"], {"m.fc.w", "m.fc.b", "o.fc.w"})
    ({'m.fc': 'm.out'}, 2)
    >>> _most_by_one_rename(["m.out.w"], {"m.fc.w", "m.in.w"})
    ({}, 0)
    """
    numbers: dict[tuple[str, str], int] = {}
    for first in missing[:SHOWN_DIFFERENCES]:
        for old, new in _likely(first, unexpected):
            if (old, new) not in numbers:
                after = {_after(name, old, new) for name in unexpected if name.startswith(old)}
                numbers[old, new] = len(after & {*missing})
    most = max(numbers.values(), default=0)
    best = sorted((old, new) for (old, new), number in numbers.items() if number == most)
    # A prefix that one side lacks is a sure sign; a part with another name is one if nothing else
    # comes into question.
    best = [pair for pair in best if not all(pair)] or best
    if 2 * most < len(missing) or not best or (all(best[0]) and len(best) > 1):
        return {}, 0
    return {best[0][0]: best[0][1]}, most


def _likely(first: str, unexpected: Set[str]) -> list[tuple[str, str]]:
    """Returns the prefixes, old and new, of the names that are most like a missing one."""
    parts, likely = first.split("."), []
    for name in sorted(unexpected):
        others = name.split(".")
        pairs = [one == two for one, two in zip(reversed(parts), reversed(others), strict=False)]
        behind = pairs.index(False) if False in pairs else len(pairs)
        if behind:
            old, new = others[:-behind], parts[:-behind]
            before = sum(one == two for one, two in zip(old, new, strict=False))
            likely.append((-behind - before, ".".join(old), ".".join(new)))
    return [(old, new) for _, old, new in sorted(likely)[:SHOWN_DIFFERENCES]]


DifferenceKind = Literal["missing", "unexpected", "shape", "dtype", "structure", "pattern"]
"""`pattern` is a pattern, or a key of `rename=`, that matches no name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a checkpoint and a target."""

    name: str
    problem: DifferenceKind
    detail: str
    """The difference as text, with the values of both sides and the remedy."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


class PartialLoadError(CkptError):
    """A load failed half-way: the tensors in `touched` may hold a mix of old and new bytes."""

    kind = "partial_load"

    def __init__(self, message: str, touched: Sequence[str]) -> None:
        self.touched = tuple(touched)
        super().__init__(message)

    def __str__(self) -> str:
        reason = self.reason.removesuffix(".")
        if not self.touched:
            return f"{reason}. No tensor was touched; values and objects may have changed"
        return f"{reason}. {describe_mixed(self.touched)}"


class DamagedLoadError(PartialLoadError, CorruptError):
    """A load found changed or missing bytes half-way."""

    kind = "corrupt"


class MismatchedLoadError(PartialLoadError, MismatchError):
    """A module's own `load_state_dict` missed or refused names, after tensors were filled."""

    kind = "mismatch"

    def __init__(self, url: str, differences: Sequence[Difference], touched: Sequence[str]) -> None:
        self.url = url
        self.differences = tuple(differences)
        self.touched = tuple(touched)
        CkptError.__init__(
            self, f"{url} does not fit the target: {_format_differences(self.differences)}"
        )


class ReplacedLoadError(PartialLoadError, ReplacedError):
    """The checkpoint was replaced or deleted after a part of it was read into the target."""

    kind = "replaced"


SHOWN_SKIPPED = 3
"""The most skipped differences in a message; the attribute has all of them."""


def _format_differences(differences: Sequence[Difference]) -> str:
    """Returns the first differences as text, and how many more there are."""
    more = len(differences) - SHOWN_SKIPPED
    return "; ".join(map(str, differences[:SHOWN_SKIPPED])) + (
        f"; and {more} more" if more > 0 else ""
    )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that was skipped for an older one."""

    url: str
    kind: str
    """The `kind` of the error that a load would raise: `corrupt`, `not_a_checkpoint`, ..."""
    message: str


class FallbackWarning(Picklable, UserWarning):
    """A checkpoint is not sound, and an older one was used in its place."""

    def __init__(self, taken: str, skipped: Sequence[Skipped]) -> None:
        self.taken = taken
        """The path or URL of the checkpoint that was used."""
        self.skipped = tuple(skipped)
        """The skipped checkpoints, newest first, with the reasons."""
        shown = "\n".join(f"  {difference.message}" for difference in self.skipped)
        super().__init__(
            f"{without_secrets(taken)} is used in place of checkpoints that are not sound:\n{shown}"
        )


class SaveFailedWarning(Picklable, UserWarning):
    """A checkpoint of a run was not saved, or not removed. Training goes on."""


class SecondOutputWarning(Picklable, UserWarning):
    """A checkpoint is complete, and its second output (`also=`) was not written."""


class UnreadableWarning(Picklable, UserWarning):
    """A checkpoint cannot be read (permission, archive class), and is left out of a listing."""


class NotDurableWarning(Picklable, UserWarning):
    """A checkpoint is complete, and the disk did not confirm that a loss of power leaves it."""


class ReplicasWarning(Picklable, UserWarning):
    """Replicas of a tensor differ between ranks; those of one rank are stored."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        self.tensors = tuple(tensors)
        """All tensors that differ; the message names the first ones."""
        super().__init__(message)


class ValuesWarning(Picklable, UserWarning):
    """Plain values differ between ranks, and this rank's are not taken."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        """All values that differ; the message names the first ones."""
        super().__init__(message)


class SkippedWarning(Picklable, UserWarning):
    """A load with `strict=False` has left out what does not fit."""

    def __init__(self, message: str, differences: Sequence[Difference] = ()) -> None:
        self.differences = tuple(differences)
        """All that was left out; the message shows the first ones."""
        super().__init__(message)


def make_skipped_warning(
    where: str, skipped: Sequence[Difference], why: str = "strict=False"
) -> SkippedWarning:
    """Returns the warning about differences that `strict=False`, or another rule, leaves out."""
    text = f"{why} skips {len(skipped)}: {_format_differences(skipped)}"
    return SkippedWarning(f"{without_secrets(where)}: {text}", skipped)


class LeftOverWarning(Picklable, UserWarning):
    """A save has replaced a checkpoint, some of whose files could not be removed."""


class WireWarning(Picklable, UserWarning):
    """Bytes were changed on their way from a store, and were read again. Nothing is damaged."""


class UnverifiedWarning(Picklable, UserWarning):
    """Bytes were read without a comparison of checksums, although the format has checksums."""

    def __init__(self, url: str, tensors: Sequence[str]) -> None:
        self.url = url
        """The checkpoint."""
        self.tensors = tuple(tensors)
        """This rank's tensors that were read from a part of a record; empty if only other ranks
        have such tensors."""
        shown = format_names(self.tensors, 5) or "on other ranks"
        super().__init__(
            f"{without_secrets(url)}: parts of records were read ({shown}), and a record has "
            "one CRC-32 for all its bytes, so these parts were not verified; pass verify='all' to "
            "read and compare such records as a whole, or verify=False to compare none"
        )


for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = "ckpt"  # where users find it, in tracebacks and pickles too
