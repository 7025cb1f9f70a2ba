"""python -m backbench.detection.build_detectron2: build Detectron2 into the environment of this
Python, at the commit that was tested. It needs git, g++ and a few minutes.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from backbench.errors import BadInput
from backbench.runs.ending import guarded

REQUIREMENT = Path(__file__).with_name("detectron2.txt")
# Detectron2's model zoo imports pkg_resources, which setuptools 81 no longer has
BUILD_TOOLS = ("setuptools<81", "wheel", "ninja")


def installer() -> list[str]:
    """Return the words that install packages for this Python: pip's, or uv's where there is no
    pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    if shutil.which("uv") is not None:
        return ["uv", "pip", "install", "--python", sys.executable]
    raise BadInput(
        f"{sys.executable} has no pip, and there is no uv on PATH; "
        f"`{sys.executable} -m ensurepip` installs pip"
    )


def main() -> int:
    """Run both commands; the exit status is that of the first that fails."""
    install = installer()
    for tool in ("git", "g++"):
        if shutil.which(tool) is None:
            raise BadInput(f"building Detectron2 takes {tool}, which is not on PATH")
    for words in (BUILD_TOOLS, ("--no-build-isolation", "-r", str(REQUIREMENT))):
        done = subprocess.run([*install, *words], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
