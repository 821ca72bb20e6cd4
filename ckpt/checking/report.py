"""The results of checks, as values to print, compare, or store as JSON.

`verify` returns a `Report` of a checkpoint. `ckpt doctor` returns an `Examination` of a place: what
was found there, and which promises of ckpt hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from formats.catalog import Catalog
from formats.errors import FormatError


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a stored checkpoint."""

    file: str
    """The file in the checkpoint's folder; the folder itself if no single file is damaged."""
    message: str
    """The problem, its place and the remedy: complete without the other fields."""
    tensor: str | None = None
    """The damaged tensor, if the problem concerns one."""
    lo: int | None = None
    """The first damaged byte of the file, if known."""
    hi: int | None = None
    """One past the last damaged byte."""
    kind: str = "corrupt"
    """The `kind` of the error that a read would raise: `corrupt`, `hostile`, `format`, ..."""

    @classmethod
    def of(cls, error: FormatError, file: str, tensor: str | None = None) -> Problem:
        """Returns the problem of a reader's error."""
        return cls(file, str(error), tensor, kind=error.kind)


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of the check of one format."""

    checked: str
    """The parts that this format lets a reader check, as text."""
    bytes_checked: int = 0
    """Bytes that were compared with a checksum."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks that are not damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of `verify`."""

    url: str
    format: str
    files: int = 0
    """The number of the checkpoint's files; 0 if its description could not be read."""
    bytes_checked: int = 0
    """Bytes that were compared with a checksum."""
    checked: str
    """The parts that this format lets a reader check, as text."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    """Remarks that are not damage, such as files that belong to no checkpoint."""
    tensors: int | None = None
    """The number of its tensors; None if its description could not be read."""

    @property
    def sound(self) -> bool:
        """Whether the check found no problem."""
        return not self.problems


def file_problems(sizes: Mapping[str, int], catalog: Catalog) -> str:
    """Returns a text on files of a native checkpoint that are missing or have other sizes.

    It is empty without such files, and for other formats, whose readers check themselves. `sizes`
    are those of the files in the folder.
    """
    if catalog.format != "ckpt":
        return ""
    files = catalog.files
    missing = sum(file.name not in sizes for file in files)
    other = sum(sizes.get(file.name, file.size) != file.size for file in files)
    of = f"of {len(files)} files"
    problems = (f"{missing} {of} missing", f"{other} {of} cut or appended to")
    return ", ".join(
        text for text, number in zip(problems, (missing, other), strict=True) if number
    )


class Outcome(str, Enum):
    """The result of one try, or the state of a promise."""

    OK = "ok"
    MISSING = "missing"
    DENIED = "denied"
    """No permission."""
    UNKNOWN = "unknown"
    """The place does not tell."""
    NOT_TRIED = "not tried"
    """It needs a write."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried."""

    name: str
    outcome: Outcome
    detail: str
    permission: str
    """The action that it needs, as the store's own documents name it; empty on disks."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise of ckpt, and whether it holds at this place."""

    name: str
    where: str
    """The page of the documentation, and the heading or the number of the guarantee in it."""
    outcome: Outcome
    because: tuple[str, ...]
    """The findings for which it is not OK."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The result for one place."""

    url: str
    kind: str
    """`disk`, `s3`, `azure`, `google`, or the protocol of another driver."""
    folder: str
    """The name of the folder in which files were written; empty if none were."""
    findings: tuple[Finding, ...]
    promises: tuple[Promise, ...]
    left_over: tuple[str, ...]
    """Files in `folder` that could not be removed."""

    @property
    def is_complete(self) -> bool:
        """Whether no promise is known to fail, and nothing stays."""
        failing = [promise for promise in self.promises if promise.outcome is Outcome.MISSING]
        return not failing and not self.left_over


KINDS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "google"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
}
_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/"
PERMISSIONS: Mapping[str, Mapping[str, str]] = {
    "s3": {
        "list": "s3:ListBucket",
        "read": "s3:GetObject",
        "write": "s3:PutObject",
        "delete": "s3:DeleteObject",
        "abort": "s3:AbortMultipartUpload",
        "uploads": "s3:ListBucketMultipartUploads",
        "versioning": "s3:GetBucketVersioning",
        "object lock": "s3:GetBucketObjectLockConfiguration",
        "lifecycle": "s3:GetLifecycleConfiguration",
    },
    "google": {
        "list": "storage.objects.list",
        "read": "storage.objects.get",
        "write": "storage.objects.create, to overwrite also storage.objects.delete",
        "delete": "storage.objects.delete",
        **dict.fromkeys(("versioning", "object lock", "lifecycle"), "storage.buckets.get"),
    },
    "azure": {
        **dict.fromkeys(("list", "read", "uploads"), f"{_BLOBS}read"),
        **dict.fromkeys(("write", "abort"), f"{_BLOBS}write"),
        "delete": f"{_BLOBS}delete",
    },
}
"""The names of permissions, by kind of store."""

SETTINGS = ("versioning", "object lock", "lifecycle")
_PROMISES = (
    ("checkpoints are read", "Stores: Reading files", ("list", "range read")),
    (
        "checkpoints are saved",
        "Stores: Writing files",
        ("list", "put", "range read", "large file"),
    ),
    ("checkpoints are replaced and removed", "Runs: guarantee 2", ("overwrite", "delete")),
    (
        "one of several simultaneous commits succeeds; a run has one owner",
        "Stores: Promises; Runs: guarantee 4",
        ("conditional put", "commits at once"),
    ),
    (
        "a replaced manifest is old or new",
        "Stores: Promises; Runs: guarantee 8",
        ("atomic replace",),
    ),
    (
        "an unfinished file is invisible",
        "Stores: Promises; Runs: guarantee 1",
        ("hidden until done",),
    ),
    (
        "acknowledged data is durable",
        "Stores: Promises; Runs: guarantee 1",
        ("fsync", "durable"),
    ),
    ("a step is found once it is committed", "Runs: guarantees 7 and 8", ("list after put",)),
    (
        "a late request does nothing",
        "Stores: Promises",
        ("conditional overwrite", "conditional delete"),
    ),
    ("`ckpt gc` removes uploads", "Stores: Writing files", ("uploads", "abort")),
    ("no rule removes or archives a step", "Runs: guarantee 2", ("lifecycle",)),
    (
        "ages are right: `ckpt gc`, `younger_than`",
        "Runs: Checkpoints that stay",
        ("clock",),
    ),
)
"""A promise, where it is made, and the findings that it needs as far as the place has them."""


def promises_of(found: Mapping[str, Finding]) -> tuple[Promise, ...]:
    """Returns each promise that the findings, by their names, bear on."""
    return tuple(
        _promise(name, where, [found[need] for need in needs if need in found])
        for name, where, needs in _PROMISES
        if set(needs) & set(found)
    )


def _promise(name: str, where: str, tried: Sequence[Finding]) -> Promise:
    outcomes = {trial.name: _weight(trial) for trial in tried}
    worst = next((trial for trial in _WORST_FIRST if trial in outcomes.values()), Outcome.OK)
    because = [need for need, outcome in outcomes.items() if outcome is worst is not Outcome.OK]
    return Promise(name, where, worst, tuple(because))


_WORST_FIRST = (Outcome.MISSING, Outcome.NOT_TRIED, Outcome.UNKNOWN)


def _weight(finding: Finding) -> Outcome:
    """Returns the meaning for a promise: a permission lacks, but unread rules may be good ones."""
    if finding.outcome is Outcome.DENIED:
        return Outcome.UNKNOWN if finding.name in SETTINGS else Outcome.MISSING
    return finding.outcome
