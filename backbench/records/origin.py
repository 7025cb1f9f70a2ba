"""Where a number is made: the code, the versions and the hardware of this process."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, backbench, torch and torchvision."""
    out = {"python": platform.python_version()}
    for package in ("backbench", "torch", "torchvision"):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


@functools.cache
def code_revision() -> str:
    """Return the commit of this code, with +changes where files differ; else the version. A wheel
    has the commit that it was built of (tools/dist.py)."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        try:
            head = subprocess.run(
                [*git, "rev-parse", "HEAD"],
                capture_output=True,
                text=True,
                timeout=20,
                check=True,
            )
            differs = subprocess.run(
                [*git, "diff", "--quiet", "HEAD"],
                capture_output=True,
                timeout=60,
                check=False,
            )
            commit = head.stdout.strip()
            return f"{commit}+changes" if differs.returncode else commit
        except (OSError, subprocess.SubprocessError):
            pass  # git is not installed, or the folder is no repository: the version serves
    with contextlib.suppress(OSError):
        built = (root / "backbench" / "commit.txt").read_text().strip()
        if re.fullmatch(r"[0-9a-f]{40}(\+changes)?", built):
            return built
    try:
        return f"backbench {importlib.metadata.version('backbench')}"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def hardware() -> str:
    """Return the GPU when this process uses one, else the CPU's name."""
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
