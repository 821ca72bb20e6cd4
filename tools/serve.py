"""`ckpt serve`: a folder of checkpoints for readers on other machines, by HTTP."""

from __future__ import annotations

import os
import secrets
import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sharding.errors import ArgumentError
from tools.exit_codes import ExitCode, Help
from tools.text import tell

if TYPE_CHECKING:
    from ckpt.live.serve import ServeOptions

HELP = Help(
    summary="offer a folder of checkpoints by HTTP, read-only",
    description="""\
Offers a folder of checkpoints by HTTP, read-only, until Ctrl-C or SIGTERM. It prints a URL with a
token; `ckpt.load` and each command take this URL.""",
    examples=(
        ("ckpt serve runs/gpt", "for programs on this host"),
        (
            "ckpt serve runs/gpt --address 0.0.0.0 --port 8000 --certificate chain.pem",
            "for other hosts, encrypted",
        ),
    ),
    codes=(ExitCode.NOT_A_CHECKPOINT, ExitCode.STORE),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The folder, the address, and the readers' permission."""

    folder: str
    address: str
    port: int
    token: str | None = field(repr=False)
    no_token: bool
    certificate: str | None
    key: str | None


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="a folder with checkpoints, or a checkpoint")
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="the address to listen at; the default, 127.0.0.1, only serves programs of this host",
    )
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument(
        "--token",
        help="the token that readers need; default: CKPT_TOKEN, or else a random one, which the "
        "printed URL has (other users of this host can see the arguments of a command)",
    )
    parser.add_argument(
        "--no-token", action="store_true", help="everybody who can connect may read"
    )
    parser.add_argument("--certificate", metavar="PEM", help="serve by https, with this chain")
    parser.add_argument("--key", metavar="PEM", help="its key, if it is in another file")


def run(options: Options) -> int:
    """Print the URL, and serve until Ctrl-C or SIGTERM."""
    from ckpt.live.serve import ServeOptions, serve
    from ckpt.stores.store import local_path

    if options.no_token and options.token is not None:
        raise ArgumentError("--token and --no-token exclude each other; give one")
    serve_options = ServeOptions(
        Path(local_path(options.folder) or options.folder),
        options.address,
        options.port,
        _token(options),
        None if options.certificate is None else Path(options.certificate),
        None if options.key is None else Path(options.key),
    )
    serve(serve_options, partial(_ready, _warning(serve_options)))
    return ExitCode.FINE


def _warning(options: ServeOptions) -> str:
    if options.is_local:
        return ""
    if options.token is None:
        return f"ckpt: everybody who reaches {options.address} may read {options.folder}"
    if options.certificate is None:
        return "ckpt: the token and the data travel unencrypted; --certificate encrypts them"
    return ""


def _token(options: Options) -> str | None:
    if options.no_token:
        return None
    if options.token is not None:
        return options.token
    return os.environ.get("CKPT_TOKEN") or secrets.token_urlsafe(24)


def _ready(warning: str, url: str) -> None:
    if warning:
        tell(warning)
    print(url)
    if sys.stdout is not None:
        sys.stdout.flush()
