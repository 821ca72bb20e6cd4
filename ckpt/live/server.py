"""The HTTP side of a host server: versions, leases, files, and copies for other hosts.

    GET     /NAME?after=V&wait=S   the newest version, at once if it is newer than V
    POST    /NAME/leases           a lease on a version, with the places of its files
    POST    /NAME/leases/ID        renews it;  DELETE releases it
    GET     /NAME/V/               the files of a version
    GET     /NAME/V/FILE           a range of a file;  HEAD its size
    POST    /NAME/V/FILE           copies the file here from another server
    DELETE  /NAME/V                forgets a version

Every request needs the token.
"""

from __future__ import annotations

import math
from time import monotonic

from ckpt.live.host import COPY, Host, pull
from ckpt.live.http_server import (
    HttpAnswer,
    HttpConnection,
    HttpRequest,
    check_token,
    file_answer,
    json_answer,
)
from ckpt.live.protocol import (
    WAIT_SECONDS,
    RefusedError,
    address_of,
    files_json,
    object_of,
    version_or_newest,
)
from ckpt.stores.addresses import FILE, NAME, version_of

LEASE_HEADER = "ckpt-lease"


class LiveApp:
    """Answers by the state of a host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._table = host.table

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Returns the answer to a request. Raises RefusedError."""
        check_token(request.headers, request.query, self._host.token)
        name, *rest = request.path.removeprefix("/").split("/")
        if not NAME.fullmatch(name):
            raise RefusedError("unknown", f"{request.path:.200}: the path must begin with a name")
        if not rest:
            _only(request, "GET")
            return await self._newest(request, name)
        if rest[0] == "leases":
            return self._leases(request, name, rest[1:])
        version = version_of(rest[0])
        if version is None or len(rest) > 2:
            raise RefusedError("unknown", f"{request.path:.200}: the form is /NAME/VERSION/FILE")
        if len(rest) == 1:
            _only(request, "DELETE")
            self._host.forget(self._table.drop(name, version))
            self._host.changed()
            return json_answer({})
        return await self._file(request, name, version, rest[1])

    def ended(self, connection: HttpConnection) -> None:
        """Takes notice of the end of a connection, whose reader may still have bytes to read."""
        self._host.left(connection)

    async def _newest(self, request: HttpRequest, name: str) -> HttpAnswer:
        after, until = _after(request), monotonic() + _wait(request)
        while True:
            newest, versions = self._table.newest(name)
            left = until - monotonic()
            if left <= 0 or (newest is not None and newest > after):
                break
            await self._host.wait(left)
        found = {"name": name, "newest": newest, "versions": versions}
        return json_answer({**found, **self._place(), "lease_seconds": self._table.lease_seconds})

    def _place(self) -> dict[str, object]:
        return {"server": self._host.server, "unix": self._host.unix}

    def _leases(self, request: HttpRequest, name: str, rest: list[str]) -> HttpAnswer:
        if not rest:
            _only(request, "POST")
            return self._lease(request, name)
        if len(rest) != 1:
            raise RefusedError("unknown", f"{request.path:.200}: the form is /NAME/leases/ID")
        _only(request, "POST", "DELETE")
        if request.method == "DELETE":
            self._host.released(name, rest)
            return json_answer({})
        version = self._table.renew(name, rest[0], monotonic())
        return json_answer({"version": version, "seconds": self._table.lease_seconds})

    def _lease(self, request: HttpRequest, name: str) -> HttpAnswer:
        body = object_of(request.body, "the body")
        if set(body) != {"version"}:
            raise RefusedError("protocol", 'the body of a lease is {"version": number or null}')
        key, lease = self._host.leased(name, version_or_newest("version", body["version"]))
        found = {"lease": key, "version": lease.version, "seconds": lease.seconds}
        return json_answer({**found, **self._place(), "files": files_json(lease.files)})

    async def _file(self, request: HttpRequest, name: str, version: int, file: str) -> HttpAnswer:
        if not file:
            _only(request, "GET")
            sizes = {key: one.size for key, one in self._table.places(name, version).items()}
            return json_answer({"files": sizes, "folders": []})
        if not FILE.fullmatch(file):
            raise RefusedError("unknown", f"{request.path:.200}: no file has such a name")
        _only(request, "GET", "HEAD", "POST")
        if request.method == "POST":
            return await self._pull(request, name, version, file)
        self._table.find(name, version, file)
        request.connection.is_leased = self._is_leased(request, name, version)
        return file_answer(self._host.files[name, version, file], request.headers.get("range"))

    def _is_leased(self, request: HttpRequest, name: str, version: int) -> bool:
        """Renews the lease that a request names; returns whether it is one on this version."""
        lease = request.headers.get(LEASE_HEADER)
        if lease is None:
            return False
        try:
            return self._table.renew(name, lease, monotonic()) == version
        except RefusedError:  # another server has it, or it has ended
            return lease == COPY or not self._table.is_committed(name, version)

    async def _pull(self, request: HttpRequest, name: str, version: int, file: str) -> HttpAnswer:
        body = object_of(request.body, "the body")
        if set(body) != {"from"}:
            raise RefusedError("protocol", 'the body of a copy is {"from": [host, port]}')
        source = address_of("from", body["from"])
        begun: list[int] = []

        def reserve(nbytes: int) -> None:
            self._table.begin_pull(name, version, file, nbytes)
            begun.append(nbytes)

        found = None
        try:
            found = await pull(source, request.path, self._host.token, reserve)
        finally:
            is_here = bool(begun) and self._table.end_pull(
                name, version, file, begun[0], found is not None
            )
            if found is not None and not is_here:
                found.give()
        if not is_here:
            raise RefusedError(
                "gone", f"{name}/{version} was dropped during the copy", version=version
            )
        self._host.files[name, version, file] = found
        return json_answer({"size": found.nbytes})


def _only(request: HttpRequest, *methods: str) -> None:
    if request.method not in methods:
        raise RefusedError(
            "method", f"{request.method} {request.path:.200}: use {' or '.join(methods)}"
        )


def _after(request: HttpRequest) -> int:
    text = request.query.get("after", "")
    found = version_of(text)
    if text and found is None and text != "-1":
        raise RefusedError("protocol", f"after={text:.80}: give a version, or -1 for any")
    return -1 if found is None else found


def _wait(request: HttpRequest) -> float:
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RefusedError("protocol", f"wait={text:.80}: give seconds")
    return min(seconds, WAIT_SECONDS)
