"""The address of a live state: `live://host:port/NAME[/VERSION][?token=TOKEN]`.

Rules:

1. A name has letters, digits, `.`, `_` and `-`, and begins with a letter or digit: it is a part of
   paths and of the name of a socket.
2. Without a version, the address means the newest one at the time of the read.
3. `str` has the token, for readers; `shown` has none, for messages and logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from sharding.errors import ArgumentError

SCHEME = "live"
FORM = "live://host:port/name, with /version and ?token=… where they are needed"
TOKEN = "?token="
"""The start of the token in a URL."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FILE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
"""The name of a file of a version: no separators, no `..`."""
MOST_VERSION = 2**63 - 1
_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class LiveUrl:
    """The parts of an address."""

    host: str
    port: int
    name: str
    version: int | None = None
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.shown if self.token is None else f"{self.shown}{TOKEN}{quote(self.token)}"

    @property
    def shown(self) -> str:
        """The address without the token."""
        version = "" if self.version is None else f"/{self.version}"
        return f"{SCHEME}://{authority(self.host, self.port)}/{self.name}{version}"

    def at(self, version: int | None) -> LiveUrl:
        """Returns the address of another version of the same state."""
        return replace(self, version=version)


def authority(host: str, port: int) -> str:
    """Returns `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(url: str) -> LiveUrl:
    """Returns the parts of an address. Raises ArgumentError if it is not one.

    >>> parse("live://10.0.0.7:4000/policy/12?token=abc").at(13).shown
    'live://10.0.0.7:4000/policy/13'
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _address_error(url, str(error)) from None
    if parts.scheme != SCHEME or not host or not port or "@" in parts.netloc or parts.fragment:
        raise _address_error(url, "it needs a host and a port, and has neither user nor fragment")
    name, version = _path(url, parts)
    return LiveUrl(host, port, name, version, _token(url, parts))


def version_of(text: str) -> int | None:
    """Returns the number in a text; None if the text is not a version as we write them."""
    if not _VERSION.fullmatch(text) or int(text) > MOST_VERSION:
        return None
    return int(text)


def _path(url: str, parts: SplitResult) -> tuple[str, int | None]:
    name, _, rest = parts.path.removeprefix("/").partition("/")
    if not NAME.fullmatch(name):
        raise _address_error(url, f"the name {name!r:.80} must match {NAME.pattern}")
    rest = rest.removesuffix("/")
    version = version_of(rest) if rest else None
    if rest and version is None:
        raise _address_error(url, f"{rest!r:.80} is not a version, which is a whole number")
    return name, version


def _token(url: str, parts: SplitResult) -> str | None:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if not pairs:
        return None
    if len(pairs) != 1 or pairs[0][0] != "token" or not pairs[0][1]:
        raise _address_error(url, "the only key after ? is token, with a value")
    return pairs[0][1]


def _address_error(url: str, why: str) -> ArgumentError:
    bare = url.partition("?")[0]
    return ArgumentError(f"{bare}: not the address of a live state: {why}; the form is {FORM}")
