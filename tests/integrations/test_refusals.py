"""Integrations without their library, and what they refuse."""

from __future__ import annotations

import importlib
import sys

import pytest

from ckpt.integrations import needs


@pytest.mark.parametrize("package", ["accelerate", "lightning", "peft", "transformers"])
def test_a_library_that_is_not_installed_is_told_with_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"ckpt.integrations.{package}", raising=False)

    class Finder:
        """Finds nothing of the package."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        importlib.import_module(f"ckpt.integrations.{package}")


def test_another_module_that_is_missing_is_not_blamed_on_the_library() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^other$"), needs("library"):
        raise ModuleNotFoundError("other", name="other")
