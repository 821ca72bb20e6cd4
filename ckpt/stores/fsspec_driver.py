"""Chooses the driver of an fsspec file system and its options, and has those for other protocols.

`FsspecDriver` serves any file system that has no driver of its own. It relies only on the interface
of fsspec. `GcsDriver` serves Google's storage: requests of gcsfs, with conditions where gcsfs has
them. gcsfs streams a file block by block. Google takes parts only in order, so a rewritable file is
first written to a local disk.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import datetime
from errno import EROFS
from itertools import chain
from math import inf
from typing import IO, Any

from ckpt.stores.driver import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    LONGEST_SECONDS,
    NO_OPTIONS,
    Gate,
    MultipartDriver,
    ObjectInfo,
    OwnOptions,
    Session,
    ShortAnswerError,
    Start,
    StoreCapabilities,
    StreamDriver,
    Unfinished,
    check_names,
    count_received,
    count_request,
)
from ckpt.stores.retries import ErrorClass, PastEndError, class_of_status
from formats.limits import parse_size
from formats.storage import Buffer, FileWriter
from sharding.errors import ArgumentError, without_secrets

UNNAMED_OPTIONS = (
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"),
    "memmove_max_workers",
)
"""Options of every fsspec file system, and of gcsfs, that no signature names."""


def own_options(options: Mapping[str, Any]) -> tuple[OwnOptions, dict[str, Any]]:
    """Returns the options that ckpt takes itself, and the others. Raises ArgumentError.

    >>> own_options({"anon": True, "concurrency": 8, "max_bandwidth": "200MB"})
    (OwnOptions(concurrency=8, max_bandwidth=200000000.0, user_agent=''), {'anon': True})
    """
    others = dict(options)
    own = {
        field.name: others.pop(field.name) for field in fields(OwnOptions) if field.name in others
    }
    most, bandwidth = own.get("concurrency"), own.get("max_bandwidth")
    if most is not None and (type(most) is not int or most < 1):
        raise ArgumentError(f"storage_options= has concurrency={most!r}: give a number from 1 on")
    rate: Any = bandwidth
    if isinstance(bandwidth, str):
        with suppress(ArgumentError):
            rate = parse_size(bandwidth)
    if rate is not None and (type(rate) not in (int, float) or not 0 < rate < inf):
        raise ArgumentError(
            f"storage_options= has max_bandwidth={bandwidth!r}: give bytes in a second, or 200MB"
        )
    agent = own.get("user_agent", "")
    if not isinstance(agent, str) or not (agent.isascii() and agent.isprintable()):
        raise ArgumentError(f"storage_options= has user_agent={agent!r}: give printable ASCII text")
    return OwnOptions(most, None if rate is None else float(rate), agent), others


def driver_of(file_system: Any, own: OwnOptions = NO_OPTIONS) -> MultipartDriver | StreamDriver:
    """Returns the driver for an fsspec file system.

    The drivers of S3, Azure and Google import a client library, so each is imported on use. Raises
    ArgumentError for options that these three do not have: their file systems take any.
    """
    package = type(file_system).__module__.partition(".")[0]
    if package == "s3fs":
        from ckpt.stores.s3_driver import S3Driver

        return S3Driver(file_system, own)
    if package == "adlfs" and hasattr(file_system, "service_client"):
        from ckpt.stores.azure_driver import AzureDriver

        _check_options(package, file_system)
        return AzureDriver(file_system, own)
    if package == "gcsfs":
        _check_options(package, file_system)
        return GcsDriver(file_system, own)
    return FsspecDriver(file_system, own)


def _check_options(package: str, file_system: Any) -> None:
    kinds: tuple[Any, ...] = type(file_system).__mro__
    own = [inspect.signature(kind.__init__).parameters for kind in kinds]
    check_names(package, file_system.storage_options, [*chain(*own), *UNNAMED_OPTIONS])


def settings_of(protocol: str, options: Mapping[str, Any], own: OwnOptions) -> dict[str, Any]:
    """Returns the options of a file system: the user's, and the defaults that its driver needs.

    >>> settings_of("memory", {"a": 1}, OwnOptions())
    {'a': 1}
    """
    if protocol in ("http", "https"):
        import aiohttp  # here, because only this driver needs it

        limits = aiohttp.ClientTimeout(
            LONGEST_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS
        )
        client_options = {"timeout": limits, "headers": {"User-Agent": own.header}}
        return {**options, "client_kwargs": {**client_options, **options.get("client_kwargs", {})}}
    if protocol not in ("s3", "s3a"):
        return dict(options)
    # `ckpt.stores.retries` makes the retries. Half of the servers with an S3 interface lack
    # trailing checksums.
    config: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": ANSWER_SECONDS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": 32,
    }
    config |= options.get("config_kwargs", {})
    config["user_agent_extra"] = f"{own.header} {config.get('user_agent_extra', '')}".rstrip()
    return {**options, "config_kwargs": config}


READ_ONLY = {"http", "https"}
"""Protocols without writes."""
_TIMES = ("mtime", "last_modified", "LastModified", "updated", "created")
"""The names of a file's time in different drivers."""


