"""Which driver sends the requests of an fsspec file system, and how that file system is set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.stores.driver import ANSWER_SECONDS, CONNECT_SECONDS, MultipartDriver, StreamDriver
from ckpt.stores.fsspec_driver import FsspecDriver


def driver_of(file_system: Any) -> MultipartDriver | StreamDriver:
    """The driver for an fsspec file system.

    A driver of its own imports the client library of its server, so it is imported for that alone.
    """
    package = type(file_system).__module__.partition(".")[0]
    if package == "s3fs":
        from ckpt.stores.s3_driver import S3Driver

        return S3Driver(file_system)
    if package == "adlfs" and hasattr(file_system, "service_client"):
        from ckpt.stores.azure_driver import AzureDriver

        return AzureDriver(file_system)
    if package == "gcsfs":
        from ckpt.stores.gcs_driver import GcsDriver

        return GcsDriver(file_system)
    return FsspecDriver(file_system)


def settings_of(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a file system, with what its driver here relies on where the user says nothing.

    >>> settings_of("memory", {"a": 1})
    {'a': 1}
    """
    if protocol not in ("s3", "s3a"):
        return dict(options)
    # Retries are `ckpt.stores.retries`'. Half of the servers that speak S3 know no trailing
    # checksums.
    config = {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": ANSWER_SECONDS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": 32,
    }
    return {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}
