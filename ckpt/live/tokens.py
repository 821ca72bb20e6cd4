"""The token of a request compared with that of a server."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from ckpt.live.protocol import RefusedError

_BEARER = "bearer "


def is_token(given: str, wanted: str) -> bool:
    """Whether two tokens are equal, in a time that does not tell how equal they are."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def check_token(headers: Mapping[str, str], query: Mapping[str, str], wanted: str) -> None:
    """Raises RefusedError unless a request has the token, in a header or in its query."""
    header = headers.get("authorization", "")
    is_bearer = header.lower().startswith(_BEARER)
    given = header[len(_BEARER) :].strip() if is_bearer else query.get("token")
    if given is None or not given:
        text = "a token is needed: `Authorization: Bearer TOKEN`, or ?token= in the URL"
        raise RefusedError("token", text)
    if not is_token(given, wanted):
        order = "; the path of a URL comes before ?token=" if "/" in given else ""
        raise RefusedError("token", f"the token is wrong{order}")
