"""The page of `ckpt inspect --html` in a real browser: Chromium, which the machine must have."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from formats.catalog import Catalog, FileRecord, TensorRecord, TensorRef
from formats.dtypes import dtype_named
from sharding.layout import Layout, Mesh, Shard, Split
from tools.main import main
from tools.page import describe, write_page

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright here: make test-peers installs it"
)
MILLISECONDS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if path is None:
        if os.environ.get("CKPT_PEERS_REQUIRED"):
            pytest.fail("no Chromium here: install the package chromium")
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser) -> Iterator[Any]:
    """Opens a file; the test fails if the page reports an error or asks for anything else."""
    told: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(MILLISECONDS)
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def opened(path: Path) -> Any:
        page.goto(path.as_uri())
        return page

    yield opened
    page.close()
    assert told == []
    assert all(url.startswith("file://") for url in asked)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A checkpoint as four ranks would have saved it, and its page."""
    folder = tmp_path_factory.mktemp("page")
    torch.manual_seed(0)
    state = {
        f"model.layers.{at}.{name}": torch.randn(shape)
        for at in range(3)
        for name, shape in (("attn.weight", (64, 32)), ("norm.weight", (32,)))
    }
    ckpt.save(folder / "one", state)
    ckpt.convert(folder / "one", folder / "four", kind="sharded", world_size=4)
    assert main(["inspect", str(folder / "four"), "--html", str(folder / "four.html")]) == 0
    return folder / "four.html"


def item(page: Any, name: str) -> Any:
    return page.get_by_role("treeitem", name=name)


def rows(page: Any, label: str) -> list[list[str]]:
    """The texts of a table."""
    found = page.get_by_role("table", name=label, exact=True).locator("tbody tr")
    return found.evaluate_all(TEXTS)


TEXTS = "all => all.map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"


def test_a_click_on_a_tensor_shows_who_holds_which_piece(open_page, demo):
    page = open_page(demo)
    for name in ("layers", "1", "attn"):
        item(page, f"{name}, ").first.click()
    item(page, "weight, ").first.click()
    assert page.locator("h2").first.inner_text() == "model.layers.1.attn.weight"
    assert [row[0] for row in rows(page, "Pieces")] == [f"rank {rank}" for rank in range(4)]
    assert rows(page, "Pieces")[2][2:] == ["[32:48, 0:32]", "2.05 kB"]
    assert page.locator("figure svg rect").count() == 4


def test_the_tree_is_used_by_the_keyboard_alone(open_page, demo):
    page = open_page(demo)
    page.locator('[role="treeitem"][tabindex="0"]').focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.get_by_role("tab", name="Tensors").get_attribute("aria-selected") == "true"
    selected = page.locator('[role="treeitem"][aria-selected="true"]')
    assert selected.get_attribute("aria-label").startswith("0, ")
    page.keyboard.press("/")
    page.keyboard.type("2.norm")
    assert page.get_by_role("status").inner_text() == "1 found"


def test_the_reshard_view_has_the_plan_of_the_command(open_page, demo, capsys):
    page = open_page(demo)
    page.get_by_role("tab", name="Reshard").click()
    page.get_by_role("spinbutton", name="Ranks of the job").fill("3")
    page.get_by_role("spinbutton", name="Ranks of the job").press("Tab")
    page.get_by_role("spinbutton", name="Show rank").fill("1")
    page.get_by_role("spinbutton", name="Show rank").press("Tab")
    # torch.chunk cuts 64 rows into 22, 22, 20 and 32 elements into 11, 11, 10
    assert [row[1] for row in rows(page, "Ranks of the job")] == ["8.58 kB", "8.58 kB", "7.80 kB"]
    assert [row[0] for row in rows(page, "Sources")] == ["rank 1", "rank 2"]
    capsys.readouterr()
    source = str(demo.with_suffix(""))
    assert main(["plan", source, "--world-size", "3"]) == 0
    assert " 8.58 kB " in capsys.readouterr().out


def test_the_balance_of_ranks_and_the_totals_are_shown(open_page, demo):
    page = open_page(demo)
    assert rows(page, "Bytes by dtype")[0][:4] == ["F32", "6", "6,240", "25.0 kB"]
    page.get_by_role("tab", name="Ranks and files").click()
    assert [row[0] for row in rows(page, "Balance")] == [f"rank {rank}" for rank in range(4)]
    assert len(rows(page, "Files")) == 5


def test_the_first_view_has_the_facts_and_the_modules_by_size(open_page, tmp_path):
    with ckpt.Checkpointer(tmp_path / "run", every_steps=1, signals=()) as run:
        model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 4))
        run.save(1, {"model": model}, {"loss": 2.5})
    (shard,) = (tmp_path / "run" / "step-1").glob("*.safetensors")
    for is_whole in (True, False):
        main(["inspect", str(tmp_path / "run" / "step-1"), "--html", str(tmp_path / "p.html")])
        page = open_page(tmp_path / "p.html")
        assert page.title() == "step-1"
        facts = [one.inner_text().split("\n")[:2] for one in page.locator(".facts div").all()]
        assert facts[:2] == [["step", "1"], ["loss", "2.5"]]
        assert ["parameters", "2.25 K"] in facts
        assert facts[-1] == ["state", "complete" if is_whole else "damaged"]
        shard.unlink(missing_ok=True)
    areas = page.locator(".treemap > g[tabindex='0']")
    assert areas.first.get_attribute("aria-label").startswith("model.0: 8.20 kB")
    within = page.locator(".treemap > g[tabindex='-1']")
    assert within.first.get_attribute("aria-label").startswith("model.0.weight: ")
    areas.first.focus()
    page.keyboard.press("Enter")
    assert page.locator("h2").first.inner_text() == "model.0"
    assert [row[0] for row in rows(page, "Parts")] == ["weight", "bias"]
    page.get_by_role("tab", name="Tensors").focus()
    page.keyboard.press("Home")
    assert page.get_by_role("tab", name="Overview").get_attribute("aria-selected") == "true"


