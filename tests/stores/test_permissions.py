"""docs/permissions.md has the permissions of each call: neither fewer nor more than it uses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.stores.store import open_store
from tests.selection import slow
from tests.stores.fault_proxy import FaultProxy, Seen
from tests.stores.faults import Fault
from tests.stores.radosgw import OTHER
from tests.stores.server import Server, s3_client
from tools.main import main

PAGE = Path(__file__).parents[2] / "docs" / "permissions.md"
Way = Callable[[str, Any, Path], object]


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(1_400_000, generator=generator), "step": 3}  # two parts


def command(*words: str) -> Way:
    """The command with the URL in the place of `URL` and a new path in that of `DISK`."""

    def run(url: str, options: Any, folder: Path) -> None:
        places = {"URL": url, "STEP": f"{url}/step-1", "NEW": f"{url}/new", "DISK": f"{folder}/d"}
        told = [text for one in options.items() for text in ("-o", option(*one))]
        assert main([*(places.get(word, word) for word in words), *told]) in (0, 1)

    return run


def option(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def save(url: str, options: Any, folder: Path) -> None:
    ckpt.save(f"{url}/step-9", state(), storage_options=options)


def overwrite(url: str, options: Any, folder: Path) -> None:
    ckpt.save(f"{url}/step-1", state(), overwrite=True, storage_options=options)


def load(url: str, options: Any, folder: Path) -> None:
    ckpt.load(f"{url}/step-1", {"w": torch.zeros(4), "step": 0}, storage_options=options)


def copied_to(url: str, options: Any, folder: Path) -> None:
    ckpt.save(folder / "run" / "step-1", state(), overwrite=True)
    command("cp", f"{folder}/run", f"{url}/copy")(url, options, folder)


def run_of(keep: ckpt.Keep, steps: range, **how: Any) -> Way:
    def run(url: str, options: Any, folder: Path) -> None:
        with ckpt.Checkpointer(
            url, every_steps=1, keep=keep, storage_options=options, blocking=True, **how
        ) as run:
            run.restore({"w": torch.zeros(4), "step": 0}, strict=False)
            for step in steps:
                run.save(step, {"w": torch.ones(4), "step": 3})
            run.wait_until_finished()
            assert run.failures == 0

    return run


WAYS: dict[str, Way] = {
    "ckpt.load": load,
    "ckpt.read": lambda url, options, folder: ckpt.read(f"{url}/step-1", storage_options=options),
    "ckpt.latest": lambda url, options, folder: ckpt.latest(url, storage_options=options),
    "ckpt ls": command("ls", "URL"),
    "ckpt inspect": command("inspect", "STEP"),
    "ckpt verify": command("verify", "STEP"),
    "ckpt diff": command("diff", "STEP", "STEP"),
    "ckpt latest": command("latest", "URL"),
    "ckpt plan": command("plan", "STEP", "--world-size", "2"),
    "ckpt convert from": command("convert", "STEP", "DISK", "--to", "ckpt"),
    "ckpt top": command("top", "--once", "--interval", "0.01s", "URL"),
    "ckpt.save": save,
    "ckpt.save(overwrite=True)": overwrite,
    "Checkpointer": run_of(ckpt.Keep(), range(11, 14)),
    "Checkpointer(keep=)": run_of(ckpt.Keep(last=2), range(11, 14)),
    "Checkpointer(read_only=True)": run_of(ckpt.Keep(), range(0), read_only=True),
    "ckpt convert to": command("convert", "STEP", "NEW", "--to", "hf"),
    "ckpt rm": command("rm", "STEP"),
    "ckpt rm --keep": command("rm", "--keep", "last=1", "URL"),
    "ckpt gc": command("gc", "URL", "--older-than", "0s"),
    "ckpt gc --delete": command("gc", "URL", "--delete", "--older-than", "0s"),
    "ckpt cp from": command("cp", "URL", "DISK"),
    "ckpt cp to": copied_to,
    "ckpt pin": command("pin", "STEP", "a"),
    "ckpt doctor": command("doctor", "URL"),
    "ckpt doctor --read-only": command("doctor", "--read-only", "URL"),
}


def prepared(server: Server, name: str) -> str:
    """The URL of a run with three steps, a file that a killed save has left, and an upload."""
    url = server.url(name)
    for step in (1, 2, 3):
        metadata = {"step": str(step), "order": f"1.{step}", "began": f"{step}.0"}
        small = {"w": torch.full((4,), float(step)), "step": step}
        ckpt.save(f"{url}/step-{step}", small, metadata=metadata, storage_options=server.options)
    with open_store(f"{url}/step-3", server.options) as store:
        store.commit("0123456789abcdef-00000.safetensors", b"left", replace=True)
    upload = {"Bucket": server.bucket, "Key": f"{name}/step-3/0123456789abcdef-00001.safetensors"}
    client = s3_client(server)
    upload_id = client.create_multipart_upload(**upload)["UploadId"]
    client.upload_part(**upload, UploadId=upload_id, PartNumber=1, Body=b"a part")
    return url


def action_of(one: Seen) -> str:
    """The action that a request needs, by Amazon's "Actions for S3"."""
    method, (path, _, query) = one.request.method, one.request.target.partition("?")
    word = next(iter(re.findall(r"(?:^|&)([a-zA-Z-]+)", query)), "")
    of_bucket = "/" not in path.strip("/")
    if method == "GET" and of_bucket:
        return {
            "uploads": "ListBucketMultipartUploads",
            "versions": "ListBucketVersions",
            "versioning": "GetBucketVersioning",
            "object-lock": "GetBucketObjectLockConfiguration",
            "lifecycle": "GetLifecycleConfiguration",
        }.get(word, "ListBucket")
    is_upload = "uploadId=" in query
    return {
        "GET": "ListMultipartUploadParts" if is_upload else "GetObject",
        "HEAD": "ListBucket" if of_bucket else "GetObject",
        "PUT": "PutObject",
        "POST": "DeleteObject" if of_bucket else "PutObject",
        "DELETE": "AbortMultipartUpload" if is_upload else "DeleteObject",
    }[method]


