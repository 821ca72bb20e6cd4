"""What a store does with the requests that it is made of, at an S3 server over HTTP."""

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from botocore.exceptions import ClientError, NoCredentialsError
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from ckpt.errors import AccessDeniedError, ExistsError, LeftOverWarning, StoreError
from ckpt.stores import fsspec_driver, object_store, served_store
from ckpt.stores.driver import PartLimits
from ckpt.stores.object_writes import PART_BYTES, PartSizes, Upload, UploadRequests
from ckpt.stores.retries import ErrorClass, RetryPolicy
from ckpt.stores.store import Store, open_store
from formats.errors import CorruptError
from tests.conftest import Program
from tests.selection import thorough
from tests.stores.child import HOST
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault, Refusal, Request, dead_between, once, seeded, times
from tests.stores.server import Server, s3_client

pytestmark = pytest.mark.thorough

PART = 5 << 20
"""The parts of a file where memory is short."""
CONTENT = random.Random(0).randbytes(3 * PART + 1234)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_BUDGET", "20MiB")


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto, delay_seconds=0.01) as opened:
        yield opened


@pytest.fixture
def store(proxy: FaultProxy, tmp_path: Path) -> Iterator[Store]:
    place = proxy.server.url(f"{tmp_path.name}/step 1")
    with open_store(place, proxy.server.options) as opened:
        opened.sizes()  # connects
        proxy.clear()
        yield opened


