"""Builds the documentation site, and fails on a broken link, a missing page or a misspelt word.

    python .ci/site/build.py

The environment is built once, in `.venvs/docs`, from the extra `docs` (see tests/versions.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from versions import ENVIRONMENTS, create  # noqa: E402 - the folder is on the path only now

TEXTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs"]


def main() -> int:
    """Builds the site; returns the first exit code that is not 0."""
    folder = ENVIRONMENTS / "docs"
    pins = (ROOT / "constraints.txt").read_text()
    create(folder, os.environ.get("PYTHON", sys.executable), pins, "docs")
    programs = folder / "bin"
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "NO_MKDOCS_2_WARNING": "1",
    }
    for command in (
        [programs / "codespell", "--ignore-words", ".ci/site/words.txt", *TEXTS],
        [programs / "mkdocs", "build", "--quiet", "-f", ".ci/site/mkdocs.yml"],
    ):
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code:
            return code
    print("docs: site/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
