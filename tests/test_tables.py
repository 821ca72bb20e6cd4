"""Each row of the tables of formats and conversions has the tests that prove it (tables.toml).

A row without a test, or a test without a row, fails.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mapping.test_known import CASES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
ROWS: dict[str, dict[str, list[str]]] = tomllib.loads((TESTS / "tables.toml").read_text("utf-8"))

FAMILIES = {
    "DeepSeek-V2": "deepseek-v2",
    "DeepSeek-V3, Kimi K2": "deepseek",
    "Gemma 3": "gemma-3",
    "GLM-4.5": "glm-4.5",
    "GPT-2": "gpt2",
    "gpt-oss": "gpt-oss",
    "Llama 3": "llama",
    "Llama 4": "llama-4",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Nemotron-H": "nemotron-h",
    "OLMoE": "olmoe",
    "Qwen 2": "qwen2",
    "Qwen 3": "qwen3",
    "Qwen3-MoE": "qwen3-moe",
}
"""The model of the tests by the family of the table of proofs."""


def cells(page: str, heading: str) -> Iterator[list[str]]:
    """Yields the cells of each row of the tables below a heading, without the tables' heads."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    lines = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line.startswith("| ") and above.startswith("|"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("table", ROWS)
def test_each_row_of_a_table_has_its_tests(table: str) -> None:
    page, heading = table.split(": ")
    tests = ROWS[table]
    # Of two beginnings that fit, the longer one is that of the row.
    starts = {
        row: max((one for one in tests if row.startswith(one)), key=len, default=None)
        for row, *_ in cells(page, heading)
    }
    assert [row for row, start in starts.items() if start is None] == [], "rows without a test"
    assert {*tests} == {*starts.values()}, "tests without a row"
    for test in [one for several in tests.values() for one in several]:
        path, _, rest = test.partition("::")
        name, _, case = rest.removesuffix("]").partition("[")
        source = (TESTS / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, test
        assert case in source, test


def literal(path: str, name: str) -> Any:
    """Returns the keys or items of a constant of a test file, which is not imported."""
    for node in ast.parse((TESTS / path).read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            value = node.value  # type: ignore[attr-defined]
            items = value.keys if isinstance(value, ast.Dict) else value.elts
            return [ast.literal_eval(item) for item in items]
    raise AssertionError(f"{path} has no {name}")


def test_each_class_of_the_table_of_families_is_filled_by_a_test() -> None:
    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    listed = [
        name
        for _, names in cells("converting.md", "Families in memory")
        for name in names.split(", ")
    ]
    named = {plain((re.findall(r"\((\w+)\)", name) or [name])[0]) for name in listed}
    classes = literal("peers/test_transformers_names.py", "FAMILIES")
    assert named == {
        plain(re.sub(r"(For\w+|LMHeadModel|MTModel|Model)$", "", one)) for one in classes
    }


def test_each_letter_of_the_table_of_proofs_is_a_case_of_its_test() -> None:
    megatron = literal("peers/test_megatron_mappings.py", "MODELS")
    no_dist = literal("peers/test_megatron_mappings.py", "NO_DIST")
    further = literal("peers/test_megatron_mappings.py", "FURTHER")
    assert {*megatron} <= {*FAMILIES.values()}
    titan = {model for model, mapping in CASES if mapping.endswith("torchtitan")}
    computed = literal("peers/test_torchtitan_mappings.py", "MODELS")
    adapted = literal("mapping/test_known.py", "ADAPTED")
    expected = {}
    for family, model in FAMILIES.items():
        ours = "L B R" + " D" * (model not in no_dist) + " M" * (model in further)
        theirs = (
            ["L"] * (model in computed) + ["B R"] * (model in titan) + ["A"] * (model in adapted)
        )
        expected[family] = [ours if model in megatron else "", " ".join(theirs)]
    rows = {family: [*proofs] for family, *proofs in cells("converting.md", "Proofs")}
    reasons = {family: proofs for family, proofs in rows.items() if "none" in proofs[0]}
    assert {family: proofs for family, proofs in rows.items() if family not in reasons} == expected