def test_a_title_of_a_table_sorts_it_and_a_last_row_has_the_totals(open_page, demo):
    page = open_page(demo)
    page.get_by_role("tab", name="Ranks and files").click()
    sizes = page.get_by_role("table", name="Files", exact=True)
    for direction in ("descending", "ascending"):
        sizes.get_by_role("button", name="size").click()
        assert sizes.locator("th[aria-sort]").get_attribute("aria-sort") == direction
        found = [int(one) for one in sizes.locator("td span").evaluate_all(VALUES)]
        assert found[:-1] == sorted(found[:-1], reverse=direction == "descending")
        assert found[-1] == sum(found[:-1])


VALUES = "all => all.map((one) => one.dataset.value).filter(Boolean)"


@pytest.mark.parametrize("width", [1400, 390])
def test_no_window_is_too_narrow_and_no_word_is_broken(open_page, demo, tmp_path, width):
    folder = str(demo.with_suffix(""))
    ckpt.save(tmp_path / "other", {"model.layers.0.attn.weight": torch.ones(64, 32)})
    main(["diff", "-q", folder, str(tmp_path / "other"), "--html", str(tmp_path / "d.html")])
    for path in (demo, tmp_path / "d.html"):
        page = open_page(path)
        page.set_viewport_size({"width": width, "height": 844})
        for tab in page.get_by_role("tab").all():
            tab.click()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            narrow = page.locator("th, td").evaluate_all(
                "all => all.filter((one) => one.innerText.length > 3 && one.clientWidth < 24)"
            )
            assert narrow == []


def test_dark_and_light_can_be_chosen_and_are_readable(open_page, demo):
    page = open_page(demo)
    seen = set()
    for _ in range(2):
        page.locator("#theme").click()
        colours = page.evaluate(
            "['color', 'backgroundColor'].map((one) => getComputedStyle(document.body)[one])"
        )
        ink, paper = (_luminance(colour) for colour in colours)
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7  # WCAG AAA
        seen.add(paper > ink)
    assert seen == {True, False}


def _luminance(colour: str) -> float:
    """The relative luminance of `rgb(...)`, by WCAG 2.1."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_hostile_names_are_text(open_page, tmp_path):
    names = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "__proto__"]
    ckpt.save(tmp_path / "a", {name: torch.ones(2) for name in names})
    main(["inspect", str(tmp_path / "a"), "--html", str(tmp_path / "a.html")])
    page = open_page(tmp_path / "a.html")
    page.on("dialog", lambda _: pytest.fail("a name ran as a script"))
    assert page.locator('[role="treeitem"] .name').all_inner_texts() == names
    for at in range(3):
        page.get_by_role("treeitem").nth(at).click()
        assert page.locator("h2").first.inner_text() == names[at]


def test_the_differences_of_two_checkpoints_are_shown(open_page, tmp_path):
    ckpt.save(tmp_path / "a", {"w": torch.zeros(4), "step": 1})
    ckpt.save(tmp_path / "b", {"w": torch.tensor([0, 0.02, 0, 0]), "step": 2})
    main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "d.html")])
    page = open_page(tmp_path / "d.html")
    (changed,) = rows(page, "Changed tensors")
    assert (changed[:2], changed[3:]) == (["w", "0.02"], ["1", "4"])
    assert page.title() == page.locator("h1").inner_text() == "a → b"
    assert page.locator("td svg title").text_content() == "1e-2: 1"
    assert rows(page, "Values") == [["step", "1", "2"]]


def test_2000_tensors_of_1024_ranks_open_and_answer(open_page, tmp_path):
    write_page(str(tmp_path / "big.html"), describe("s3://run/step-100", big(), []))
    page = open_page(tmp_path / "big.html")
    page.get_by_role("searchbox").fill("layers.999.")
    page.get_by_role("treeitem").first.click()
    assert page.locator("figure svg rect").count() == 1024
    page.get_by_role("button", name="Show all 1,024 rows").click()
    assert len(rows(page, "Pieces")) == 1024
    page.get_by_role("tab", name="Ranks and files").click()
    assert "1,024 ranks: least" in page.locator("#panel").inner_text()


def big() -> Catalog:
    """A checkpoint of 2,000 tensors that 1,024 ranks would have saved."""
    flat, hybrid = Mesh.grid(("dp",), (1024,)), Mesh.grid(("replicate", "shard"), (4, 256))
    kind = dtype_named("BF16", "w")
    tensors = {}
    for at in range(1000):
        for name, layout in (
            ("w", Layout((8192, 512), flat, (Shard(0),))),
            ("norm", Layout((8192,), hybrid, (Split(), Shard(0)))),
        ):
            full = f"model.layers.{at}.{name}"
            tensors[full] = TensorRecord(full, layout.shape, kind, [], layout)
    files = tuple(FileRecord(f"{7:016x}-{rank:05d}.safetensors", 9) for rank in range(1024))
    return Catalog("ckpt", tensors, {name: TensorRef(name) for name in tensors}, files)
