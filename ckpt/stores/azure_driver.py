"""The driver of Azure's blob storage: requests through the client of adlfs, with its credentials.

A large file is uploaded as blocks, and a block list makes a blob of them. Azure removes blocks
without a blob after a week. To abort an upload, the driver commits an empty blob, if there is none
of the name, and deletes it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from azure.core import MatchConditions, exceptions
from azure.storage.blob import BlobBlock, BlobSasPermissions, generate_blob_sas

from ckpt.stores.driver import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
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
    count_received,
    count_request,
    in_loop,
)
from ckpt.stores.retries import ErrorClass, PastEndError, class_of_status

T = TypeVar("T")

_ONCE = {
    "retry_total": 0,
    "connection_timeout": CONNECT_SECONDS,
    "read_timeout": ANSWER_SECONDS,
    "raw_request_hook": lambda request: _sending(request),
    "raw_response_hook": lambda answer: _count_answer(answer),
}
"""The client makes no retries: `ckpt.stores.retries` does."""
_SCOPE = "https://storage.azure.com/.default"
"""The token of a user or a role, by which the server reads the source of a copy."""
_COPY_SECONDS = 3600
"""The time for which a key signs the source of a copy."""
_IF_ABSENT = {"match_condition": MatchConditions.IfMissing}
_STALE = ("AuthenticationFailed", "InvalidAuthenticationInfo")
"""Codes of a signature or token that has expired, or is not of the account's present key."""
_THERE = ("BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite")
_BROKEN = (
    exceptions.ServiceRequestError,
    exceptions.ServiceResponseError,
    exceptions.IncompleteReadError,
    TimeoutError,
    ConnectionError,
    ShortAnswerError,
)


