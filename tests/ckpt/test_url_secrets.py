"""Passwords and signatures in URLs are in nothing that people are told or programs log."""

import itertools
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import BackgroundError, FallbackWarning
from ckpt.stores.retries import ErrorClass, RetryPolicy
from ckpt.stores.store import open_store
from sharding.errors import without_secrets
from tests.stores.child import HOST, free_ports
from tools.main import main

STATE = {"w": torch.ones(3)}
SECRET = "PASSW0RD"
CALLS: dict[str, Callable[[str], Any]] = {
    "save": lambda url: ckpt.save(url, STATE),
    "load": lambda url: ckpt.load(url, dict(STATE)),
    "load or an older one": lambda url: ckpt.load(url, dict(STATE), fallback=True),
    "verify": ckpt.verify,
    "latest": ckpt.latest,
    "delete": ckpt.delete,
    "gc": ckpt.gc,
    "save with a base elsewhere": lambda url: ckpt.save(url, STATE, base=f"{url}/else/where"),
}


@pytest.fixture
def urls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URLs with secrets of servers that nobody runs."""
    monkeypatch.setenv("CKPT_STORE_DEADLINE", "0")
    (port,) = free_ports(1)
    return [
        f"http://me:{SECRET}@{HOST}:{port}/run",
        f"http://{SECRET}@{HOST}:{port}/run",
        f"http://{HOST}:{port}/a.safetensors?X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"http://{HOST}:{port}/a step?token={SECRET}",
        f"ftp://me:{SECRET}@{HOST}:{port}/run",
        f"nothing://me:{SECRET}@{HOST}/run",
    ]


@pytest.mark.parametrize("call", CALLS)
def test_an_error_names_the_place_without_its_secret(call: str, urls: list[str]) -> None:
    for url in urls:
        with pytest.raises((OSError, ValueError)) as caught:
            CALLS[call](url)
        error = caught.value
        said = "".join(traceback.format_exception(type(error), error, None))
        assert HOST in str(error)
        assert SECRET not in f"{error} {error!r} {said}"


def test_a_handle_and_the_errors_of_a_background_save_show_none(urls: list[str]) -> None:
    handle = ckpt.save(urls[0], STATE, blocking=False, overwrite=True)
    assert SECRET not in f"{handle} {handle!r}"
    with pytest.raises(BackgroundError) as caught:
        ckpt.save(urls[0], STATE)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_warnings_logs_and_the_command_show_none(
    urls: list[str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(urls[0])

    assert SECRET not in str(FallbackWarning(urls[0], []))
    with open_store(urls[0]) as store:
        assert SECRET not in str(store)
    ticks = itertools.count(0.0, 20.0)
    policy = RetryPolicy(60, clock=ticks.__next__, sleep=lambda _: None)
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match=SECRET):
        policy.run(fail, lambda _: ErrorClass.PASSING, f"{urls[0]}: reading")
    assert "reading" in caplog.text
    assert SECRET not in caplog.text
    assert main(["verify", urls[0]]) == 5
    assert SECRET not in "".join(capsys.readouterr())


def test_what_only_looks_like_a_secret_is_shown() -> None:
    for text in (
        "s3://bucket/a?b=c: no checkpoint here",
        "abfs://container@account.dfs.core.windows.net/run: no checkpoint here",
        "https://host:8000/a@b/c: no checkpoint here",
        "model.layers.0.w: of a@b and c:d",
    ):
        assert without_secrets(text) == text


def test_a_long_text_is_looked_through_in_linear_time() -> None:
    for text in ("http://" * 30_000, "http://?" + ":" * 200_000, "x://" + "a:" * 100_000):
        assert without_secrets(text)
