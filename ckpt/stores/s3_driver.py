"""The driver of S3 and compatible servers: requests through the client of s3fs.

The files of s3fs send parts one after another, keep three copies, complete an upload that an
exception has ended, and send two more requests for each file. This driver therefore makes each
request as one call of the client, with the session, the credentials and the request options
(encryption, who pays) of s3fs.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import aiohttp
from aiobotocore.session import AioSession
from botocore import exceptions

from ckpt.stores.driver import (
    NO_OPTIONS,
    Below,
    ObjectInfo,
    OwnOptions,
    PartLimits,
    Session,
    ShortAnswerError,
    Start,
    StoreCapabilities,
    Unfinished,
    check_names,
    count_received,
    count_request,
    in_loop,
)
from ckpt.stores.retries import ErrorClass, PastEndError
from sharding.errors import ArgumentError, without_secrets

T = TypeVar("T")

SEND_BYTES = 256 << 10
"""Bytes of one write to a connection."""
RECEIVE_BYTES = 1 << 20
"""The largest read from a connection."""
_CLASSES = {
    **dict.fromkeys(("404", "NoSuchKey", "NotFound"), ErrorClass.MISSING),
    **dict.fromkeys(("412", "PreconditionFailed"), ErrorClass.EXISTS),
    **dict.fromkeys(("401", "403", "AccessDenied", "AllAccessDisabled"), ErrorClass.DENIED),
    **dict.fromkeys(("416", "InvalidRange"), ErrorClass.PAST_END),
    **dict.fromkeys(("501", "NotImplemented"), ErrorClass.UNSUPPORTED),
    "ExpiredToken": ErrorClass.STALE,
    "ExpiredTokenException": ErrorClass.STALE,
    "InvalidAccessKeyId": ErrorClass.STALE,
    "InvalidClientTokenId": ErrorClass.STALE,
    "InvalidToken": ErrorClass.STALE,
    "RequestExpired": ErrorClass.STALE,
    "SignatureDoesNotMatch": ErrorClass.STALE,
    "TokenRefreshRequired": ErrorClass.STALE,
    "NoSuchBucket": ErrorClass.NO_BUCKET,
    "InvalidObjectState": ErrorClass.ARCHIVED,
    "NoSuchUpload": ErrorClass.NO_UPLOAD,
    "RequestTimeTooSkewed": ErrorClass.SKEWED,
    "QuotaExceeded": ErrorClass.QUOTA,
    "ServiceQuotaExceeded": ErrorClass.QUOTA,
    "EntityTooLargeQuota": ErrorClass.QUOTA,
    "XMinioAdminBucketQuotaExceeded": ErrorClass.QUOTA,
    "XMinioStorageFull": ErrorClass.FULL,
    "InsufficientStorage": ErrorClass.FULL,
    "507": ErrorClass.FULL,
    "AuthorizationHeaderMalformed": ErrorClass.OTHER_REGION,
    "IllegalLocationConstraintException": ErrorClass.OTHER_REGION,
    "PermanentRedirect": ErrorClass.OTHER_REGION,
    "301": ErrorClass.OTHER_REGION,
    "408": ErrorClass.PASSING,
    "409": ErrorClass.PASSING,  # a conditional put while another is in progress
    "429": ErrorClass.PASSING,
    "BadDigest": ErrorClass.PASSING,  # the bytes of a request were changed or cut on the way
    "ConditionalRequestConflict": ErrorClass.PASSING,
    "IncompleteBody": ErrorClass.PASSING,
    "InternalError": ErrorClass.PASSING,
    "OperationAborted": ErrorClass.PASSING,
    "RequestTimeout": ErrorClass.PASSING,
    "SlowDown": ErrorClass.PASSING,
    "Throttling": ErrorClass.PASSING,
    "ThrottlingException": ErrorClass.PASSING,
    "XAmzContentChecksumMismatch": ErrorClass.PASSING,
    "XAmzContentSHA256Mismatch": ErrorClass.PASSING,
}
"""The classes of S3's codes, and of statuses that come without a code or with an unknown one."""
_UNTOLD = (301, 307, 400, 401, 403, 507)
"""The statuses of refusals. The answer to a HEAD has no body that tells the reason."""
VERSION_PAGES = 10
"""The most pages of a listing of old versions: each has up to 1,000."""
_OPERATIONS = {"create": "put", "upload": "put", "complete": "put", "abort": "delete"}
"""The operations of methods by their first words; those of others are the words themselves."""
_SPAN = re.compile(r"bytes=([0-9]+)-([0-9]+)")
_SETTINGS = {
    "versioning": ("get_bucket_versioning", ""),
    "object lock": ("get_object_lock_configuration", "ObjectLockConfigurationNotFoundError"),
    "lifecycle": ("get_bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration"),
}
"""The settings of a bucket: the request, and the code of its refusal if there is none."""
_BROKEN = (
    exceptions.ConnectionError,
    exceptions.HTTPClientError,
    exceptions.IncompleteReadError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    TimeoutError,
    ConnectionError,
    ShortAnswerError,
)
_NO_CREDENTIALS = (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_MARKS = (
    "ContinuationToken",
    "KeyMarker",
    "UploadIdMarker",
    "VersionIdMarker",
    "PartNumberMarker",
)
"""The arguments of the next page of a listing: the page before has them after `Next`."""


class S3Driver(Session):
    """Sends requests through one s3fs file system."""

    capabilities = StoreCapabilities(
        put_if_absent=None, atomic_replace=True, hides_unfinished=True, durable=True
    )
    part_limits = PartLimits(5 << 20, 10_000)
    deletes_at_once = 1000
    holds_answers = False

    def __init__(self, file_system: Any, own: OwnOptions = NO_OPTIONS) -> None:
        _check_options(file_system)
        super().__init__(file_system, own)

    def server(self) -> str:
        client = self._fs._s3
        return "" if client is None else str(client.meta.endpoint_url)

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """Lists the objects and prefixes directly below a prefix."""
        bucket, prefix = self._folder(folder)
        if not bucket:  # the list of buckets is not a folder of checkpoints
            return []
        entries: list[ObjectInfo] = []
        for page in self._pages("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                name = entry["Prefix"][len(prefix) :].rstrip("/")
                entries.append(ObjectInfo(name, False, 0, 0.0))
            for entry in page.get("Contents", ()):
                if name := entry["Key"][len(prefix) :]:  # some servers have an object for a folder
                    entries.append(_object_info(name, entry))
        return entries

    def list_below(self, folder: str) -> list[ObjectInfo] | None:
        """Lists the objects below a prefix, without a delimiter."""
        bucket, prefix = self._folder(folder)
        if not bucket:
            return []
        below, more = Below(), True
        for page in self._pages("list_objects_v2", Bucket=bucket, Prefix=prefix):
            if not more:
                return None
            keys = [(entry["Key"][len(prefix) :], entry) for entry in page.get("Contents", ())]
            more = below.add(
                _object_info(key, entry) for key, entry in keys if key[-1:] not in ("", "/")
            )
        return below.files

    def head(self, path: str) -> ObjectInfo:
        try:
            head = self._do("head_object", path)
        except exceptions.ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in _UNTOLD:
                self._do("get_object", path, Range="bytes=0-0")  # this answer tells the reason
            raise
        name = path.rpartition("/")[2]
        return ObjectInfo(name, True, int(head["ContentLength"]), head["LastModified"].timestamp())

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        """Reads a range in one request. Fills the buffers while the response comes."""
        length = sum(target.nbytes for target in targets)
        last = offset + length - 1

        async def take(answer: Any) -> int:
            sent = _RANGE.fullmatch(answer.get("ContentRange", ""))
            size = int(answer["ContentLength"] if sent is None else sent[3])
            if sent is None:
                if offset or size != length:
                    raise OSError(
                        f"the server answered a request for bytes {offset}:{last + 1} with all "
                        f"{size} bytes: it has no range requests, which ckpt needs"
                    )
            elif int(sent[1]) != offset or int(sent[2]) != last:
                raise PastEndError(size)
            await _fill(answer["Body"], targets)
            return size

        found: int = self._do("get_object", path, take, Range=f"bytes={offset}-{last}")
        return found

    def get_start(self, path: str, length: int) -> Start:
        """Reads the first bytes of an object, with the ETag of the object that they are of."""

        async def take(answer: Any) -> Start:
            data = bytearray(int(answer["ContentLength"]))
            sent = _RANGE.fullmatch(answer.get("ContentRange", ""))
            size = len(data) if sent is None else int(sent[3])
            await _fill(answer["Body"], [memoryview(data)])
            return Start(bytes(data[:length]), size, str(answer.get("ETag", "")))

        found: Start = self._do("get_object", path, take, Range=f"bytes=0-{length - 1}")
        return found

    def get(self, path: str, limit: int) -> tuple[bytes | int, str]:
        """Reads an object; returns its size if that is above `limit`, and its ETag."""

        async def take(answer: Any) -> tuple[bytes | int, str]:
            size, tag = int(answer["ContentLength"]), str(answer.get("ETag", ""))
            if size > limit:
                answer["Body"].close()
                return size, tag
            data = bytearray(size)
            await _fill(answer["Body"], [memoryview(data)])
            return bytes(data), tag

        found: tuple[bytes | int, str] = self._do("get_object", path, take)
        return found

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        """Writes an object in one request, and returns its ETag; if it has `tag`, with one."""
        condition: dict[str, Any] = {"IfMatch": tag} if tag else {}
        return str(self._do("put_object", path, Body=_Body(data), **condition).get("ETag", ""))

    def put_if_absent(self, path: str, data: memoryview) -> str:
        """Writes an object in one request, on the condition that it does not exist."""
        answer = self._do("put_object", path, Body=_Body(data), IfNoneMatch="*")
        return str(answer.get("ETag", ""))

    def create_multipart(self, path: str) -> str:
        """Begins a multipart upload and returns its id."""
        return str(self._do("create_multipart_upload", path)["UploadId"])

    def upload_part(self, path: str, upload_id: str, number: int, data: memoryview) -> Any:
        body = _Body(data)
        return self._do("upload_part", path, UploadId=upload_id, PartNumber=number, Body=body)[
            "ETag"
        ]

    def copy_part(
        self, path: str, upload_id: str, number: int, source: str, lo: int, hi: int
    ) -> Any:
        """Copies a range of another object as one part, on the server, and returns its ETag."""
        bucket, key = self._split(source)
        answer = self._do(
            "upload_part_copy",
            path,
            UploadId=upload_id,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": key},
            CopySourceRange=f"bytes={lo}-{hi - 1}",
        )
        return answer["CopyPartResult"]["ETag"]

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[Any]) -> None:
        listed = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(parts, 1)]
        upload = {"Parts": listed}
        self._do("complete_multipart_upload", path, UploadId=upload_id, MultipartUpload=upload)

    def abort_multipart(self, path: str, upload_id: str) -> None:
        self._do("abort_multipart_upload", path, UploadId=upload_id)

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """Lists the multipart uploads anywhere below a prefix."""
        bucket, prefix = self._folder(folder)
        uploads, page = [], dict[str, Any]()
        for page in self._pages("list_multipart_uploads", Bucket=bucket, Prefix=prefix):
            for entry in page.get("Uploads", ()):
                name = entry["Key"][len(prefix) :]
                uploads.append(Unfinished(name, entry["Initiated"].timestamp(), entry["UploadId"]))
        if page.get("IsTruncated"):
            raise OSError("the server has more uploads, and does not tell where they begin")
        return uploads

    def old_versions(self, folder: str) -> tuple[int, int]:
        """Returns the number of versions below a prefix that are not current, and their bytes.

        Of very many, only those of the first pages count. A bucket without versions has none.
        """
        bucket, prefix = self._folder(folder)
        if not self._call("get_bucket_versioning", Bucket=bucket).get("Status"):
            return 0, 0
        pages = self._pages("list_object_versions", Bucket=bucket, Prefix=prefix)
        every = (one for page in islice(pages, VERSION_PAGES) for one in page.get("Versions", ()))
        sizes = [int(version["Size"]) for version in every if not version["IsLatest"]]
        return len(sizes), sum(sizes)

    def multipart_bytes(self, path: str, upload_id: str) -> int:
        """Returns the bytes of the parts of an upload, one request for a thousand parts."""
        bucket, key = self._split(path)
        pages = self._pages("list_parts", Bucket=bucket, Key=key, UploadId=upload_id)
        return sum(int(part["Size"]) for page in pages for part in page.get("Parts", ()))

    def delete(self, path: str, tag: str = "") -> None:
        """Deletes an object, if it exists; with `tag`, if this is its ETag."""
        condition: dict[str, Any] = {"IfMatch": tag} if tag else {}
        self._do("delete_object", path, **condition)

    def delete_all(self, paths: Mapping[str, str]) -> None:
        """Deletes objects of one bucket in one request. Raises OSError if one of them stays."""
        (bucket,) = {self._split(path)[0] for path in paths}
        keys = [
            {"Key": self._split(path)[1], **({"ETag": tag} if tag else {})}
            for path, tag in paths.items()
        ]
        listed = {"Objects": keys, "Quiet": True}
        answer = self._call("delete_objects", Bucket=bucket, Delete=listed)
        for error in answer.get("Errors", ()):
            raise OSError(f"{error.get('Key')}: {error.get('Code')}: {error.get('Message')}")

    def delete_versions(self, folder: str) -> None:
        """Deletes all objects below a prefix with all their versions, of a bucket that has some."""
        bucket, prefix = self._folder(folder)
        found = self._call("list_object_versions", Bucket=bucket, Prefix=prefix)
        keys = [
            {"Key": entry["Key"], "VersionId": entry["VersionId"]}
            for kind in ("Versions", "DeleteMarkers")
            for entry in found.get(kind, ())
        ]
        if keys:
            self._call("delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})

    def bucket_setting(self, folder: str, subject: str) -> Mapping[str, Any]:
        """Returns a setting of the bucket (`_SETTINGS`); empty if it was never made."""
        method, absent = _SETTINGS[subject]
        try:
            answer = self._call(method, Bucket=self._split(folder)[0])
        except exceptions.ClientError as error:
            if error.response.get("Error", {}).get("Code") == absent:
                return {}
            raise
        return {name: value for name, value in answer.items() if name != "ResponseMetadata"}

    def delete_folder(self, folder: str) -> None:
        """Does nothing: a prefix has no object of its own."""

    def error_class(self, error: BaseException) -> ErrorClass:
        if isinstance(error, PastEndError):
            return ErrorClass.PAST_END
        if isinstance(error, _NO_CREDENTIALS):
            return ErrorClass.DENIED
        if isinstance(error, RecursionError):  # s3fs asks the address that sends it elsewhere
            return ErrorClass.OTHER_REGION
        if isinstance(error, _BROKEN):
            return ErrorClass.PASSING
        if isinstance(error, exceptions.ParamValidationError) and "bucket name" in str(error):
            return ErrorClass.NO_BUCKET
        if not isinstance(error, exceptions.ClientError):
            return ErrorClass.LASTING
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        message = str(error.response.get("Error", {}).get("Message", "")).lower()
        if "object lock" in message and "content-md5" in message:
            return ErrorClass.UNSUMMED
        other = ErrorClass.PASSING if status >= 500 else ErrorClass.LASTING
        return _CLASSES.get(code) or _CLASSES.get(str(status), other)

    def _folder(self, folder: str) -> tuple[str, str]:
        bucket, key = self._split(folder)
        return bucket, f"{key.rstrip('/')}/" if key.strip("/") else ""

    def _split(self, path: str) -> tuple[str, str]:
        """Returns bucket and key. The key includes `?versionId=`, which s3fs would cut off."""
        bucket = "" if path.startswith("/") else self._fs.split_path(path)[0]
        return bucket, path[len(bucket) + 1 :]

    def _pages(self, method: str, **arguments: Any) -> Iterator[Any]:
        """Yields the pages of a listing. A page is requested when it is asked for."""
        more: dict[str, Any] = {}
        while True:
            page = self._call(method, **arguments, **more)
            yield page
            more = {mark: page[f"Next{mark}"] for mark in _MARKS if page.get(f"Next{mark}")}
            if not page.get("IsTruncated") or not more:
                return

    def _do(
        self,
        method: str,
        path: str,
        take: Callable[[Any], Awaitable[Any]] | None = None,
        **arguments: Any,
    ) -> Any:
        bucket, key = self._split(path)
        return self._call(method, take, Bucket=bucket, Key=key, **arguments)

    def _call(
        self,
        method: str,
        take: Callable[[Any], Awaitable[Any]] | None = None,
        **arguments: Any,
    ) -> Any:
        """Sends one request. Returns the response, or the result of `take` for it."""
        body = arguments.get("Body")
        sent_bytes = 0 if body is None else len(body)
        span = _SPAN.fullmatch(arguments.get("Range", ""))
        awaited_bytes = 0 if span is None else int(span[2]) - int(span[1]) + 1

        async def call() -> Any:
            await self._fs.set_session()
            client = await self._fs.get_s3(arguments["Bucket"])
            action = getattr(client, method)
            try:
                answer = await action(**self._fs._get_s3_method_kwargs(action, **arguments))
            except exceptions.ConnectionClosedError as error:
                # aiohttp does not send a stream of bytes again to another address.
                if "redirect" not in str(error.kwargs.get("error")):
                    raise
                refusal = {"Code": "PermanentRedirect", "Message": "the server names another one"}
                raise exceptions.ClientError({"Error": refusal}, method) from error
            return answer if take is None else await take(answer)

        with self._gate.passing(sent_bytes + awaited_bytes):
            count_request(operation_of(method), sent_bytes)
            return in_loop(self._fs.loop, call())


def operation_of(method: str) -> str:
    """Returns the operation of a method of the client, as events name it.

    >>> operation_of("upload_part"), operation_of("list_objects_v2"), operation_of("head_object")
    ('put', 'list', 'head')
    """
    verb = method.partition("_")[0]
    return "copy" if method.endswith("_copy") else _OPERATIONS.get(verb, verb)


def _object_info(name: str, entry: Mapping[str, Any]) -> ObjectInfo:
    tag = str(entry.get("ETag", ""))
    return ObjectInfo(name, True, int(entry["Size"]), entry["LastModified"].timestamp(), tag)


def _check_options(file_system: Any) -> None:
    """Raises ArgumentError for options that s3fs takes and refuses at its first request."""
    passed_on = inspect.signature(AioSession).parameters
    own = inspect.signature(type(file_system).__init__).parameters
    check_names("s3fs", file_system.kwargs, [*own, *passed_on])
    endpoint = file_system.endpoint_url or file_system.client_kwargs.get("endpoint_url")
    if endpoint and not str(endpoint).startswith(("http://", "https://")):
        raise ArgumentError(
            f"storage_options= has the endpoint_url {without_secrets(str(endpoint))!r}; give one "
            "that begins with http:// or https://"
        )


class _Body:
    """The body of a request: botocore reads it as a file to sign it, aiohttp block by block.

    It copies no bytes, and a retry can send it again.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def read(self, nbytes: int | None = -1) -> memoryview:
        end = len(self._data) if nbytes is None or nbytes < 0 else self._at + nbytes
        part = self._data[self._at : end]
        self._at += len(part)
        return part

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for at in range(0, len(self._data), SEND_BYTES):
            yield self._data[at : at + SEND_BYTES]


async def _fill(body: Any, targets: Sequence[memoryview]) -> None:
    """Fills buffers while the response comes."""
    async with body:
        read = partial(body.read, RECEIVE_BYTES)
        data = memoryview(b"")
        for target in targets:
            at, end = 0, len(target)
            while at < end:
                if not data:
                    data = memoryview(await read())
                    if not data:
                        raise ShortAnswerError("the response has fewer bytes than it announced")
                part = data[: end - at]
                target[at : at + len(part)] = part
                at, data = at + len(part), data[len(part) :]
    count_received(sum(len(target) for target in targets))
