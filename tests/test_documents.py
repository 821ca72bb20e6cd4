"""Links between the documents resolve, and the tests that they name exist."""

import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from tools.exit_codes import code_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "docs/decisions", "docs/howto", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
)
FENCED = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")


def text_of(document: Path) -> str:
    return FENCED.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", text_of(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> Iterator[str]:
    for link in LINK.findall(text_of(document)):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.thorough
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert list(broken_links(document)) == []


def test_the_site_has_a_place_for_every_page_and_no_other() -> None:
    """Hooks add the first page (README), the decisions and the reference."""
    text = (ROOT / ".ci" / "site" / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- ([\w./-]+\.md)$", text, re.MULTILINE)
    listed = [name for name in listed if name != "index.md" and not name.startswith("reference/")]
    folders = (ROOT / "docs", ROOT / "docs" / "howto")
    pages = [path for path in DOCUMENTS if path.parent in folders]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in pages)


def test_the_pages_for_users_are_short_together() -> None:
    """Seldom rules and the evidence have sections of their own, which the search ranks last."""
    text = (ROOT / ".ci" / "site" / "mkdocs.yml").read_text()
    for_users = text[text.index("\nnav:") : text.index("  - In depth:")]
    pages = re.findall(r"- ((?:howto/)?[\w-]+\.md)$", for_users, re.MULTILINE)
    sizes = {name: (ROOT / "docs" / name).stat().st_size for name in pages if name != "index.md"}
    assert sum(sizes.values()) <= 120_000 - (ROOT / "README.md").stat().st_size, sizes


def test_every_test_that_a_document_names_exists() -> None:
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    code = "\n".join(sources.values())
    for document in DOCUMENTS:
        text = document.read_text()
        for name in re.findall(r"`(test_\w+?)(?:_?\.\.\.)?`", text):
            assert re.search(rf"def {name}\w*\(", code), (document.name, name)
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert ROOT / path in sources, (document.name, path)


def test_the_rooms_of_the_architecture_are_the_folders_of_the_product() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    named = {name.strip() for row in rows for name in row.split(",")} - {"room"}
    folders = {
        str(path.parent.relative_to(ROOT))
        for package in ("ckpt", "formats", "sharding", "tools")
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert named == folders


def test_the_top_level_has_nothing_but_the_packages_and_their_companions() -> None:
    told = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if told.returncode:
        pytest.skip("no checkout of git here")
    folders = {path.partition("/")[0] for path in told.stdout.splitlines() if "/" in path}
    assert folders == {
        *("ckpt", "sharding", "formats", "tools", "tests"),
        *("docs", "examples", "benchmarks", ".ci", ".github"),
    }


def test_the_journeys_of_the_architecture_name_files_of_the_product() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    journeys = text[text.index("## Five journeys") : text.index("## Five rules")]
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py")}
    named = set(re.findall(r"[\w/]+\.py", journeys))
    assert [
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ] == []


def test_the_table_of_errors_is_that_of_the_code() -> None:
    """Each error once, with its built-in bases, its kind and the exit code of the command."""
    text = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+Error)` \| (.*?) \| `(\w+)` \| (\d+) \|", text, re.MULTILINE)
    expected = set()
    for name in ckpt.__all__:
        error = getattr(ckpt, name)
        if inspect.isclass(error) and issubclass(error, ckpt.CkptError):
            own = [base for base in error.__mro__ if base.__module__ == "builtins"]
            own = own[: own.index(Exception)]
            closest = [base for base in own if not any(base in o.__mro__[1:] for o in own)]
            bases = ", ".join(f"`{base.__name__}`" for base in closest) or "–"
            code = int(code_of(error.__new__(error)))
            expected.add((name, bases, error.kind, str(code)))
    assert set(rows) == expected
    assert len(rows) == len(expected)


def test_the_table_of_warnings_has_each_one() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    table = text[text.index("## Warnings") :]
    warnings = [name for name in ckpt.__all__ if name.endswith("Warning")]
    assert [name for name in warnings if f"`{name}`" not in table] == []


def test_pages_quote_the_figures_of_the_tables_of_benchmarks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pages = importlib.import_module("pages")
    assert pages.differences() == [], "python benchmarks/pages.py writes them anew"


def test_the_stages_that_a_benchmark_measures_are_functions_of_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    stages = importlib.import_module("stages")
    for functions in (*stages.SAVE.values(), *stages.LOAD.values()):
        for function in functions:
            owner, name = stages._found(function)
            assert callable(getattr(owner, name))
