"""The program of a run: its command line, source revision, versions and hosts."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence

from sharding.errors import without_secrets

COMMAND_CHARS = 1000
"""Longer command lines are cut: the manifest's first 4 KiB hold this text."""
SHOWN_HOSTS = 16
GIT_SECONDS = 5.0


def provenance(hosts: Sequence[str]) -> str:
    """Returns JSON for a manifest: command, git revision, Python, torch and the hosts of the ranks.

    `hosts` has one name for each rank. A directory without git has no revision.
    """
    import torch

    names = list(dict.fromkeys(hosts))
    found = {
        "command": without_secrets(" ".join(sys.orig_argv))[:COMMAND_CHARS],
        "git": git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hosts": names[:SHOWN_HOSTS],
        "host_count": len(names),
    }
    return json.dumps({key: value for key, value in found.items() if value})


def host_name() -> str:
    """Returns the name of this host."""
    return socket.gethostname()


def machine() -> str:
    """Returns a text that identifies this machine since its last start; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def git_revision(folder: str | None = None) -> str:
    """Returns the commit of a folder, with `+` if files differ from it; empty without git."""
    here = folder or os.getcwd()
    head = _git(here, "rev-parse", "HEAD")
    if not head:
        return ""
    return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            # a look must not hold the lock of the user's index
            ["git", "--no-optional-locks", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
