"""Writes of small files on a condition: that there is none, or that it is as it was last seen.

Rules:

1. A server may have carried out a request whose response was lost: before another try the store
   looks at the result (`_send`).
2. The store trusts only guarantees that a server has shown. The first commit of a process tests the
   server (`_put_absent`), and the result holds for all folders of that server.
3. A request that was given up may be carried out much later. A store that has read a file replaces
   and deletes it on condition of this state (its ETag), so that a late request finds another state
   and does nothing.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ckpt.errors import ExistsError, ReplacedError, StoreError
from ckpt.stores.driver import MultipartDriver, StoreCapabilities, StreamDriver
from ckpt.stores.retries import ErrorClass, UnsupportedRequestError
from sharding.errors import without_secrets

T = TypeVar("T")

_log = logging.getLogger("ckpt.stores")

NO_LIMIT = sys.maxsize
REPLACING = 10
"""The most tries to replace a file that other programs replace, too."""

_bare_tags: set[str] = set()
"""The servers whose conditions have tags without quotation marks."""
_without_tags: set[str] = set()
"""The servers that have refused conditions for the tags of files."""
_honours: dict[str, bool] = {}
"""Whether a server honours conditions, by its address, as commits of this process have shown."""


def honours_conditions(server: str) -> bool | None:
    """Returns whether a server honours conditions, as commits of this process have shown."""
    return _honours.get(server)


class ConditionalWrites:
    """The part of an object store that writes on conditions, as far as its server has them."""

    url: str
    exists: Callable[[str], bool]
    read_whole: Callable[[str, int], bytes]
    _driver: MultipartDriver | StreamDriver
    _tags: dict[str, str | None]
    """The tags of files as this store has last read or written them; None of absent ones."""
    _try: Callable[..., Any]
    _path: Callable[[str], str]

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """The guarantees of this store, as far as they are known."""

    def _check_absent(self, name: str) -> None:
        if self.exists(name):
            raise ExistsError(f"{self.url}/{name} exists already")

    def _put_new(
        self, name: str, data: memoryview, check: Callable[[], object] | None = None
    ) -> None:
        """Writes a new file. Raises ExistsError if the file exists."""
        if self.capabilities.put_if_absent is not True:
            self._check_absent(name)
        self._put_absent(name, data, check)

    def _send(
        self,
        name: str,
        data: memoryview,
        request: Callable[[str, memoryview], str],
        check: Callable[[], object] | None,
    ) -> None:
        """Writes a file in one request, until it is answered (rule 1).

        Before a further try the file may have the bytes already: then the answer was lost. If it
        has not, others may have changed what `check` looks at.
        """
        path, tries = self._path(name), 0

        def send() -> Exception | None:
            nonlocal tries
            tries += 1
            if tries > 1 and self._has(name, data):
                return None
            try:
                if check is not None:
                    check()
            except Exception as error:  # not one of this request: no further try helps
                return error
            self._tags[name] = request(path, data)
            return None

        try:
            refusal = self._try("writing", name, send)
        except ExistsError:
            if tries == 1 or not self._try("reading", name, lambda: self._has(name, data)):
                raise
        else:
            if refusal is not None:
                raise refusal

    def _has(self, name: str, data: memoryview) -> bool:
        try:
            found, tag = self._driver.get(self._path(name), len(data))
        except Exception as error:
            if self._driver.error_class(error) is ErrorClass.MISSING:
                return False
            raise
        if found != bytes(data):
            return False
        self._tags[name] = tag
        return True

    def _put_absent(self, name: str, data: memoryview, check: Callable[[], object] | None) -> None:
        """Writes a new file on condition, and learns whether the server honours it (rule 2)."""
        path = self._path(name)
        try:
            self._send(name, data, self._driver.put_if_absent, check)
        except ExistsError:
            self._learn(True)
            raise
        except UnsupportedRequestError:
            self._learn(False)
            self._send(name, data, self._driver.put, check)
        else:
            if self.capabilities.put_if_absent is None:
                try:
                    self._try("writing again", name, lambda: self._driver.put_if_absent(path, data))
                except ExistsError:
                    self._learn(True)
                except StoreError:
                    # The first try has committed. Whether the server honours conditions stays
                    # unknown: the next commit tests it again.
                    pass
                else:
                    self._learn(False)

    def _replace(self, name: str, data: memoryview, check: Callable[[], object] | None) -> None:
        """Writes a file over the state that this store has seen (rule 3).

        Raises ReplacedError if another program has replaced or deleted it. Without a `check` a
        later state is replaced in turn, unless it may have replaced the result of the first try.
        """
        driver = self._driver
        for _ in range(REPLACING):
            tag, tries = self._tag(name), 0

            def put(path: str, data: memoryview, tag: str | None = tag) -> str:
                nonlocal tries
                tries += 1
                if tag is None:
                    return driver.put_if_absent(path, data)
                return driver.put(path, data, tag)

            try:
                self._send(name, data, put, check)
                return
            except (ExistsError, FileNotFoundError):
                with suppress(FileNotFoundError):
                    if self.read_whole(name, NO_LIMIT) == data:
                        return
                if tag and self._tag(name) == tag:
                    self._learn_tags(tag)
                elif tries > 1 or check is not None:
                    break
            except UnsupportedRequestError:
                self._learn_tags("")
        raise ReplacedError(
            f"{self.url}/{name}: another program replaced or deleted it while it was written: if "
            "it saves here too, let one of them save elsewhere"
        )

    def _tag(self, name: str) -> str | None:
        """Returns the tag of a file's last seen state; "" if it is unknown, None if absent."""
        tag, server = self._tags.get(name, ""), self._driver.server()
        if server in _without_tags:
            return ""
        return tag.strip('"') if tag and server in _bare_tags else tag

    def _learn_tags(self, tag: str) -> None:
        """Remembers that this server refuses a condition with the tag that it tells.

        Ceph's gateway compares the tag in a condition without its quotation marks.
        """
        server = self._driver.server()
        if tag.startswith('"'):
            _bare_tags.add(server)
            return
        _without_tags.add(server)
        _log.warning(
            "%s: the server refuses conditional requests for files that exist: a request that "
            "arrives late may replace or delete a later checkpoint",
            without_secrets(self.url),
        )

    def _learn(self, honours: bool) -> None:
        """Remembers whether this server honours conditions."""
        server = self._driver.server()
        if self._driver.capabilities.put_if_absent is None and server not in _honours:
            _honours[server] = honours
            if not honours:
                # A Python warning may be an exception, but the commit has succeeded.
                _log.warning(
                    "%s: this server ignores the condition that a file does not exist yet: if two "
                    "jobs save to one place at the same instant, both may report success",
                    self,
                )
