"""Copies of the files of other hosts, which the server of this host pulls."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence

from ckpt.errors import StoreError
from ckpt.live.hosts import Hosts
from ckpt.live.protocol import Address
from formats.threads import Pool

PULLS = 4
"""Files that a server pulls at once."""
PULL_SECONDS = 600.0
"""The longest pull of one file."""


def copied_from(hosts: Hosts, version: int, files: Sequence[tuple[str, Address]]) -> None:
    """Returns once the server of this host has each of the files, from the server beside it.

    Raises StoreError if a server cannot be reached, or has no such file.
    """

    def pull(wanted: tuple[str, Address]) -> None:
        file, source = wanted
        host, port = hosts.addresses[hosts.here]
        where = f"live://{host}:{port}/{hosts.name}/{version}/{file}"
        connection = http.client.HTTPConnection(host, port, timeout=PULL_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {hosts.token}", "Content-Type": "application/json"}
            path = f"/{hosts.name}/{version}/{file}"
            connection.request("POST", path, json.dumps({"from": source}), headers)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise StoreError(f"{where}: no copy from {source[0]}:{source[1]}: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            text = said[:500].decode(errors="replace")
            raise StoreError(f"{where}: no copy from {source[0]}:{source[1]}: {text}")

    if files:
        with Pool(min(PULLS, len(files))) as pool:
            list(pool.map(pull, files))