def actions_of(seen: Sequence[Seen]) -> set[str]:
    return {f"s3:{action_of(one)}" for one in seen}


# The page.


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_BUDGET", "20MiB")  # parts of 5 MiB


def rows() -> Iterator[tuple[list[str], set[str], set[str]]]:
    """The calls of each row of the page, their actions, and those that they can do without."""
    for line in PAGE.read_text().splitlines():
        cells = [re.findall(r"`([^`]+)`( from| to)?", cell) for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[1] and cells[1][0][0].startswith("s3:"):
            calls, actions, later = ([text + more for text, more in cell] for cell in cells)
            yield calls, set(actions), set(later)


WITHOUT_A_WAY = {
    "ckpt serve": "a server that runs; it reads as `ckpt ls` and `ckpt.load` do",
    "ckpt.delete": "`ckpt rm` calls it",
}


def test_the_page_has_each_call_once() -> None:
    calls = [call for row, _, _ in rows() for call in row]
    assert sorted(calls) == sorted({*WAYS, *WITHOUT_A_WAY})


@pytest.mark.thorough
@pytest.mark.parametrize("number", [slow(at) if at % 2 else at for at in range(len([*rows()]))])
def test_the_calls_of_a_row_use_its_actions_and_no_others(
    moto: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    calls, actions, more = [*rows()][number]
    tells = more & {"s3:GetBucketVersioning", "s3:ListBucketVersions"}
    used = set()
    with FaultProxy(moto) as proxy:
        for at, call in enumerate(calls):
            if call not in WITHOUT_A_WAY:
                url = prepared(moto, f"{tmp_path.name}/{at}")
                proxy.clear()
                (tmp_path / str(at)).mkdir()
                WAYS[call](url, proxy.server.options, tmp_path / str(at))
                found = actions_of(proxy.seen)
                assert found <= actions | tells, call
                used |= found - tells
    assert used == actions


def test_a_save_that_fails_uses_no_more_than_its_row_has(moto: Server, tmp_path: Path) -> None:
    actions, later = next((one, more) for calls, one, more in rows() if "ckpt.save" in calls)
    used = set()
    with FaultProxy(moto) as proxy:
        for number, word in enumerate(("partNumber=2", "manifest.json")):
            proxy.schedule = lambda one, word=word: (
                Fault.DENIED if one.method == "PUT" and word in one.target else None
            )
            with pytest.raises(ckpt.AccessDeniedError):
                save(moto.url(f"{tmp_path.name}/{number}"), proxy.server.options, tmp_path)
        used = actions_of(proxy.seen)
    assert used <= actions | later
    assert used - actions == {"s3:AbortMultipartUpload", "s3:DeleteObject"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len([*rows()])))
def test_a_user_with_the_actions_of_a_row_alone_can_make_its_calls(
    radosgw_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    calls, actions, _ = [*rows()][number]
    client, bucket = s3_client(radosgw_server), radosgw_server.bucket
    options = {**radosgw_server.options, "key": OTHER, "secret": OTHER}
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"AWS": [f"arn:aws:iam:::user/{OTHER}"]},
                "Action": sorted(actions),
                "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
            }
        ],
    }
    for at, call in enumerate(calls):
        if call not in WITHOUT_A_WAY:
            url = prepared(radosgw_server, f"{tmp_path.name}/{at}")
            (tmp_path / str(at)).mkdir()
            if "doctor" not in call:  # to it a denial is a finding
                with pytest.raises((ckpt.AccessDeniedError, AssertionError)):
                    WAYS[call](url, options, tmp_path / str(at))
            client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
            try:
                WAYS[call](url, options, tmp_path / str(at))
            finally:
                client.delete_bucket_policy(Bucket=bucket)