class FsspecDriver(Session):
    """Sends requests as calls of the file system."""

    capabilities = StoreCapabilities(
        put_if_absent=False, atomic_replace=False, hides_unfinished=False, durable=False
    )
    deletes_at_once = 1
    holds_answers = True

    def server(self) -> str:
        """Returns "": the guarantees of a file system are known without a request."""
        return ""

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        self._fs.invalidate_cache(folder)  # other processes may have written here
        own = folder.rstrip("/")
        with self._sending("list"):
            found = self._fs.ls(folder, detail=True)
        return [_object_info(entry) for entry in found if entry["name"].rstrip("/") != own]

    def list_below(self, folder: str) -> list[ObjectInfo] | None:
        """Returns None: fsspec walks folder by folder."""
        return None

    def head(self, path: str) -> ObjectInfo:
        self._fs.invalidate_cache(path.rpartition("/")[0])
        with self._sending("head"):
            entry = self._fs.info(path)
        if entry["type"] != "file":
            raise FileNotFoundError(path)
        return _object_info(entry)

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        length = sum(target.nbytes for target in targets)
        data = memoryview(self._get(path, offset, offset + length))
        if len(data) > length:
            raise OSError(
                f"the server answered a request for bytes {offset}:{offset + length} with "
                f"{len(data)} bytes: it has no range requests, which ckpt needs"
            )
        if len(data) < length:
            size = self._size(path)
            raise (
                PastEndError(size)
                if size < offset + length
                else ShortAnswerError(f"the response has {len(data)} of {length} bytes")
            )
        for target in targets:
            target[:] = data[: len(target)]
            data = data[len(target) :]
        return None

    def get_start(self, path: str, length: int) -> Start:
        """Reads the first bytes of a file. There are no tags."""
        size = self._size(path)
        return Start(self._get(path, 0, min(size, length)), size, "")

    def get(self, path: str, limit: int) -> tuple[bytes | int, str]:
        """Reads all bytes of a file; returns its size if that is above `limit`, and no tag."""
        size = self._size(path)
        return (size if size > limit else self._get(path, 0, None)), ""

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        """Writes a file in one call. There are no tags."""
        self._make_ready(path)
        with self._sending("put", len(data)):
            self._fs.pipe_file(path, bytes(data))
        return ""

    def put_if_absent(self, path: str, data: memoryview) -> str:
        """Writes a file in one call, if absent as far as the file system has this condition."""
        self._make_ready(path)
        # NotImplementedError: the file system lacks the condition. TypeError: it lacks the
        # argument. `capabilities` does not claim the condition: a commit looks for the file first.
        with suppress(NotImplementedError, TypeError), self._sending("put", len(data)):
            self._fs.pipe_file(path, bytes(data), mode="create")
            return ""
        with self._sending("put", len(data)):
            self._fs.pipe_file(path, bytes(data))
        return ""

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Does nothing: `list_multipart` returns no uploads."""

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """Returns no uploads: fsspec has no interface for them."""
        return []

    def multipart_bytes(self, path: str, upload_id: str) -> int:
        """Returns 0: `list_multipart` returns no uploads."""
        return 0

    @contextmanager
    def stream(self, path: str) -> Iterator[FileWriter]:
        remote = self._open(path)
        try:
            yield Stream(remote, self._gate)
        except BaseException:
            # `close` would publish the truncated file. Some drivers can discard it instead.
            discard = getattr(remote, "discard", None)
            if discard is not None:
                with suppress(Exception):  # the exception on its way is the cause
                    discard()
                with suppress(AttributeError):  # otherwise the file's finaliser would close it
                    setattr(remote, "closed", True)  # noqa: B010
            raise
        remote.close()

    def _open(self, path: str) -> Any:
        """Opens a new file, once its folder is there."""
        self._make_ready(path)
        return self._fs.open(path, "wb")

    def delete(self, path: str, tag: str = "") -> None:
        """Deletes a file. There are no tags."""
        self._check_can_write(path)
        with self._sending("delete"):
            self._fs.rm_file(path)

    def delete_all(self, paths: Mapping[str, str]) -> None:
        for path in paths:
            self.delete(path)

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder if it is empty, on file systems with folders; never a bucket."""
        if "/" not in folder.rstrip("/"):
            return
        # NotImplementedError: the file system has no folders. OSError: the folder is missing, or
        # was filled meanwhile. An empty folder that stays does no harm.
        with suppress(OSError, NotImplementedError):
            if not self._fs.ls(folder, detail=False, refresh=True):
                self._fs.rmdir(folder)

    def error_class(self, error: BaseException) -> ErrorClass:
        """Returns the class of an error, by its Python class and status."""
        if isinstance(error, PastEndError):
            return ErrorClass.PAST_END
        if isinstance(error, FileExistsError):
            return ErrorClass.EXISTS
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return ErrorClass.MISSING
        if isinstance(error, PermissionError):
            return ErrorClass.DENIED
        status = getattr(error, "status", getattr(error, "status_code", None))  # aiohttp's, Azure's
        if isinstance(status, int):
            return class_of_status(status)
        if isinstance(
            error, ConnectionError | TimeoutError | asyncio.TimeoutError | ShortAnswerError
        ):
            return ErrorClass.PASSING
        # An URL that aiohttp refuses is a ValueError.
        is_aiohttp = type(error).__module__.partition(".")[0] == "aiohttp"
        is_broken = is_aiohttp and not isinstance(error, ValueError)
        return ErrorClass.PASSING if is_broken else ErrorClass.LASTING

    @contextmanager
    def _sending(self, operation: str, nbytes: int = 0) -> Iterator[None]:
        """Holds a place for a call, and counts it as one request."""
        with self._gate.passing(nbytes):
            count_request(operation, nbytes)
            yield

    def _get(self, path: str, lo: int, hi: int | None) -> bytes:
        """Reads bytes of a file; all from `lo` on if `hi` is None."""
        with self._gate.passing(0 if hi is None else hi - lo):
            count_request("get")
            data = self._fs.cat_file(path) if hi is None else self._fs.cat_file(path, lo, hi)
        count_received(len(data))
        return bytes(data)

    def _size(self, path: str) -> int:
        """Returns the bytes of a file; 0 if the server does not tell."""
        return self.head(path).nbytes or 0

    def _check_can_write(self, path: str) -> None:
        if READ_ONLY & {self._fs.protocol, *self._fs.protocol}:
            raise OSError(EROFS, "an HTTP server can only be read", without_secrets(path))

    def _make_ready(self, path: str) -> None:
        """Makes the folder of a new file."""
        self._check_can_write(path)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


