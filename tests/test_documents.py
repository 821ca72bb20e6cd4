"""Links between the documents resolve, and the tests that they name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert list(broken_links(document)) == []


def test_the_site_has_a_place_for_every_page_and_no_other() -> None:
    """Hooks add the decisions and the reference."""
    text = (ROOT / ".ci" / "site" / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- ([\w./-]+\.md)$", text, re.MULTILINE)
    listed = [name for name in listed if not name.startswith("reference/")]
    folders = (ROOT / "docs", ROOT / "docs" / "howto")
    pages = [path for path in DOCUMENTS if path.parent in folders]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in pages)


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


def test_the_journeys_of_the_architecture_name_files_of_the_product() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    journeys = text[text.index("## Five journeys") : text.index("## Five rules")]
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py")}
    named = set(re.findall(r"[\w/]+\.py", journeys))
    assert [
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ] == []
