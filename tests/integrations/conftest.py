"""`make test` imports no library of trainers: they take five seconds, and have no quick test."""

from __future__ import annotations

from pathlib import Path

import pytest

FILES = frozenset({"test_accelerate.py", "test_lightning.py", "test_peft.py"})
"""All tests of these files have the mark `thorough`."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without a test of this run."""
    is_quick = "not thorough" in config.option.markexpr
    return True if is_quick and collection_path.name in FILES else None
