"""`ckpt doctor`: that it finds what a place can do, and leaves nothing there."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.checking import doctor
from ckpt.checking.doctor import ARCHIVES, examine, harms_of
from ckpt.checking.report import PERMISSIONS, Outcome
from ckpt.errors import LeftOverWarning
from tests.selection import thorough
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault, Request
from tests.stores.server import Server, s3_client
from tools.exit_codes import ExitCode

Run = Callable[..., Any]


def told(server: Server) -> list[str]:
    return [text for key, value in server.options.items() for text in ("-o", option(key, value))]


def option(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def found(run: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    ended = run("doctor", "--json", *arguments)
    return ended.code, json.loads(ended.out)


def outcomes(shown: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["outcome"] for one in shown["findings"]}


def everything_in(server: Server, bucket: str) -> list[Any]:
    client = s3_client(server)
    versions = client.list_object_versions(Bucket=bucket)
    return [
        *versions.get("Versions", ()),
        *versions.get("DeleteMarkers", ()),
        *client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()),
    ]


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    s3_client(moto).create_bucket(Bucket="doctored")
    with FaultProxy(moto) as opened:
        yield opened
    assert everything_in(moto, "doctored") == []
    s3_client(moto).delete_bucket(Bucket="doctored")


def test_a_disk_is_tried_and_left_as_it_was(tmp_path: Path, run: Run) -> None:
    code, shown = found(run, tmp_path / "new" / "runs")
    assert list(tmp_path.iterdir()) == []
    assert shown["complete"] is (code == ExitCode.FINE)
    missing = {name for name, outcome in outcomes(shown).items() if outcome != "ok"}
    assert missing <= {"durable", "hard link", "rename without replacing"}  # of the disk of tests
    assert code == (ExitCode.DIFFERENT if "durable" in missing else ExitCode.FINE)
    text = run("doctor", tmp_path).out
    assert "fsync" in text
    assert "one of several simultaneous commits succeeds" in text


def test_nothing_is_written_for_a_read_only_look(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_bytes(b"some bytes")
    before = tmp_path.stat()
    code, shown = found(run, tmp_path, "--read-only")
    assert (tmp_path.stat().st_mtime_ns, code) == (before.st_mtime_ns, ExitCode.FINE)
    assert shown["folder"] == ""
    said = outcomes(shown)
    assert (said["list"], said["range read"], said["put"]) == ("ok", "ok", "not tried")
    assert {one["name"]: one["outcome"] for one in shown["promises"]}[
        "checkpoints are read"
    ] == "ok"


def test_a_clock_that_differs_is_told_with_the_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SimpleNamespace(time=lambda: time.time() + 300, perf_counter=time.perf_counter)
    monkeypatch.setattr(doctor, "time", here)
    clock = next(one for one in examine(tmp_path).findings if one.name == "clock")
    assert clock.outcome is Outcome.MISSING
    assert re.fullmatch(r"the store is (299|300) s behind this machine", clock.detail)


def test_a_place_that_cannot_be_reached_is_an_error(moto: Server, run: Run) -> None:
    ended = run("doctor", "s3://no-such-bucket/runs", *told(moto))
    assert ended.code == ExitCode.STORE
    assert "there is no such bucket" in ended.err


def test_a_bucket_is_tried_and_left_as_it_was(proxy: FaultProxy, run: Run) -> None:
    code, shown = found(run, "s3://doctored/runs", *told(proxy.server))
    assert set(outcomes(shown).values()) == {"ok"}
    assert code == ExitCode.FINE
    writes = {one.request.target for one in proxy.seen if one.request.method in ("PUT", "POST")}
    assert all(shown["folder"] in one or "?delete" in one for one in writes)


def lacks(permission: str) -> Callable[[Request], Fault | None]:
    """Refuses the requests of S3 that need a permission, also on a server that checks none."""
    words = {
        "s3:ListBucket": ("GET", "list-type"),
        "s3:ListBucketMultipartUploads": ("GET", "?uploads"),
        "s3:PutObject": ("PUT", "/"),
        "s3:DeleteObject": ("DELETE", "/"),
        "s3:AbortMultipartUpload": ("DELETE", "uploadId"),
        "s3:GetBucketVersioning": ("GET", "?versioning"),
        "s3:GetBucketObjectLockConfiguration": ("GET", "?object-lock"),
        "s3:GetLifecycleConfiguration": ("GET", "?lifecycle"),
    }
    method, word = words[permission]

    def schedule(one: Request) -> Fault | None:
        many = permission == "s3:DeleteObject" and one.method == "POST" and "?delete" in one.target
        other = permission == "s3:DeleteObject" and "uploadId" in one.target
        is_it = (one.method == method and word in one.target and not other) or many
        return Fault.DENIED if is_it else None

    return schedule


@pytest.mark.parametrize(
    ("permission", "findings", "code"),
    [
        ("s3:ListBucket", {"list", "hidden until done", "list after put"}, 1),
        pytest.param("s3:ListBucketMultipartUploads", {"uploads"}, 1, marks=pytest.mark.thorough),
        pytest.param("s3:PutObject", {"put"}, 1, marks=pytest.mark.thorough),
        pytest.param("s3:GetBucketVersioning", {"versioning"}, 0, marks=pytest.mark.thorough),
        pytest.param(
            "s3:GetBucketObjectLockConfiguration", {"object lock"}, 0, marks=pytest.mark.thorough
        ),
        pytest.param("s3:GetLifecycleConfiguration", {"lifecycle"}, 0, marks=pytest.mark.thorough),
    ],
)
def test_a_missing_permission_is_named(
    proxy: FaultProxy, run: Run, permission: str, findings: set[str], code: int
) -> None:
    assert permission in PERMISSIONS["s3"].values()
    proxy.schedule = lacks(permission)
    ended, shown = found(run, "s3://doctored/runs", *told(proxy.server))
    denied = {one["name"]: one for one in shown["findings"] if one["outcome"] == "denied"}
    assert findings <= set(denied)
    assert all(permission in denied[one]["detail"] for one in findings)
    assert ended == code


@pytest.mark.thorough
@pytest.mark.parametrize("permission", ["s3:DeleteObject", "s3:AbortMultipartUpload"])
def test_what_cannot_be_removed_is_named(proxy: FaultProxy, run: Run, permission: str) -> None:
    proxy.schedule = lacks(permission)
    with pytest.warns(LeftOverWarning, match="could not be removed"):
        code, shown = found(run, "s3://doctored/runs", *told(proxy.server))
    assert code == ExitCode.DIFFERENT
    proxy.schedule = lambda one: None
    client, left = s3_client(proxy.server), everything_in(proxy.server, "doctored")
    assert sorted(one["Key"].rpartition("/")[2] for one in left) == sorted(shown["left_over"])
    for one in left:
        key = {"Bucket": "doctored", "Key": one["Key"]}
        if "UploadId" in one:
            client.abort_multipart_upload(**key, UploadId=one["UploadId"])
        else:
            client.delete_object(**key)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [thorough(9), 34, thorough(58)])
def test_an_interrupt_leaves_nothing_behind(proxy: FaultProxy, run: Run, number: int) -> None:
    def interrupt(one: Request) -> Fault | None:
        if one.number != number:
            return None
        os.kill(os.getpid(), signal.SIGINT)
        return Fault.DENIED

    proxy.schedule = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    try:
        assert run("doctor", "s3://doctored/runs", *told(proxy.server)).code == ExitCode.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.thorough
def test_versions_and_rules_of_a_bucket_are_told_and_no_version_is_left(
    proxy: FaultProxy, run: Run
) -> None:
    client = s3_client(proxy.server)
    on = {"Status": "Enabled"}
    client.put_bucket_versioning(Bucket="doctored", VersioningConfiguration=on)
    rules = [
        {
            "ID": "old",
            "Status": "Enabled",
            "Filter": {"Prefix": "runs/"},
            "Transitions": [{"Days": 90, "StorageClass": ARCHIVES[0]}],
        },
        {
            "ID": "elsewhere",
            "Status": "Enabled",
            "Filter": {"Prefix": "logs/"},
            "Expiration": {"Days": 1},
        },
    ]
    given = {"Rules": rules}
    client.put_bucket_lifecycle_configuration(Bucket="doctored", LifecycleConfiguration=given)
    code, shown = found(run, "s3://doctored/runs", *told(proxy.server))
    details = {one["name"]: one["detail"] for one in shown["findings"]}
    assert details["versioning"].startswith("Enabled")
    assert details["lifecycle"] == "old moves files to GLACIER after 90 days"
    assert code == ExitCode.DIFFERENT


@pytest.mark.parametrize(
    ("rule", "harms"),
    [
        ({"Expiration": {"Days": 7}}, 1),
        ({"Expiration": {"Days": 7}, "Status": "Disabled"}, 0),
        ({"Expiration": {"ExpiredObjectDeleteMarker": True}}, 0),
        ({"NoncurrentVersionExpiration": {"NoncurrentDays": 3}}, 0),
        ({"Transitions": [{"Days": 7, "StorageClass": "STANDARD_IA"}]}, 0),
        ({"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}, 1),
        ({"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}}, 0),
        ({"Expiration": {"Days": 7}, "Filter": {"Tag": {"Key": "a", "Value": "b"}}}, 0),
        ({"Expiration": {"Days": 7}, "Filter": {"And": {"Prefix": "runs/gpt/step-"}}}, 1),
        ({"Expiration": {"Days": 7}, "Filter": {"Prefix": "runs/gptx"}}, 0),
        ({"Expiration": {"Days": 7}, "Prefix": "runs"}, 1),
    ],
)
def test_a_rule_is_harmful_if_it_takes_current_files_of_the_place(
    rule: dict[str, Any], harms: int
) -> None:
    assert len(list(harms_of({"Status": "Enabled", **rule}, "runs/gpt"))) == harms


def test_the_result_is_a_value_without_secrets(moto: Server, tmp_path: Path) -> None:
    url = moto.url(tmp_path.name)
    examination = examine(url, read_only=True, storage_options=moto.options)
    assert moto.options["secret"] not in repr(examination)