class Stream:
    """Streams to an fsspec file."""

    def __init__(self, remote: IO[bytes], gate: Gate) -> None:
        self._remote, self._gate = remote, gate

    def write(self, buffers: Iterable[Buffer]) -> None:
        """Appends the buffers. The driver copies bytes that it does not send at once."""
        for buffer in buffers:
            with self._gate.passing(len(buffer)):
                count_request("put", len(buffer))
                self._remote.write(buffer)

    def rewrite_start(self, data: Buffer) -> None:
        """Raises OSError: a stream cannot change bytes that it has sent."""
        raise OSError("a streamed upload cannot change its first bytes; create the file rewritable")


def _object_info(entry: dict[str, Any]) -> ObjectInfo:
    name = entry["name"].rstrip("/").rpartition("/")[2]
    size = entry.get("size")
    return ObjectInfo(
        name, entry["type"] == "file", None if size is None else int(size), _time_of(entry)
    )


def _time_of(entry: dict[str, Any]) -> float:
    """Returns the time of a file's last write; now if the driver does not tell, so never old."""
    for key in _TIMES:
        found = entry.get(key)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
        if isinstance(found, str):
            with suppress(ValueError):
                return datetime.fromisoformat(found.replace("Z", "+00:00")).timestamp()
    return time.time()


