"""Chooses the driver of an fsspec file system, and the options of the file system."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from math import inf
from typing import Any

from ckpt.stores.driver import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    LONGEST_SECONDS,
    NO_OPTIONS,
    MultipartDriver,
    OwnOptions,
    StreamDriver,
    check_names,
)
from ckpt.stores.fsspec_driver import FsspecDriver
from formats.limits import parse_size
from sharding.errors import ArgumentError

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
    found = {one.name: others.pop(one.name) for one in fields(OwnOptions) if one.name in others}
    most, bandwidth = found.get("concurrency"), found.get("max_bandwidth")
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
    agent = found.get("user_agent", "")
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
        from ckpt.stores.fsspec_driver import GcsDriver

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
        told = {"timeout": limits, "headers": {"User-Agent": own.header}}
        return {**options, "client_kwargs": {**told, **options.get("client_kwargs", {})}}
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
