"""A run in a bucket: how many requests it takes, its index, and steps that cannot be read."""

from __future__ import annotations

import codecs
import json
import os
import random
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.loading.newest import newest_sound
from ckpt.run import steps as run_steps
from ckpt.run.steps import list_steps, removals, remove_together
from ckpt.saving import agreement
from ckpt.saving.writers import arena_writer
from ckpt.stores.store import join_url, open_store
from ckpt.transfer import facts
from ckpt.transfer.facts import INDEX
from tests.selection import slow
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault, Request
from tests.stores.places import SERVERS, Place, place_at
from tests.stores.server import Server, s3_client
from tools.main import main

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def as_a_new_process() -> None:
    facts.forget()


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto) as opened:
        yield opened


def state() -> dict[str, Any]:
    return {"w": torch.arange(100.0), "m": torch.zeros(5, 5)}


def opened(url: str, options: Any, **how: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(url, every_steps=1, blocking=True, storage_options=options, **how)


def copied(url: str, options: Any, steps: range) -> None:
    """Copies the checkpoint of step 1 to other steps."""
    with open_store(url, options) as store:
        files = {name: store.read_whole(name, 1 << 20) for name in store.below() or {}}
        for step in steps:
            for name, data in files.items():
                if name.startswith("step-1/"):
                    store.commit(name.replace("step-1", f"step-{step}"), data, replace=True)


def kind_of(request: Request) -> str:
    """The method of a request and the file that it concerns; a listing is LIST."""
    path, _, query = request.target.partition("?")
    if request.method == "GET" and ("list-type" in query or "uploads" in query):
        return "LIST"
    name = path.rpartition("/")[2]
    return f"{request.method} {'shard' if name.endswith('.safetensors') else name}"


# Requests.


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        pytest.param("moto", 12, marks=pytest.mark.thorough),
        *(pytest.param(kind, 300, marks=pytest.mark.slow) for kind in ("moto", "radosgw")),
        pytest.param("azurite", 100, marks=pytest.mark.slow),
    ],
)
def test_the_requests_of_a_run_do_not_grow_with_its_steps(
    servers: Callable[[str], Server],
    tmp_path: Path,
    kind: str,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    with FaultProxy(servers(kind)) as proxy:
        count_requests_of_a_run(proxy, tmp_path, steps, monkeypatch, capsys)


def count_requests_of_a_run(
    proxy: FaultProxy, tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # Azure lists blobs and uncommitted ones apart.
    uploads = 1 if proxy.server.protocol == "s3" else 2
    # Saves are minutes apart, and requests take milliseconds, also on a machine that is busy.
    monkeypatch.setattr(agreement, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(run_steps, "FRESH_SECONDS", 60.0)
    folder = f"{tmp_path.name}/run"
    url, options = proxy.server.url(folder), proxy.server.options

    def requests(action: Callable[[], object]) -> int:
        facts.forget()
        proxy.clear()
        action()
        return len(proxy.seen)

    with opened(url, options) as run:
        run.save(1, state())
    copied(url, options, range(2, steps))
    assert requests(lambda: ckpt.latest(url, storage_options=options)) == steps + 1
    with opened(url, options) as run:
        run.restore(state())
        run.save(steps, state())
        run.wait_until_finished()
        proxy.clear()
        run.save(steps + 1, state())
        run.wait_until_finished()
        assert len(proxy.seen) == 5
    assert requests(lambda: ckpt.latest(url, storage_options=options)) == 3
    assert requests(lambda: ckpt.run_steps(url, storage_options=options)) == 2
    assert requests(lambda: ckpt.gc(url, storage_options=options)) == 2 + uploads
    told = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    listed = ["ls", url, "--json", *(text for one in told for text in ("-o", one))]
    assert requests(lambda: main(listed)) == 4
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [*range(1, steps + 2)]
    assert {row["state"] for row in rows} == {"complete"}

    def go_on() -> None:
        with opened(url, options) as run:
            assert run.restore(state()) == steps + 1

    assert requests(go_on) <= 8
    with opened(url, options, keep=ckpt.Keep(last=steps)) as run:
        run.restore(state())
        for step in (steps + 2, steps + 3):
            proxy.clear()
            run.save(step, state())
            run.wait_until_finished()
        assert len(proxy.seen) == 8
        assert len(run.all_steps()) == steps
    place = join_url(url, f"step-{steps}")
    assert requests(lambda: ckpt.delete(place, storage_options=options)) <= 10
    keep = ckpt.Keep(last=10)
    assert requests(lambda: list(removals(url, keep, options, dry_run=True))) == 2
    assert requests(lambda: list(removals(url, keep, options))) == 5
    with open_store(url, options) as store:
        left = store.below() or {}
    assert len(left) == 2 * 10 + 2, left  # manifests and shards, the index and the owner


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["moto", *map(slow, SERVERS[1:3])])
def test_many_files_are_deleted_in_few_requests_or_one_by_one(
    servers: Callable[[str], Server], tmp_path: Path, kind: str
) -> None:
    with (
        FaultProxy(servers(kind)) as proxy,
        open_store(proxy.server.url(tmp_path.name), proxy.server.options) as store,
    ):
        for is_refused in (False, True):
            names = [f"{number}/file" for number in range(12)]
            for name in names:
                store.commit(name, b"x", replace=True)
            proxy.clear()
            proxy.schedule = lambda one: Fault.DENIED if one.method == "POST" else None
            if not is_refused:
                proxy.schedule = lambda one: None
            store.delete_all([*names, "missing/file"])
            assert store.below() == {}
            assert proxy.count("DELETE") == (13 if is_refused else 0)


# The index.


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_no_index_makes_a_step_look_committed_or_hides_one(
    moto: Server, tmp_path: Path, seed: int
) -> None:
    """Old programs, deletes and overwrites beside it, old indices written late, changed bytes."""
    chance, url, options = random.Random(seed), moto.url(f"{tmp_path.name}/run"), moto.options
    indices: list[bytes] = []

    def listed(has_index: bool) -> list[Any]:
        facts.forget()
        with open_store(url, options) as store:
            if not has_index:
                store.delete(INDEX)
            steps = ckpt.run_steps(url, storage_options=options)
            found = facts.checkpoints_in(store)
            bases = {name: one.bases for name, one in found.facts.items()}
            newest = newest_sound(url, False, options) if steps else None
            return [steps, bases, newest]

    def noted() -> None:
        facts.forget()
        with open_store(url, options) as store:
            facts.write_index(store, facts.checkpoints_in(store))
            if INDEX in store.names():
                indices.append(store.read_whole(INDEX, 1 << 20))

    for number in range(14):
        step = f"{url}/step-{chance.randrange(1, 6)}"
        match chance.choice(
            ["save", "save", "borrow", "delete", "uncommit", "index", "late", "bad"]
        ):
            case "save":
                with suppress(ckpt.InUseError):
                    new = {"w": torch.full((4,), float(number))}
                    ckpt.save(step, new, overwrite=True, storage_options=options)
            case "borrow":
                with suppress(ckpt.CkptError):
                    borrowed = {"w": torch.full((4,), float(number))}
                    base = f"{url}/step-{chance.randrange(1, 6)}"
                    ckpt.save(step, borrowed, base=base, storage_options=options)
            case "delete":
                with suppress(ckpt.InUseError):
                    ckpt.delete(step, missing_ok=True, storage_options=options)
            case "uncommit":
                with open_store(step, options) as store:
                    store.delete("manifest.json")
            case "index":
                noted()
            case "late" if indices:
                with open_store(url, options) as store:
                    store.commit(INDEX, chance.choice(indices), replace=True)
            case "bad" if indices:
                data = bytearray(chance.choice(indices))
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                with open_store(url, options) as store:
                    store.commit(INDEX, bytes(data[: chance.randrange(1, len(data) * 2)]), True)
        warm = ckpt.run_steps(url, storage_options=options)
        seen, fresh = listed(has_index=True), listed(has_index=False)
        assert seen == fresh
        assert warm == fresh[0]


def test_a_run_goes_on_where_its_index_cannot_be_written(proxy: FaultProxy, tmp_path: Path) -> None:
    url, options = proxy.server.url(tmp_path.name), proxy.server.options
    proxy.schedule = lambda one: Fault.DENIED if INDEX in one.target else None
    with opened(url, options, keep=ckpt.Keep(last=2)) as run:
        for step in range(1, 5):
            run.save(step, state())
        run.wait_until_finished()
        assert run.failures == 0
        assert run.all_steps() == [4, 3]


def test_a_base_that_is_taken_while_a_policy_removes_it_keeps_its_files(
    moto: Server, tmp_path: Path
) -> None:
    url, options = moto.url(tmp_path.name), moto.options
    more = {"w": torch.arange(1000.0), "step": 2}
    with opened(url, options) as run:
        for step in (1, 2):
            run.save(step, {"w": torch.arange(1000.0), "step": step})
    steps, _, found = list_steps(url, options, with_bases=True)
    ckpt.save(f"{url}/mine", more, base=f"{url}/step-1", storage_options=options)
    assert found is not None
    with open_store(url, options) as store:
        left = remove_together(store, [one for one in steps if one.step == 1], found)
    assert sorted(left.facts) == ["mine", "step-2"]
    read = ckpt.read(f"{url}/mine", storage_options=options)
    assert torch.equal(read["w"], more["w"])
    assert ckpt.gc(url, delete=True, older_than=0, storage_options=options) == []


# Steps that cannot be read.


@contextmanager
def out_of_reach(place: Place, step: int) -> Iterator[None]:
    """Inside, the files of a step cannot be read."""
    if place.server is None:
        folder = Path(place.url, f"step-{step}")
        folder.chmod(0)
        with powerless(folder.parent):
            yield
        folder.chmod(0o755)
        return
    bucket = place.server.bucket
    prefix = f"{place.url.partition(bucket)[2][1:]}/step-{step}/"
    if place.kind == "azurite":
        from azure.storage.blob import ContainerClient

        text = place.options["connection_string"]
        with ContainerClient.from_connection_string(text, bucket) as container:
            for blob in container.list_blobs(prefix):
                container.get_blob_client(blob.name).set_standard_blob_tier("Archive")
        yield
        return
    client = s3_client(place.server)
    if place.kind == "radosgw":  # it has no archive
        denied = {"Effect": "Deny", "Principal": "*", "Action": ["s3:GetObject"]}
        statement = [{**denied, "Resource": [f"arn:aws:s3:::{bucket}/{prefix}*"]}]
        policy = {"Version": "2012-10-17", "Statement": statement}
        client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        try:
            yield
        finally:
            client.delete_bucket_policy(Bucket=bucket)
        return
    for one in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        source = {"Bucket": bucket, "Key": one["Key"]}
        client.copy_object(Bucket=bucket, Key=one["Key"], CopySource=source, StorageClass="GLACIER")
    yield


@contextmanager
def powerless(folder: Path) -> Iterator[None]:
    """Inside, this process is an ordinary user, who owns the folder and its files."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, -1)
    for above in (folder, *folder.parents[:-2]):
        above.chmod(0o755)
    import_module("resource")  # the user may not read Python's own folder
    codecs.lookup("ascii")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture(params=["path", "moto", slow("radosgw"), slow("azurite")])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, servers: Callable[[str], Server]
) -> Place:
    return place_at(request.param, tmp_path, servers)


def saved(place: Place, steps: int) -> None:
    for step in range(1, steps + 1):
        metadata = {"step": str(step), "order": f"1.{step}", "began": f"{step}.000000"}
        url = f"{place.url}/step-{step}"
        ckpt.save(url, state(), metadata=metadata, storage_options=place.options)
    facts.forget()  # readers are other processes


@pytest.mark.thorough
def test_an_old_step_that_cannot_be_read_stops_nothing(place: Place) -> None:
    saved(place, 6)
    url, options = place.url, place.options
    with out_of_reach(place, 1), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.warns(ckpt.FallbackWarning, match="step-1.*denied") as found:
            assert ckpt.latest(url, storage_options=options) == f"{url}/step-6"
        assert [one.kind for one in found[0].message.skipped] == ["unreadable"]
        assert [one.step for one in ckpt.run_steps(url, storage_options=options)] == [6, 5, 4, 3, 2]
        with opened(url, options) as run:
            assert run.restore(state(), step=5) == 5
            assert run.restore(state()) == 6
        ckpt.delete(f"{url}/step-5", storage_options=options)
        assert ckpt.gc(url, storage_options=options) == []
        removed = [one.step.step for one in removals(url, ckpt.Keep(last=3), options)]
        assert removed == [2]
        if place.server is not None:  # on the disk the process that writes is root
            with opened(url, options, keep=ckpt.Keep(last=2)) as run:
                run.restore(state())
                assert run.save(7, state())
                run.wait_until_finished()
                assert run.failures == 0
                assert run.all_steps() == [7, 6]
    kinds = {type(one.message) for one in told}
    assert kinds == {ckpt.UnreadableWarning}
    assert all("step-1" in str(one.message) for one in told)


def test_a_newer_step_that_cannot_be_read_keeps_those_that_it_may_borrow_from(
    place: Place,
) -> None:
    saved(place, 4)
    url, options = place.url, place.options
    with out_of_reach(place, 3):
        with pytest.raises(ckpt.InUseError, match=r"step-3 .*cannot be read.*may borrow"):
            ckpt.delete(f"{url}/step-2", storage_options=options)
        kept = list(removals(url, ckpt.Keep(last=1), options))
        assert all("step-3" in one.needed_by for one in kept)
        assert [one.step.step for one in kept] == [2, 1]


def test_the_newest_step_that_cannot_be_read_is_skipped_by_a_restore_with_its_reason(
    place: Place,
) -> None:
    saved(place, 3)
    with out_of_reach(place, 3), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with opened(place.url, place.options) as run:
            assert run.restore(state()) == 2
    assert all("step-3" in str(one.message) for one in told)
    assert told


def test_a_run_of_which_no_step_can_be_read_does_not_begin_anew(place: Place) -> None:
    saved(place, 1)
    with out_of_reach(place, 1), pytest.raises(PermissionError, match="step-1"):
        ckpt.Checkpointer(place.url, storage_options=place.options)


def test_an_archived_step_that_the_index_knows_is_listed_and_can_be_removed(
    moto: Server, tmp_path: Path
) -> None:
    place = place_at("moto", tmp_path, lambda name: moto)
    with opened(place.url, place.options) as run:
        for step in range(1, 5):
            run.save(step, state(), {"loss": float(step)})
    facts.forget()
    with out_of_reach(place, 1):
        steps = ckpt.run_steps(place.url, storage_options=place.options)
        assert [(one.step, one.metrics["loss"]) for one in steps][-1] == (1, 1.0)
        removed = [one.step.step for one in removals(place.url, ckpt.Keep(last=3), place.options)]
        assert removed == [1]


# A manifest that a late request has brought back.


@pytest.mark.parametrize("kind", ["moto", pytest.param("azurite", marks=pytest.mark.slow)])
def test_a_manifest_that_comes_late_after_its_deletion_is_never_chosen_and_can_be_removed(
    servers: Callable[[str], Server], tmp_path: Path, kind: str
) -> None:
    place = place_at(kind, tmp_path, servers)
    url, options = place.url, place.options
    saved(place, 5)
    ghosts = [f"{url}/step-{step}" for step in (2, 5)]
    for ghost in ghosts:
        with open_store(ghost, options) as store:
            late = store.read_whole("manifest.json", 1 << 20)
            ckpt.delete(ghost, storage_options=options)
            store.commit("manifest.json", late, replace=False)
    facts.forget()
    with pytest.warns(ckpt.FallbackWarning, match=r"step-5.*missing"):
        assert ckpt.latest(url, storage_options=options) == f"{url}/step-4"
    with opened(url, options) as run, pytest.warns(ckpt.FallbackWarning, match="step-5"):
        assert run.restore(state()) == 4
    problems = ckpt.verify(ghosts[1], storage_options=options).problems
    assert any("missing" in one.message for one in problems)
    # The newest one does not count, and stays: it may be a save that a listing has cut in two.
    gone = [one.step.step for one in removals(url, ckpt.Keep(last=1), options, dry_run=True)]
    assert gone == [3, 2, 1]
    left = ckpt.gc(url, storage_options=options)
    seen = [(one.folder, one.name, one.kind, one.is_old) for one in left]
    assert seen == [(ghost, "manifest.json", "manifest", False) for ghost in ghosts]
    removed = ckpt.gc(url, delete=True, older_than=0, storage_options=options)
    assert all(one.was_removed for one in removed)
    assert ckpt.gc(url, storage_options=options) == []
    assert [one.step for one in ckpt.run_steps(url, storage_options=options)] == [4, 3, 1]
    assert ckpt.latest(url, storage_options=options) == f"{url}/step-4"


def test_the_commands_tell_of_the_old_versions_that_a_bucket_keeps(
    moto: Server, tmp_path: Path, capsys: Any
) -> None:
    client, bucket = s3_client(moto), "versions"
    client.create_bucket(Bucket=bucket)
    enabled = {"Status": "Enabled"}
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=enabled)
    place = replace(
        place_at("moto", tmp_path, lambda name: moto), url=f"s3://{bucket}/{tmp_path.name}"
    )
    saved(place, 3)
    told = [f"{key}={json.dumps(value)}" for key, value in place.options.items()]
    options = [text for one in told for text in ("-o", one)]
    assert main(["gc", place.url, *options]) == 0
    assert "old version" not in capsys.readouterr().out
    assert main(["rm", place.url, "--keep", "last=1", *options]) == 0
    said = r"the bucket keeps 4 old versions of files here, [0-9.]+ kB"
    assert re.search(said, capsys.readouterr().out)
    for command in ("gc", "ls"):
        assert main([command, place.url, *options]) == 0
        assert re.search(said, capsys.readouterr().out)


# Keys that a server takes no more.


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "process"])
def test_a_run_goes_on_when_its_keys_are_replaced(
    radosgw_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The keys of a user of Ceph, from a file or from a program that tells when they expire."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings, config, keys = radosgw_server.settings, tmp_path / "config", tmp_path / "keys"

    def admin(action: str, key: str, *more: str) -> None:
        command = ["radosgw-admin", "-c", settings, "key", action, "--uid=test", *more]
        subprocess.run([*command, f"--access-key={key}"], check=True, capture_output=True)

    def issue(key: str) -> None:
        admin("create", key, f"--secret-key={key}")
        if source == "file":
            keys.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={key}\n")
            return
        soon = datetime.now(timezone.utc) + timedelta(minutes=30)
        told = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": key}
        keys.write_text(json.dumps({**told, "Expiration": f"{soon:%Y-%m-%dT%H:%M:%SZ}"}))

    config.write_text(f"[default]\ncredential_process = cat {keys}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config if source == "process" else tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys if source == "file" else "/none"))
    own = ("key", "secret")
    options = {name: one for name, one in radosgw_server.options.items() if name not in own}
    names = [f"{source}{number}" for number in range(3)]
    url = radosgw_server.url(tmp_path.name)
    arena_writer().close()  # the next writer process has the environment of now
    try:
        issue(names[0])
        with opened(url, options, keep=ckpt.Keep(last=2)) as run:
            for step in range(1, 7):
                if step in (3, 5):
                    issue(names[step // 2])
                    admin("rm", names[step // 2 - 1])
                assert run.save(step, state())
            run.wait_until_finished()
            assert run.failures == 0
            assert run.all_steps() == [6, 5]
        with opened(url, options) as run:
            assert run.restore(state()) == 6
    finally:
        arena_writer().close()
        admin("rm", names[2])


@pytest.mark.thorough
def test_a_live_state_goes_through_a_bucket_as_deltas(place: Place) -> None:
    published = state()
    key = next(name for name, value in published.items() if isinstance(value, torch.Tensor))
    options = {"storage_options": place.options}
    target = {name: torch.zeros_like(value) for name, value in published.items() if name == key}
    with ckpt.publish({key: published[key]}, "bucket", through=place.url, **options) as live:
        versions = ckpt.follow(place.url, timeout=60, look_seconds=0, **options)
        for number in (1, 2, 3):
            version = next(versions)
            assert version.number == number
            ckpt.load(version.url, target, **options)
            assert torch.equal(target[key], published[key])
            published[key].reshape(-1)[:3] += 1
            if number < 3:
                live.update().wait(60)
        versions.close()