class AzureDriver(Session):
    """Sends requests through one adlfs file system."""

    capabilities = StoreCapabilities(
        put_if_absent=None, atomic_replace=True, hides_unfinished=True, durable=True
    )
    part_limits = PartLimits(1 << 20, 50_000)
    deletes_at_once = 256
    holds_answers = True

    def __init__(self, file_system: Any, own: OwnOptions = NO_OPTIONS) -> None:
        super().__init__(file_system, own)
        self._once = {**_ONCE, "user_agent": own.header}

    def server(self) -> str:
        return str(self._fs.service_client.url).partition("?")[0]

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """Lists the blobs and prefixes directly below a prefix."""
        if not folder.strip("/"):  # the list of containers is not a folder of checkpoints
            return []
        container, prefix = self._folder(folder)

        async def listing() -> list[ObjectInfo]:
            entries = []
            async for blob in container.walk_blobs(name_starts_with=prefix, **self._once):
                name = blob.name[len(prefix) :]
                if name.endswith("/"):
                    entries.append(ObjectInfo(name.rstrip("/"), False, 0, 0.0))
                elif name:
                    entries.append(_object_info(name, blob))
            # Accounts with real folders also list each folder as an empty blob.
            folders = {entry.name for entry in entries if not entry.is_file}
            return [entry for entry in entries if not entry.is_file or entry.name not in folders]

        return self._run(listing())

    def list_below(self, folder: str) -> list[ObjectInfo] | None:
        if not folder.strip("/"):
            return []
        container, prefix = self._folder(folder)

        async def listing() -> list[ObjectInfo] | None:
            below, more = Below(), True
            async for page in container.list_blobs(prefix, **self._once).by_page():
                if not more:
                    return None
                blobs = [blob async for blob in page]
                more = below.add(_object_info(blob.name[len(prefix) :], blob) for blob in blobs)
            # Accounts with real folders also list each folder as an empty blob.
            folders = {file.name.rpartition("/")[0] for file in below.files}
            return [entry for entry in below.files if entry.nbytes or entry.name not in folders]

        return self._run(listing())

    def head(self, path: str) -> ObjectInfo:
        blob = self._blob(path)
        return _object_info(
            path.rpartition("/")[2], self._run(blob.get_blob_properties(**self._once))
        )

    def get_range(self, path: str, offset: int, targets: Sequence[memoryview]) -> int | None:
        length = sum(target.nbytes for target in targets)

        async def fetch() -> tuple[memoryview, int]:
            answer = await self._blob(path).download_blob(offset, length, **self._once)
            size = int(str(answer.properties.content_range).rpartition("/")[2])
            if size < offset + length:
                raise PastEndError(size)
            return memoryview(await answer.readall()), size

        data, size = self._run(fetch(), length)
        if len(data) != length:
            raise ShortAnswerError(f"the response has {len(data)} of {length} bytes")
        for target in targets:
            target[:] = data[: len(target)]
            data = data[len(target) :]
        return size

    def get_start(self, path: str, length: int) -> Start:
        """Reads the first bytes of a blob, with the tag of the blob that they are of."""

        async def fetch() -> Start:
            answer = await self._blob(path).download_blob(0, length, **self._once)
            size = int(str(answer.properties.content_range).rpartition("/")[2])
            tag = _quote(answer.properties.etag)
            return Start(bytes(await answer.readall()), size, tag)

        return self._run(fetch())

    def get(self, path: str, limit: int) -> tuple[bytes | int, str]:
        """Reads a blob; returns its size if that is above `limit`, and its ETag."""

        async def fetch() -> tuple[bytes | int, str]:
            answer = await self._blob(path).download_blob(**self._once)
            size, tag = int(answer.properties.size), str(answer.properties.etag or "")
            if size > limit:
                return size, tag
            data = bytes(await answer.readall())
            if len(data) != size:
                raise ShortAnswerError(f"the response has {len(data)} of {size} bytes")
            return data, tag

        return self._run(fetch())

    def put(self, path: str, data: memoryview, tag: str = "") -> str:
        """Writes a blob in one request, and returns its ETag; if it has `tag`, with one."""
        return self._upload(path, data, overwrite=True, **_if_it_has(tag))

    def put_if_absent(self, path: str, data: memoryview) -> str:
        """Writes a blob in one request, on the condition that it does not exist."""
        return self._upload(path, data, overwrite=False)

    def create_multipart(self, path: str) -> str:
        """Returns an upload id, the prefix of the block names. Sends no request."""
        return secrets.token_hex(8)

    def upload_part(self, path: str, upload_id: str, number: int, data: memoryview) -> Any:
        name = f"{upload_id}{number:06}"
        staging = self._blob(path).stage_block(name, bytes(data), length=len(data), **self._once)
        self._run(staging, len(data))
        return name

    def copy_part(
        self, path: str, upload_id: str, number: int, source: str, lo: int, hi: int
    ) -> Any:
        """Makes one block of a range of another blob, on the server, and returns its name."""
        name = f"{upload_id}{number:06}"

        async def copy() -> None:
            url, conditions = await _readable(self._blob(source))
            await self._blob(path).stage_block_from_url(
                name, url, lo, hi - lo, **conditions, **self._once
            )

        self._run(copy())
        return name

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[Any]) -> None:
        """Makes a blob of its blocks."""
        blocks = [BlobBlock(name) for name in parts]
        self._run(self._blob(path).commit_block_list(blocks, **self._once))

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Deletes the blocks, unless a blob of the name exists."""

        async def abort() -> None:
            blob = self._blob(path)
            with suppress(exceptions.ResourceExistsError, exceptions.ResourceModifiedError):
                empty = await blob.commit_block_list([], **_IF_ABSENT, **self._once)
                same = {"etag": empty["etag"], "match_condition": MatchConditions.IfNotModified}
                await blob.delete_blob(**same, **self._once)

        self._run(abort())

    def list_multipart(self, folder: str) -> list[Unfinished]:
        """Lists names directly below a prefix that have blocks and no blob."""
        container, prefix = self._folder(folder)

        async def pending() -> list[Unfinished]:
            blobs = {blob.name async for blob in container.list_blobs(prefix, **self._once)}
            uploads = []
            all_kinds = container.list_blobs(prefix, include=["uncommittedblobs"], **self._once)
            async for blob in all_kinds:
                name = blob.name[len(prefix) :]
                if blob.name not in blobs and "/" not in name:
                    began = blob.last_modified  # an unknown time counts as now: never old
                    started = began.timestamp() if began else time.time()
                    uploads.append(Unfinished(name, started, ""))
            return uploads

        return self._run(pending())

    def multipart_bytes(self, path: str, upload_id: str) -> int:
        """Returns the bytes of the blocks that no blob has."""
        _, blocks = self._run(self._blob(path).get_block_list("uncommitted", **self._once))
        return sum(int(block.size) for block in blocks)

    def delete(self, path: str, tag: str = "") -> None:
        """Deletes a blob; with `tag`, if this is its ETag."""
        deleting = self._blob(path).delete_blob(
            delete_snapshots="include", **_if_it_has(tag), **self._once
        )
        self._run(deleting)

    def delete_all(self, paths: Mapping[str, str]) -> None:
        """Deletes blobs of one container in one request. Raises OSError if one of them stays."""
        split = {path: self._fs.split_path(path) for path in paths}
        (container,) = {container for container, _, _ in split.values()}
        listed = [
            {"name": split[path][1], "delete_snapshots": "include", **_if_it_has(tag)}
            for path, tag in paths.items()
        ]

        async def send() -> list[int]:
            client = self._fs.service_client.get_container_client(container)
            once = {**self._once, "raise_on_any_failure": False}
            return [
                answer.status_code async for answer in await client.delete_blobs(*listed, **once)
            ]

        for path, status in zip(paths, self._run(send()), strict=True):
            if status not in (202, 404):
                raise OSError(f"{path}: the server answered {status}")

    def delete_folder(self, folder: str) -> None:
        """Does nothing: a prefix has no object of its own."""

    def error_class(self, error: BaseException) -> ErrorClass:
        if isinstance(error, PastEndError):
            return ErrorClass.PAST_END
        if isinstance(error, _BROKEN):
            return ErrorClass.PASSING
        if not isinstance(error, exceptions.HttpResponseError):
            is_stale = isinstance(error, exceptions.ClientAuthenticationError)
            return ErrorClass.STALE if is_stale else ErrorClass.LASTING
        error_code, status = getattr(error, "error_code", "") or "", error.status_code or 0
        code = str(
            getattr(error_code, "value", error_code)
        )  # a member of an enum, if the client knows it
        if code.endswith(("ContainerNotFound", "ContainerBeingDeleted")):
            return ErrorClass.NO_BUCKET
        if code.endswith(("BlobArchived", "BlobBeingRehydrated")):
            return ErrorClass.ARCHIVED
        if code.endswith(("Md5Mismatch", "Crc64Mismatch", "IncompleteBody")):
            return ErrorClass.PASSING
        if code.endswith(_STALE):
            return ErrorClass.STALE
        is_there = code.endswith(_THERE) and status not in (401, 403, 404, 416)
        of_azure = {404: ErrorClass.MISSING, 409: ErrorClass.PASSING}
        return ErrorClass.EXISTS if is_there else class_of_status(status, of_azure)

    def _upload(self, path: str, data: memoryview, overwrite: bool, **condition: Any) -> str:
        blob = self._blob(path)
        uploading = blob.upload_blob(
            bytes(data), length=len(data), overwrite=overwrite, **condition, **self._once
        )
        return str(self._run(uploading, len(data)).get("etag") or "")

    def _blob(self, path: str) -> Any:
        container, key, _ = self._fs.split_path(path)
        return self._fs.service_client.get_blob_client(container, key)

    def _folder(self, folder: str) -> tuple[Any, str]:
        container, key, _ = self._fs.split_path(folder)
        prefix = f"{key.rstrip('/')}/" if key.strip("/") else ""
        return self._fs.service_client.get_container_client(container), prefix

    def _run(self, work: Coroutine[Any, Any, T], nbytes: int = 0) -> T:
        """Runs a request with so many bytes of a file in it or in its answer."""
        with closing(work), self._gate.passing(nbytes):
            return in_loop(self._fs.loop, work)


async def _readable(blob: Any) -> tuple[str, dict[str, str]]:
    """Returns the URL of a blob and arguments with which the server reads it for this client.

    A key signs for this blob alone, for reading. The URL of a client with a SAS has it already.
    """
    credential = blob.credential
    key = getattr(credential, "account_key", None)
    if key is not None:
        until = datetime.now(timezone.utc) + timedelta(seconds=_COPY_SECONDS)
        signed = generate_blob_sas(
            blob.account_name,
            blob.container_name,
            blob.blob_name,
            account_key=key,
            permission=BlobSasPermissions(read=True),
            expiry=until,
        )
        return f"{blob.url}?{signed}", {}
    if hasattr(credential, "get_token"):
        token = await credential.get_token(_SCOPE)
        return blob.url, {"source_authorization": f"Bearer {token.token}"}
    return blob.url, {}


def _if_it_has(tag: str) -> dict[str, Any]:
    return {"etag": tag, "match_condition": MatchConditions.IfNotModified} if tag else {}


def _object_info(name: str, blob: Any) -> ObjectInfo:
    tag = _quote(getattr(blob, "etag", ""))
    return ObjectInfo(name, True, int(blob.size or 0), blob.last_modified.timestamp(), tag)


def _quote(etag: str | None) -> str:
    """Returns an ETag as conditions have it. Listings have it without quotation marks."""
    return f'"{etag.strip(chr(34))}"' if etag else ""


def _sending(request: Any) -> None:
    """Counts a request that the client sends, one page of a listing say."""
    sent = request.http_request
    is_listing = "comp=list" in sent.url or ("comp=blocklist" in sent.url and sent.method == "GET")
    operation = "list" if is_listing else sent.method.lower()
    operation = "copy" if "x-ms-copy-source" in sent.headers else operation
    operation = "delete" if "comp=batch" in sent.url else operation
    is_data = operation == "put" and "comp=blocklist" not in sent.url
    count_request(operation, int(sent.headers.get("Content-Length") or 0) if is_data else 0)


def _count_answer(answer: Any) -> None:
    sent, got = answer.http_request, answer.http_response
    if sent.method == "GET" and "comp=" not in sent.url and got.status_code < 300:
        count_received(int(got.headers.get("Content-Length") or 0))