@pytest.fixture
def hurried(proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that gives up soon."""
    monkeypatch.setenv("CKPT_STORE_DEADLINE", "1")
    return open_store(proxy.server.url(f"{tmp_path.name}/step 1"), proxy.server.options)


def put(store: Store, name: str, content: bytes = CONTENT) -> None:
    with store.create(name) as file:
        for at in range(0, len(content), 1 << 20):
            file.write([content[at : at + (1 << 20)]])


def put_and_fill_in(store: Store, name: str, start: bytes, content: bytes = CONTENT) -> None:
    with store.create(name, rewritable=True) as file:
        file.write([bytes(len(start)), content[len(start) :]])
        file.rewrite_start(start)


def content_of(store: Store, name: str) -> bytes:
    return store.read(name, 0, store.size(name))


def asks(method: str, *texts: str) -> Callable[[Request], bool]:
    """Requests of a method whose target has these texts in it."""
    return lambda request: request.method == method and all(t in request.target for t in texts)


def test_a_small_file_is_one_request(store: Store, proxy: FaultProxy) -> None:
    put(store, "small", b"x" * 1000)
    assert [one.request.method for one in proxy.seen] == ["PUT"]
    proxy.clear()
    put_and_fill_in(store, "rewritten", b"head", b"y" * 1000)
    assert [one.request.method for one in proxy.seen] == ["PUT"]
    assert content_of(store, "rewritten") == b"head" + b"y" * 996


def test_a_large_file_goes_in_parts(store: Store, proxy: FaultProxy) -> None:
    put(store, "large")
    assert proxy.count("PUT") == 4
    assert proxy.count("POST") == 2
    assert proxy.received_bytes < len(CONTENT) + 2000
    assert content_of(store, "large") == CONTENT
    assert store.list_unfinished() == []


@pytest.mark.thorough
@pytest.mark.parametrize("nbytes", [4, thorough(PART), PART + 3, thorough(2 * PART)])
def test_the_start_of_a_large_file_is_sent_last(
    store: Store, proxy: FaultProxy, nbytes: int
) -> None:
    start = random.Random(nbytes).randbytes(nbytes)
    put_and_fill_in(store, "large", start)
    parts = [one.request.target.partition("partNumber=")[2] for one in proxy.seen]
    assert parts.index("1") > parts.index("2")
    assert content_of(store, "large") == start + CONTENT[nbytes:]


@pytest.mark.thorough
@pytest.mark.costly
@pytest.mark.parametrize("rewritable", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_upload_that_an_exception_ends_leaves_nothing(
    store: Store, rewritable: bool, error: type[BaseException]
) -> None:
    with pytest.raises(error), store.create("large", rewritable) as file:  # noqa: PT012
        file.write([b"header", CONTENT])
        assert len(store.list_unfinished()) == 1
        raise error
    assert store.list_unfinished() == []
    assert store.sizes() == {}


def test_an_upload_of_which_a_part_fails_for_good_leaves_nothing(
    store: Store, proxy: FaultProxy
) -> None:
    proxy.schedule = once(Fault.DENIED, asks("PUT", "partNumber=2"))
    with pytest.raises(StoreError, match=r"part 2 of it was denied.*storage_options"):
        put(store, "large")
    assert store.list_unfinished() == []
    assert store.sizes() == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (403, "AccessDenied", "check the credentials, .* and their permissions"),
        (400, "ExpiredToken", "have expired, were replaced or are wrong"),
        (403, "RequestTimeTooSkewed", "set this machine's clock"),
        (403, "InvalidObjectState", "restore it to a class of storage"),
        (403, "QuotaExceeded", "raise the quota"),
        (507, "XMinioStorageFull", "no space left"),
        (400, "AuthorizationHeaderMalformed", "lies in another region"),
    ],
)
def test_a_refusal_tells_its_own_remedy_at_once(
    store: Store, proxy: FaultProxy, status: int, code: str, remedy: str
) -> None:
    proxy.schedule = lambda request: Refusal(status, code)
    for ask in (
        lambda: store.commit("data", b"x", replace=True),
        lambda: store.exists("data"),  # the answer to a HEAD has no body
    ):
        proxy.clear()
        with pytest.raises(StoreError, match=remedy) as caught:
            ask()
        assert code in str(caught.value)
        assert not isinstance(caught.value, FileNotFoundError)
        assert proxy.count() <= 6


@pytest.mark.thorough
def test_a_write_that_belongs_to_another_region_is_told_at_once(
    store: Store, proxy: FaultProxy
) -> None:
    proxy.schedule = lambda one: Refusal(301, "PermanentRedirect") if one.method == "PUT" else None
    for write in (
        lambda: store.commit("data", b"x", replace=True),
        lambda: put(store, "large"),
    ):
        with pytest.raises(StoreError, match=r"PermanentRedirect.*lies in another region"):
            write()
    assert store.list_unfinished() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "code", ["BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"]
)
def test_a_request_that_was_changed_or_cut_on_its_way_is_sent_again(
    store: Store, proxy: FaultProxy, code: str
) -> None:
    proxy.schedule = times(2, Refusal(400, code), asks("PUT"))
    store.commit("data", b"right", replace=True)
    assert content_of(store, "data") == b"right"


@pytest.mark.thorough
def test_keys_that_were_replaced_are_read_again_from_their_source(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"

    def rotate(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\n")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = {key: v for key, v in proxy.server.options.items() if key not in ("key", "secret")}
    place = proxy.server.url(f"{tmp_path.name}/run")
    rotate("KA")
    with open_store(place, options) as store, open_store(place, options) as other:
        put(store, "large")
        rotate("KB")
        proxy.schedule = lambda one: Refusal(403, "InvalidAccessKeyId") if one.key == "KA" else None
        put(store, "large", CONTENT[::-1])  # in parts, by several threads
        assert content_of(store, "large") == CONTENT[::-1]
        proxy.clear()
        assert other.exists("large")
        assert {one.status for one in proxy.seen} == {200, 403}
        proxy.clear()
        with open_store(place, options) as later:
            assert later.exists("large")
        assert {one.status for one in proxy.seen} == {200}
        proxy.schedule = lambda one: Refusal(403, "InvalidAccessKeyId")
        proxy.clear()
        with pytest.raises(AccessDeniedError, match="after they were read again"):
            store.commit("data", b"x", replace=True)
        assert proxy.count() == 2


@pytest.mark.thorough
def test_a_bucket_with_object_lock_takes_files_with_checksums(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    client, bucket = s3_client(proxy.server), "locked"
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    lock = {"ObjectLockEnabled": "Enabled", "Rule": rule}
    client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=lock)
    state = {"w": torch.zeros(17 << 20, dtype=torch.uint8)}  # in parts; the manifest in one
    url, options = f"s3://{bucket}/{tmp_path.name}/step-1", dict(proxy.server.options)
    with pytest.raises(StoreError, match=r"request_checksum_calculation.*when_supported"):
        ckpt.save(url, state, storage_options=options)
    options["config_kwargs"] = {"request_checksum_calculation": "when_supported"}
    ckpt.save(url, state, storage_options=options)
    assert ckpt.verify(url, storage_options=options).sound


@pytest.mark.thorough
def test_an_upload_that_a_rule_of_the_bucket_has_aborted_is_a_named_error(
    store: Store, proxy: FaultProxy
) -> None:
    for concerns in (asks("PUT", "partNumber=2"), asks("POST", "uploadId")):
        proxy.schedule = once(Refusal(404, "NoSuchUpload"), concerns)
        with pytest.raises(StoreError, match=r"its parts are gone .*NoSuchUpload") as caught:
            put(store, "large")
        assert not isinstance(caught.value, FileNotFoundError)
        assert store.sizes() == {}


def test_a_commit_that_a_proxy_sends_twice_is_ones_own(store: Store, proxy: FaultProxy) -> None:
    store.commit("first", b"x", replace=False)  # finds out that the server honours conditions
    proxy.schedule = once(Fault.TWICE, asks("PUT", "manifest"))
    store.commit("manifest", b"mine", replace=False)
    with pytest.raises(ExistsError):
        store.commit("manifest", b"of another", replace=False)
    assert content_of(store, "manifest") == b"mine"


@pytest.mark.thorough
def test_an_upload_whose_begin_was_not_answered_is_aborted(store: Store, proxy: FaultProxy) -> None:
    proxy.schedule = once(Fault.DROP_ANSWER, asks("POST", "uploads"))
    put(store, "0123456789abcdef-00000.safetensors")
    assert proxy.faults() == {Fault.DROP_ANSWER}
    assert store.list_unfinished() == []


def test_files_of_a_replaced_checkpoint_that_may_not_be_deleted_are_told(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/step-1"), proxy.server.options
    ckpt.save(url, {"w": torch.zeros(3)}, storage_options=options)
    proxy.schedule = lambda request: Fault.DENIED if request.method == "DELETE" else None
    with pytest.warns(LeftOverWarning, match="is complete, .* stay .*for `ckpt gc`"):
        ckpt.save(url, {"w": torch.ones(3)}, overwrite=True, storage_options=options)
    assert torch.equal(ckpt.read(url, storage_options=options)["w"], torch.ones(3))


def test_the_pause_that_a_server_asks_for_is_kept_within_the_deadline() -> None:
    pauses: list[float] = []
    policy = RetryPolicy(10.0, clock=lambda: sum(pauses), sleep=pauses.append, chance=lambda: 0.0)

    def fail() -> None:
        headers = {"retry-after": "4"}
        raise ClientError({"ResponseMetadata": {"HTTPHeaders": headers}}, "PutObject")

    with pytest.raises(ClientError):
        policy.run(fail, lambda _: ErrorClass.PASSING, "")
    assert pauses == [4.0, 4.0, 2.0]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, thorough(1), thorough(2)])
def test_what_passes_is_tried_again(store: Store, proxy: FaultProxy, seed: int) -> None:
    faults = [Fault.DROP_REQUEST, Fault.DROP_ANSWER, Fault.BROKEN, Fault.SLOW_DOWN]
    proxy.schedule = seeded(seed, 0.3, faults)
    put(store, "large")
    put_and_fill_in(store, "filled in", b"start")
    faults += [Fault.CUT_ANSWER, Fault.SHORT_ANSWER, Fault.UNAVAILABLE]
    proxy.schedule = seeded(seed, 0.3, faults)
    for at in range(0, len(CONTENT), PART):
        part = CONTENT[at : at + PART]
        assert store.read("large", at, len(part)) == part
    assert content_of(store, "filled in")[:10] == b"start" + CONTENT[5:10]
    assert proxy.faults()


@pytest.mark.thorough
def test_an_answer_that_is_short_each_time_is_an_error(hurried: Store, proxy: FaultProxy) -> None:
    put(hurried, "data", b"abc" * 1000)
    proxy.schedule = times(100, Fault.SHORT_ANSWER, asks("GET"))
    with pytest.raises(CorruptError, match=r"/data: reading it failed each time"):
        hurried.read("data", 0, 3000)


def test_a_server_that_stays_away_is_an_error_in_time(hurried: Store, proxy: FaultProxy) -> None:
    put(hurried, "data", b"abc")
    with proxy.outage(), pytest.raises(StoreError, match="CKPT_STORE_DEADLINE") as caught:
        hurried.read("data", 0, 3)
    assert "/data: reading it failed each time for 1 s" in str(caught.value)
    assert hurried.read("data", 0, 3) == b"abc"


@pytest.mark.thorough
def test_a_server_that_is_away_for_a_while_is_waited_for(store: Store, proxy: FaultProxy) -> None:
    proxy.schedule = dead_between(2, 6)
    put(store, "large")
    assert content_of(store, "large") == CONTENT


@pytest.mark.thorough
def test_an_answer_that_never_comes_is_asked_for_again(proxy: FaultProxy, tmp_path: Path) -> None:
    options = {**proxy.server.options, "config_kwargs": {"read_timeout": 1}}
    store = open_store(proxy.server.url(f"{tmp_path.name}/step 1"), options)
    proxy.schedule = once(Fault.HANG)
    store.commit("data", b"abc", replace=True)
    proxy.schedule = once(Fault.HANG)
    assert store.read("data", 0, 3) == b"abc"


@pytest.mark.thorough
def test_what_will_not_pass_is_an_error_at_once(store: Store, proxy: FaultProxy) -> None:
    proxy.schedule = times(100, Fault.DENIED)
    for request in (store.names, lambda: store.size("a"), lambda: store.commit("m", b"", True)):
        proxy.clear()
        with pytest.raises(StoreError, match="denied"):
            request()
        assert [one.request.method for one in proxy.seen] in (["GET"], ["HEAD", "GET"], ["PUT"])


def test_a_bucket_that_is_missing_is_named_at_once(moto: Server) -> None:
    store = open_store("s3://no-such-bucket/run", moto.options)
    for request in (store.names, lambda: store.commit("m", b"", True)):
        with pytest.raises(StoreError, match=r"s3://no-such-bucket/run.*no such bucket"):
            request()


def test_no_credentials_is_an_error_that_says_where_they_go(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    store = open_store("s3://bucket/run", {"endpoint_url": moto.endpoint})
    with pytest.raises(StoreError, match=r"denied.*storage_options"):
        store.names()


def test_secrets_are_in_no_error(moto: Server) -> None:
    options = {**moto.options, "secret": "hunter2", "endpoint_url": "http://127.0.0.1:9"}
    store = open_store("s3://bucket/run", options)
    store._policy = object_store.RetryPolicy(0.1)  # type: ignore[attr-defined]
    with pytest.raises(StoreError) as caught:
        store.names()
    assert "hunter2" not in f"{caught.value} {store} {store!r}"


def test_the_first_commit_finds_out_that_conditions_are_honoured(
    store: Store, proxy: FaultProxy
) -> None:
    assert store.capabilities.put_if_absent is None
    store.commit("manifest", b"first", replace=False)
    assert store.capabilities.put_if_absent is True
    assert [one.request.method for one in proxy.seen] == ["HEAD", "PUT", "PUT"]
    proxy.clear()
    store.commit("another", b"second", replace=False)
    assert [one.request.method for one in proxy.seen] == ["PUT"]
    with pytest.raises(ExistsError, match="manifest exists already"):
        store.commit("manifest", b"third", replace=False)
    assert content_of(store, "manifest") == b"first"


def test_a_commit_whose_answer_is_lost_is_known_to_have_gone_well(
    store: Store, proxy: FaultProxy
) -> None:
    store.commit("other", b"x", replace=False)
    proxy.schedule = once(Fault.DROP_ANSWER, asks("PUT"))
    store.commit("manifest", b"ours", replace=False)
    assert Fault.DROP_ANSWER in proxy.faults()
    assert content_of(store, "manifest") == b"ours"


def test_a_commit_that_another_has_won_meanwhile_is_refused(
    store: Store, proxy: FaultProxy
) -> None:
    store.commit("other", b"x", replace=False)
    store.commit("manifest", b"theirs", replace=False)
    proxy.schedule = once(Fault.BROKEN, asks("PUT"))
    with pytest.raises(ExistsError):
        store.commit("manifest", b"ours", replace=False)
    assert content_of(store, "manifest") == b"theirs"


@pytest.mark.thorough
def test_an_upload_whose_completion_is_acknowledged_to_nobody_is_complete(
    store: Store, proxy: FaultProxy
) -> None:
    proxy.schedule = once(Fault.DROP_ANSWER, asks("POST", "uploadId="))
    put(store, "large")
    assert Fault.DROP_ANSWER in proxy.faults()
    assert content_of(store, "large") == CONTENT


def test_a_server_that_ignores_conditions_is_found_out(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = store._driver  # type: ignore[attr-defined]
    monkeypatch.setattr(driver, "put_if_absent", driver.put)
    store.commit("manifest", b"first", replace=False)
    assert "ignores the condition" in caplog.text
    assert store.capabilities.put_if_absent is False
    with pytest.raises(ExistsError):  # it is looked for before
        store.commit("manifest", b"second", replace=False)
    assert content_of(store, "manifest") == b"first"


def test_a_commit_that_cannot_be_put_to_the_test_has_happened(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = store._driver  # type: ignore[attr-defined]
    put_once, puts = driver.put_if_absent, []

    def put_then_denied(path: str, data: memoryview) -> None:
        puts.append(path)
        if len(puts) > 1:
            raise NoCredentialsError
        put_once(path, data)

    monkeypatch.setattr(driver, "put_if_absent", put_then_denied)
    store.commit("manifest", b"first", replace=False)
    assert len(puts) == 2
    assert store.capabilities.put_if_absent is None
    assert content_of(store, "manifest") == b"first"


def test_a_range_is_read_with_one_request_and_no_byte_more(store: Store, proxy: FaultProxy) -> None:
    put(store, "large")
    proxy.clear()
    target = bytearray(1000)
    store.read_into("large", 77, memoryview(target)[:300], memoryview(target)[300:])
    assert target == CONTENT[77:1077]
    assert store.read_whole("large", len(CONTENT)) == CONTENT
    assert [one.sent_bytes for one in proxy.seen] == [1000, len(CONTENT)]


@pytest.mark.thorough
def test_names_of_any_letters_are_kept(store: Store) -> None:
    names = sorted(["a b", "a+b", "100%", "ü", "a&b=c", "a?b", "a#b", "~", "(1)", "x=y"])
    for name in names:
        put(store, name, name.encode())
    assert store.names() == names
    for name in names:
        assert content_of(store, name) == name.encode()
        store.delete(name)
    assert store.names() == []


@pytest.mark.slow
def test_more_files_than_one_answer_lists_are_all_listed(store: Store) -> None:
    for number in range(1100):
        put(store, f"f{number:04}", b"")
    assert len(store.names()) == 1100


def test_parts_take_no_more_memory_than_the_budget_and_are_large_in_a_large_one() -> None:
    limits = PartLimits(5 << 20, 10_000)
    for mebibytes in (20, 64, 100, 128, 129, 200, 512, 1024, 4096):
        sizes = PartSizes.within(mebibytes << 20, limits)
        assert sizes.buffers * sizes.part_bytes <= mebibytes << 20
        usual = PartSizes.within(128 << 20, limits).part_bytes
        assert (sizes.part_bytes > usual) == (mebibytes > 128)
    assert sizes.part_bytes == 128 << 20


def test_parts_later_in_a_file_are_larger_so_that_none_is_too_large() -> None:
    division = PartSizes.within(64 << 20, PartLimits(5 << 20, 10_000))
    assert division.part(1) == PART_BYTES
    assert sum(division.part(number) for number in range(1, 10_001)) > 700 << 30


def test_a_checkpoint_is_saved_and_loaded_with_few_requests(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/step 1"), proxy.server.options
    state = {"w": torch.arange(3 << 20, dtype=torch.float32), "b": torch.ones(5), "step": 3}
    open_store(url, options).commit("known", b"", replace=True)
    proxy.clear()
    ckpt.save(url, state, storage_options=options)
    # Is there one? The file in three parts. Are the files there? Is the manifest? It, and again.
    assert proxy.count() == 1 + (1 + 3 + 1) + 1 + 3
    proxy.clear()
    target = {"w": torch.zeros(3 << 20), "b": torch.zeros(5), "step": 0}
    ckpt.load(url, target, storage_options=options)
    assert torch.equal(target["w"], state["w"])
    needed = (12 << 20) + 20
    assert proxy.count("GET") == proxy.count() == 1 + 2 + 1  # manifest, header and table, tensors
    assert proxy.sent_bytes < 1.01 * needed
    proxy.clear()
    assert ckpt.verify(url, storage_options=options).sound
    assert proxy.count("HEAD") == 0


def test_what_is_on_a_web_server_is_read_and_not_written(moto: Server, tmp_path: Path) -> None:
    state = {"w": torch.arange(1 << 16), "step": 3}
    ckpt.save(moto.url(f"{tmp_path.name}/a"), state, storage_options=moto.options)
    client = s3_client(moto)
    for key in client.list_objects_v2(Bucket=moto.bucket, Prefix=tmp_path.name)["Contents"]:
        client.put_object_acl(Bucket=moto.bucket, Key=key["Key"], ACL="public-read")
    url = f"{moto.endpoint}/{moto.bucket}/{tmp_path.name}/a"
    target = {"w": torch.zeros(1 << 16, dtype=torch.int64), "step": 0}
    assert torch.equal(ckpt.load(url, target)["w"], state["w"])
    assert ckpt.verify(url).sound
    with ckpt.open(url) as checkpoint:
        assert checkpoint["w"][7] == 7
    for write in (
        lambda: ckpt.save(f"{url}b", state),
        lambda: ckpt.convert(url, f"{url}.safetensors"),
        lambda: ckpt.delete(url),
    ):
        with pytest.raises(OSError, match="can only be read"):
            write()


class _Quiet(SimpleHTTPRequestHandler):
    """A web server that lists folders as pages of links, and knows no ranges."""

    def log_message(self, *_: object) -> None:
        pass


def test_the_newest_checkpoint_on_a_web_server_is_found_though_its_listings_have_no_sizes(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        ckpt.save(tmp_path / f"step-{step}", {"w": torch.ones(4)})
    with ThreadingHTTPServer((HOST, 0), partial(_Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://{HOST}:{server.server_port}"
        assert ckpt.latest(url) == f"{url}/step-2"
        os.truncate(next((tmp_path / "step-2").glob("*.safetensors")), 10)
        with pytest.warns(ckpt.FallbackWarning, match="has 10 bytes"):
            assert ckpt.latest(url) == f"{url}/step-1"
        server.shutdown()


FORK = """
import os, signal, sys
import ckpt
url, options = sys.argv[1], eval(sys.argv[2])
assert ckpt.read(url, storage_options=options)["step"] == 3
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(ckpt.read(url, storage_options=options)["step"])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.thorough
def test_a_forked_child_reads_although_its_parent_has(
    moto: Server, programs: Callable[..., Program], tmp_path: Path
) -> None:
    url = moto.url(f"{tmp_path.name}/a")
    ckpt.save(url, {"step": 3}, storage_options=moto.options)
    program = programs(FORK, url, repr(dict(moto.options)))
    assert program.communicate() == ("", "")
    assert program.returncode == 3


@pytest.mark.parametrize("rewritable", [False, True])
def test_an_upload_has_no_more_parts_in_memory_than_the_budget_has_room_for(
    rewritable: bool,
) -> None:
    part_sizes = PartSizes.within(20 << 20, PartLimits(5 << 20, 10_000))
    assert (part_sizes.part_bytes, part_sizes.buffers) == (5 << 20, 4)
    arrived: dict[int, bytes] = {}
    requests = UploadRequests(
        put=lambda data: pytest.fail("it is large"),
        create_multipart=lambda: "id",
        upload_part=lambda upload_id, number, data: arrived.update({number: bytes(data[:10])}),
        complete_multipart=lambda upload_id, tags, total: None,
        abort_multipart=lambda upload_id: pytest.fail("it went well"),
    )
    upload = Upload(requests, part_sizes, rewritable, threading.Event())
    block = bytes(1 << 20)
    for _ in range(100):
        upload.write([block])
    assert upload._made <= part_sizes.buffers
    upload.finish()
    assert sorted(arrived) == list(range(1, 21))


def test_parts_are_larger_from_the_first_later_one_on() -> None:
    sizes = PartSizes(part_bytes=1, later_bytes=8, first_later=3, buffers=2)
    assert [sizes.part(number) for number in (1, 2, 3, 4)] == [1, 1, 8, 8]


def test_a_web_server_that_says_nothing_is_an_error_after_the_time_of_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CKPT_STORE_DEADLINE", "0")
    monkeypatch.setattr(served_store, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(fsspec_driver, "ANSWER_SECONDS", 0.2)
    with socket.create_server((HOST, 0)) as silent:
        url = f"http://{HOST}:{silent.getsockname()[1]}/run"
        with pytest.raises(StoreError, match=r"listing it failed.*[Tt]imeout"):
            ckpt.latest(url)


def test_no_folder_is_beside_the_root_of_a_web_server() -> None:
    driver = fsspec_driver.driver_of(fsspec.filesystem("http"))
    root = object_store.ObjectStore("http://host", "http://host", driver, {})
    with pytest.raises(ckpt.GoneError, match=r"http://host/\.\./other\.host/data"):
        root.read("../other.host/data", 0, 1)
    with pytest.raises(FileNotFoundError, match=r"http://host/\.\./other\.host/data"):
        root.size("../other.host/data")


class _Sizeless(_Quiet):
    """A web server with ranges that never tells the size of a file."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(path.read_bytes())

    def do_HEAD(self) -> None:
        self.do_GET()


def test_a_file_of_unknown_size_is_not_called_damaged(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(3)})
    handler = partial(_Sizeless, directory=str(tmp_path))
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with open_store(f"http://{HOST}:{server.server_port}") as store:
            with pytest.raises(StoreError, match="does not tell the size of the file"):
                store.size("manifest.json")
            assert b"ckpt" in store.read_whole("manifest.json", 1 << 20)
        server.shutdown()


class Failing(MemoryFileSystem):
    """A driver without parts, one of whose calls fails."""

    protocol = "failing"
    cachable = False
    call, error = "", OSError("")

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if "w" in mode and Failing.call == "open":
            raise Failing.error
        file = super().open(path, mode, **more)
        if "w" in mode and Failing.call in ("write", "close"):
            setattr(file, Failing.call, self._fail)
        return file

    def _fail(self, *arguments: object) -> None:
        raise Failing.error


@pytest.mark.parametrize("call", ["open", "write", "close"])
@pytest.mark.parametrize("rewritable", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "no"), "writing it was denied"),
        (ConnectionResetError("by peer"), "writing it failed: ConnectionResetError: by peer"),
        (RuntimeError("of the driver"), "writing it failed: RuntimeError: of the driver"),
    ],
)
def test_a_stream_that_fails_says_which_file_of_which_url(
    monkeypatch: pytest.MonkeyPatch, call: str, rewritable: bool, error: Exception, said: str
) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr(Failing, "call", call)
    monkeypatch.setattr(Failing, "error", error)
    with (
        open_store("failing://run") as store,
        pytest.raises(ckpt.StoreError, match=f"^failing://run/data: {said}"),
        store.create("data", rewritable=rewritable) as file,
    ):
        file.write([b"bytes"])


def test_an_error_of_the_writer_passes_through_a_stream_as_it_is() -> None:
    def blocks() -> Iterator[bytes]:
        yield b"bytes"
        raise ZeroDivisionError

    with (
        open_store("memory://stream") as store,
        pytest.raises(ZeroDivisionError),
        store.create("data") as file,
    ):
        file.write(blocks())