BLOCK_BYTES = 16 << 20
"""Bytes of one request, which are in memory until it is sent."""


class GcsDriver(FsspecDriver):
    """Sends requests through one gcsfs file system."""

    capabilities = StoreCapabilities(
        put_if_absent=None, atomic_replace=True, hides_unfinished=True, durable=True
    )

    def server(self) -> str:
        return str(getattr(self._fs, "base", ""))

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """Lists objects and prefixes directly below a prefix, but not the buckets themselves."""
        return super().list_folder(folder) if folder.strip("/") else []

    def get(self, path: str, limit: int) -> tuple[bytes | int, str]:
        """Reads all bytes of an object, with its generation as the tag."""
        size = self._size(path)
        if size > limit:
            return size, ""
        with self._sending("get"):
            headers, data = self._fs.call("GET", self._fs.url(path))
        count_received(len(data))
        return bytes(data), str(headers.get("X-Goog-Generation", ""))

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        """Writes an object in one request, and returns its generation; over that of `tag` alone."""
        return self._upload(path, data, tag or None)

    def put_if_absent(self, path: str, data: memoryview) -> str:
        """Writes an object as `put`, on the condition that there is none."""
        return self._upload(path, data, "0")

    def _upload(self, path: str, data: memoryview, generation: str | None) -> str:
        bucket, name, _ = self._fs.split_path(path)
        with self._sending("put", len(data)):
            answer = self._fs.call(
                "POST",
                f"{self._fs.base}b/{{}}/o".replace("/storage/", "/upload/storage/", 1),
                bucket,
                name=name,
                uploadType="media",
                ifGenerationMatch=generation,
                headers={"Content-Type": "application/octet-stream"},
                data=bytes(data),
                json_out=True,
            )
        return str(answer.get("generation", ""))

    def delete(self, path: str, tag: str = "") -> None:
        """Deletes an object; with `tag`, if this is its generation."""
        bucket, name, _ = self._fs.split_path(path)
        with self._sending("delete"):
            self._fs.call("DELETE", "b/{}/o/{}", bucket, name, ifGenerationMatch=tag or None)

    def _open(self, path: str) -> Any:
        return self._fs.open(path, "wb", block_size=BLOCK_BYTES)

    def bucket_setting(self, folder: str, subject: str) -> Mapping[str, Any]:
        """Returns a setting of the bucket in the form that S3 has; empty if it was never made."""
        setting = self._fs.call("GET", "b/{}", self._fs.split_path(folder)[0], json_out=True)
        if subject == "versioning":
            return {"Status": "Enabled"} if setting.get("versioning", {}).get("enabled") else {}
        if subject == "object lock":
            return dict(setting.get("retentionPolicy", {}))
        return {"Rules": [*_rules_as_s3(setting.get("lifecycle", {}).get("rule", ()))]}

    def error_class(self, error: BaseException) -> ErrorClass:
        """Returns the class of an error of gcsfs, which has made retries of its own."""
        if isinstance(error, json.JSONDecodeError):  # the answer was cut
            return ErrorClass.PASSING
        code: Any = getattr(error, "code", None)
        code = int(code) if str(code).isdecimal() else None
        if code is not None:
            return class_of_status(code, {404: ErrorClass.MISSING, 412: ErrorClass.EXISTS})
        return super().error_class(error)


def _rules_as_s3(rules: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields Google's rules in the form of S3. All of Google's classes can be read at once.

    >>> rule = {"action": {"type": "Delete"}, "condition": {"age": 30, "matchesPrefix": ["a/"]}}
    >>> [one["Expiration"] for one in _rules_as_s3([rule])]
    [{'Days': 30}]
    """
    for rule in rules:
        condition, action = rule.get("condition", {}), rule.get("action", {}).get("type")
        days = condition.get("age")
        is_of_old_versions = condition.get("isLive") is False or "numNewerVersions" in condition
        rule_as_s3: dict[str, Any] = {"Status": "Enabled"}
        if action == "Delete" and not is_of_old_versions:
            date = condition.get("createdBefore", "a time")
            rule_as_s3["Expiration"] = {"Date": date} if days is None else {"Days": days}
        if action == "AbortIncompleteMultipartUpload" and days is not None:
            rule_as_s3["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": days}
        for prefix in condition.get("matchesPrefix") or [""]:
            yield {**rule_as_s3, "Filter": {"Prefix": prefix}}
