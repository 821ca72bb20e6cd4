"""The page as one HTML file: the data and the scripts stand in it, and nothing else may run.

Rules:

1. Names come from files of unknown origin. They stand in a JSON block without the character `<`,
   and the script puts them into the page as text.
2. The content security policy allows the page's own scripts and style by their hashes, and no
   network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from ckpt.display import printable
from ckpt.errors import ArgumentError, ExistsError
from ckpt.stores.local_store import LocalStore

BEGINNING = b"<!doctype html>"


def check_may_write(path: str) -> None:
    """Raises ArgumentError for a folder, ExistsError for another file than a page or an empty one.

    A mistake in the order of arguments would otherwise replace a checkpoint.
    """
    if not os.path.basename(path) or os.path.isdir(path):
        raise ArgumentError(f"--html {path!r}: this is no file; give the file of the page")
    if os.path.lexists(path) and not _is_page_or_empty(path):
        raise ExistsError(
            f"{path} is no page, and was not overwritten; give --html another file, or remove it"
        )


def _is_page_or_empty(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(BEGINNING)) in (b"", BEGINNING)


def write_page(path: str, data: Mapping[str, Any]) -> None:
    """Writes the page to a file of the local disk; an older page is replaced once this is whole.

    Raises as `check_may_write` does, and OSError if the file cannot be written.
    """
    check_may_write(path)
    folder, name = os.path.split(path)
    with LocalStore(folder or ".") as store:
        store.commit(name, page(data).encode(), replace=True)


def page(data: Mapping[str, Any]) -> str:
    """Returns the HTML of a page of `tools.page.described.described`'s data."""
    style, layout, script = (_asset(name) for name in ("page.css", "layout.js", "page.js"))
    scripts = " ".join(_hash(text) for text in (layout, script))
    policy = f"default-src 'none'; script-src {scripts}; style-src {_hash(style)}"
    parts = {
        "@POLICY@": policy,
        "@TITLE@": escape(printable(data["name"])),
        "@STYLE@": style,
        "@LAYOUT@": layout,
        "@SCRIPT@": script,
        "@DATA@": _json(data),
    }
    text = _asset("page.html")
    head, *rest = text.split("@")
    found = [head]
    for part in rest:
        found.append(parts.get(f"@{part}@", part))
    return "".join(found)


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _json(data: Mapping[str, Any]) -> str:
    r"""Returns JSON that cannot end the block that it stands in.

    >>> _json({"</script>": 1})
    '{"\\u003c/script>":1}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
