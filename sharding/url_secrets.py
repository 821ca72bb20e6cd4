"""Text as it may be shown: URLs in it without what opens them.

Credentials belong into `storage_options`, which are never shown. But a URL may hold some: a
password before its host, or, by http, the signature of a presigned one. It is part of what people
are told and programs log, so that every error of ours goes through `without_secrets`.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_USER = re.compile(
    r"(?<=://)[^/\s'\"@:]*:[^/\s'\"]*@|(?<=http://)[^/\s'\"]+@|(?<=https://)[^/\s'\"]+@"
)
_QUERY = re.compile(r"(https?://[^\s?'\"]{0,1024}\?)[^\s'\"]+?(?=[:,.;)]?(?:[\s'\"]|$))")


def without_secrets(text: str) -> str:
    """The text without the passwords and signatures of its URLs; in linear time.

    >>> without_secrets("ftp://me:secret@host/run: no checkpoint here")
    'ftp://***@host/run: no checkpoint here'
    >>> without_secrets("https://host/a.safetensors?X-Amz-Signature=1f: the file was truncated")
    'https://host/a.safetensors?***: the file was truncated'
    >>> without_secrets("s3://bucket/a?b=c and abfs://container@account.dfs.core.windows.net/run")
    's3://bucket/a?b=c and abfs://container@account.dfs.core.windows.net/run'
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def cause_without_secrets(error: BaseException) -> BaseException | None:
    """The error, to be raised from; None where a traceback of it would show too much."""
    at: BaseException | None = error
    for _ in range(16):
        if at is None:
            return error
        said = str(at)
        if without_secrets(said) != said:
            return None
        at = at.__cause__ or at.__context__
    return None
