"""The tests beside large libraries of other formats, in an environment that has them.

    python tests/with_peers.py                        tests/peers, optimizers of libraries
    python tests/with_peers.py tests/peers/test_deepspeed.py -x

The environment is built once, in `.venvs/peers`, from the extras `test` and `peers`; PYTHON names
its Python, PIP_ARGS goes to the installer (see tests/versions.py). Exits as pytest does.
"""

from __future__ import annotations

import os
import subprocess
import sys

from versions import ENVIRONMENTS, ROOT, create

FOLDER = ENVIRONMENTS / "peers"
ORACLE = ["tests/oracle/test_oracle.py::test_every_optimizer_of_a_library_goes_on_by_every_way"]


def main() -> int:
    """Build, and run pytest."""
    # DeepSpeed then compiles nothing when it is installed, and takes no device but the processor.
    os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    pins = (ROOT / "constraints.txt").read_text()
    create(FOLDER, os.environ.get("PYTHON", sys.executable), pins, "test,peers")
    program = [str(FOLDER / "bin" / "python"), "-m", "pytest", "-m", "", "-p", "no:cacheprovider"]
    arguments = sys.argv[1:] or ["tests/peers", *ORACLE]
    environment = {**os.environ, "CKPT_PEERS_REQUIRED": "1"}
    return subprocess.run(program + arguments, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
