"""Where and when a number was made: the command, the code, the versions, the hardware."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from backbench.results.result_line import Origin
from backbench.runs.folder import RUN_FILE


def stamp(run: Path) -> Origin:
    """The origin of numbers that this process adds to a run folder now. The command is the one that
    opened the folder."""
    origin: Origin = {
        "recorded": round(time.time(), 3),
        "code": code_revision(),
        "versions": _versions(),
        "hardware": hardware(),
    }
    try:
        opened = json.loads((run / RUN_FILE).read_text())
    except (OSError, ValueError):
        return origin  # no run folder: a test, or somebody's own script
    for key in ("command", "cwd"):
        if key in opened:
            origin[key] = opened[key]
    return origin


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("backbench", "torch", "torchvision"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def code_revision() -> str:
    """The commit of this code, with +changes where files differ from it; the version where there is
    no repository."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        head, changed = [*git, "rev-parse", "HEAD"], [*git, "diff", "--quiet", "HEAD"]
        try:
            commit = subprocess.run(head, capture_output=True, text=True, timeout=20, check=True)
            differs = subprocess.run(changed, capture_output=True, timeout=60, check=False)
            return commit.stdout.strip() + ("+changes" if differs.returncode else "")
        except (OSError, subprocess.SubprocessError):
            pass
    try:
        return f"backbench {importlib.metadata.version('backbench')}"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def hardware() -> str:
    """The GPU when this process uses one, else the CPU's name."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} x {_cpu_name()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name") and ":" in line:
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
