"""Where the fault tests keep checkpoints, and what is really there, as others than we see it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckpt.stores.store import open_store
from formats.native.manifest import MANIFEST, load
from tests.stores.server import Server, s3_client


class Place(Protocol):
    """A folder for the checkpoints of one trial."""

    url: str
    options: Any
    """What the driver is told."""

    def files(self) -> set[str]:
        """The paths of all files below it, with uploads that were not completed."""
        ...

    def clear(self) -> None:
        """Remove everything."""
        ...


@dataclass(frozen=True)
class Disk:
    """A folder on disk."""

    url: str
    options: Any = None

    def files(self) -> set[str]:
        return {
            os.path.relpath(os.path.join(folder, name), self.url)
            for folder, _, names in os.walk(self.url)
            for name in names
        }

    def clear(self) -> None:
        shutil.rmtree(self.url, ignore_errors=True)
        Path(self.url).mkdir()


@dataclass(frozen=True)
class Bucket:
    """A prefix in a bucket of an S3 server."""

    server: Server
    prefix: str

    @property
    def url(self) -> str:
        return self.server.url(self.prefix)

    @property
    def options(self) -> Any:
        return dict(self.server.options)

    def files(self) -> set[str]:
        keys = [key for key, _ in (*self._objects(), *self._uploads())]
        return {key.removeprefix(f"{self.prefix}/") for key in keys}

    def clear(self) -> None:
        client = s3_client(self.server)
        for key, _ in self._objects():
            client.delete_object(Bucket=self.server.bucket, Key=key)
        for key, upload in self._uploads():
            client.abort_multipart_upload(Bucket=self.server.bucket, Key=key, UploadId=upload)

    def _objects(self) -> list[tuple[str, str]]:
        pages = s3_client(self.server).get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.server.bucket, Prefix=f"{self.prefix}/")
        return [(one["Key"], "") for page in found for one in page.get("Contents", [])]

    def _uploads(self) -> list[tuple[str, str]]:
        found = s3_client(self.server).list_multipart_uploads(
            Bucket=self.server.bucket, Prefix=f"{self.prefix}/"
        )
        return [(one["Key"], one["UploadId"]) for one in found.get("Uploads", [])]


def belonging(place: Place, others: Iterable[str] = ()) -> set[str]:
    """The files that are part of a checkpoint, by manifests alone; and those below `others`."""
    files = place.files()
    own = {name for name in files for other in others if f"/{name}/".startswith(f"{other}/")}
    for name in files:
        folder, base = os.path.split(name)
        if base == MANIFEST:
            with open_store(f"{place.url}/{folder}", place.options) as store:
                manifest = load(store.read_whole(MANIFEST, 1 << 30))
            own |= {name, *(f"{folder}/{file.name}" for file in manifest.files)}
            own |= {f"{b.folder}/{file.name}" for b in manifest.bases if b for file in b.files}
    return own
