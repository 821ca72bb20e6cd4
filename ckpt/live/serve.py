"""`ckpt serve` as a function: a folder of checkpoints over HTTP, until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote

from ckpt.live.address import authority
from ckpt.live.folder_app import FolderApp
from ckpt.live.http_server import HttpServer
from ckpt.live.listening import EVERY_ADDRESS, listen, most_connections
from sharding.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The folder, and who may read it from where. Raises ArgumentError."""

    folder: Path
    address: str = "127.0.0.1"
    port: int = 0
    """0 for any free port."""
    token: str | None = field(default=None, repr=False)
    """The token of readers; None to ask for none."""
    certificate: Path | None = None
    """A certificate chain in PEM: the folder is served by https."""
    key: Path | None = None
    """The certificate's key; None if it is in the same file."""

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise ArgumentError(f"{self.folder}: not a folder; give one to serve")
        if self.token == "":
            raise ArgumentError("the token is empty: give one, or ask for none")
        if not 0 <= self.port < 65536:
            raise ArgumentError(f"port={self.port}: give a number from 0 to 65535")
        if self.key is not None and self.certificate is None:
            raise ArgumentError("a key without a certificate: give both")

    @property
    def is_local(self) -> bool:
        """Whether only programs of this host can connect."""
        if self.address == "localhost":
            return True
        try:
            return ip_address(self.address).is_loopback
        except ValueError:
            return False


def serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serves the folder until SIGINT or SIGTERM. Calls `ready` with the URL once it listens.

    Raises ArgumentError for an address or certificate that is not possible.
    """
    asyncio.run(_serve(options, ready))


async def _serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    context = _context(options)
    try:
        listener = listen(options.address, options.port)
    except OSError as error:
        raise ArgumentError(
            f"{authority(options.address, options.port)}: the server cannot listen there: {error}"
        ) from None
    server = HttpServer(
        listener, FolderApp(options.folder, options.token), most_connections(), context
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    try:
        ready(_url(options, listener.getsockname()[1]))
        await end.wait()
    finally:
        await server.close()


def _context(options: ServeOptions) -> ssl.SSLContext | None:
    if options.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A password cannot be asked for here: the text stands for "none", and fails.
        context.load_cert_chain(options.certificate, options.key, lambda: "")
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{os.fspath(options.certificate)}: no certificate with its key: {error}"
        ) from None
    return context


def _url(options: ServeOptions, port: int) -> str:
    scheme = "http" if options.certificate is None else "https"
    key = "" if options.token is None else f"?token={quote(options.token, safe='')}"
    # Readers cannot connect to "every address".
    host = socket.gethostname() if options.address in EVERY_ADDRESS else options.address
    return f"{scheme}://{authority(host, port)}/{key}"
