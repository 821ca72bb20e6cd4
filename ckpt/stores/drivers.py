"""Chooses the driver of an fsspec file system, and the options of the file system."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any

from ckpt.stores.driver import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    LONGEST_SECONDS,
    MultipartDriver,
    StreamDriver,
    check_names,
)
from ckpt.stores.fsspec_driver import FsspecDriver

UNNAMED_OPTIONS = (
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"),
    "memmove_max_workers",
)
"""Options of every fsspec file system, and of gcsfs, that no signature names."""


def driver_of(file_system: Any) -> MultipartDriver | StreamDriver:
    """Returns the driver for an fsspec file system.

    The drivers of S3, Azure and Google import a client library, so each is imported on use. Raises
    ArgumentError for options that these three do not have: their file systems take any.
    """
    package = type(file_system).__module__.partition(".")[0]
    if package == "s3fs":
        from ckpt.stores.s3_driver import S3Driver

        return S3Driver(file_system)
    if package == "adlfs" and hasattr(file_system, "service_client"):
        from ckpt.stores.azure_driver import AzureDriver

        _check_options(package, file_system)
        return AzureDriver(file_system)
    if package == "gcsfs":
        from ckpt.stores.fsspec_driver import GcsDriver

        _check_options(package, file_system)
        return GcsDriver(file_system)
    return FsspecDriver(file_system)


def _check_options(package: str, file_system: Any) -> None:
    kinds: tuple[Any, ...] = type(file_system).__mro__
    own = [inspect.signature(kind.__init__).parameters for kind in kinds]
    check_names(package, file_system.storage_options, [*chain(*own), *UNNAMED_OPTIONS])


def settings_of(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a file system: the user's, and the defaults that its driver needs.

    >>> settings_of("memory", {"a": 1})
    {'a': 1}
    """
    if protocol in ("http", "https"):
        import aiohttp  # here, because only this driver needs it

        limits = aiohttp.ClientTimeout(
            LONGEST_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS
        )
        return {**options, "client_kwargs": {"timeout": limits, **options.get("client_kwargs", {})}}
    if protocol not in ("s3", "s3a"):
        return dict(options)
    # `ckpt.stores.retries` makes the retries. Half of the servers with an S3 interface lack
    # trailing checksums.
    config = {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": ANSWER_SECONDS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": 32,
    }
    return {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}
