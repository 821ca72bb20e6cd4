"""Prints the map of the product: each folder and file with the first line of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("sharding", "formats", "ckpt", "tools")


def first_line(path: Path) -> str:
    """Returns the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n", 1)[0]


def main() -> None:
    """Prints a line for each folder, and one for each file in it."""
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            folder = init.parent
            print(f"\n{folder.relative_to(ROOT)}/  {first_line(init)}")
            for path in sorted(folder.glob("*.py")):
                if path != init:
                    print(f"    {path.stem:24} {first_line(path)}")


if __name__ == "__main__":
    main()
