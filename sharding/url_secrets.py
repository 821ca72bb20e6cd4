"""Removes passwords and signatures from the URLs in a text.

Credentials belong into `storage_options`, which are never shown. But a URL may contain credentials:
a password before its host, the signature of a presigned http URL, or the token of a live state.
Errors and logs show URLs, so the text of every error passes through `without_secrets`.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_USER = re.compile(
    r"(?<=://)[^/\s'\"@:]*:[^/\s'\"]*@|(?<=http://)[^/\s'\"]+@|(?<=https://)[^/\s'\"]+@"
)
_QUERY = re.compile(r"((?:https?|live)://[^\s?'\"]{0,1024}\?)[^\s'\"]+?(?=[:,.;)]?(?:[\s'\"]|$))")

_TOKEN = re.compile(r"([?&]token=)[^\s&'\"]+?(?=[:,.;)]?(?:[\s&'\"]|$))")
"""The token of a URL whose path has a space, which ends a URL for `_QUERY`."""


def without_secrets(text: str) -> str:
    """Returns the text without the passwords and signatures of its URLs; in linear time.

    >>> without_secrets("ftp://me:secret@host/run: no checkpoint here")
    'ftp://***@host/run: no checkpoint here'
    >>> without_secrets("https://host/a.safetensors?X-Amz-Signature=1f: the file was truncated")
    'https://host/a.safetensors?***: the file was truncated'
    >>> without_secrets("live://10.0.0.7:4000/policy/12?token=abc: no such version")
    'live://10.0.0.7:4000/policy/12?***: no such version'
    >>> without_secrets("http://host/step 9?token=abc: no such checkpoint")
    'http://host/step 9?token=***: no such checkpoint'
    >>> without_secrets("s3://bucket/a?b=c and abfs://container@account.dfs.core.windows.net/run")
    's3://bucket/a?b=c and abfs://container@account.dfs.core.windows.net/run'
    """
    if "://" not in text:
        return text
    hidden = _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))
    return _TOKEN.sub(rf"\1{HIDDEN}", hidden)


def cause_without_secrets(error: BaseException) -> BaseException | None:
    """Returns the error as a cause to raise from; None if its traceback would show a secret."""
    at: BaseException | None = error
    for _ in range(16):
        if at is None:
            return error
        said = str(at)
        if without_secrets(said) != said:
            return None
        at = at.__cause__ or at.__context__
    return None
