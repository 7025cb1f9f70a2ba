"""python tools/dist.py OUT: the sdist and, from it alone, the wheel, so a test of the wheel notices
what the sdist lacks. It needs setuptools; nothing is fetched."""

import contextlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(what: str, source: Path, out: Path) -> Path:
    """`build_sdist` or `build_wheel` of PEP 517, in a process of its own."""
    command = [sys.executable, "-c", BUILD, what, str(out)]
    done = subprocess.run(
        command, cwd=source, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{what} of {source} failed: {done.stderr.strip()}")
    return out / done.stdout.strip().splitlines()[-1]


def commit() -> str:
    """Return the commit that is built, with +changes where files differ; empty outside of a
    repository. Numbers that a wheel measures keep it (backbench/records/origin.py)."""
    git = ["git", "-C", str(Path(__file__).resolve().parent.parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        differs = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return ""
    changes = "+changes" if differs.returncode else ""
    return head.stdout.strip() + changes


def main(out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    sdist = build("build_sdist", Path(__file__).resolve().parent.parent, out.resolve())
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        if revision := commit():
            (source / "backbench" / "commit.txt").write_text(revision + "\n")
        return [sdist, build("build_wheel", source, out.resolve())]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        print(*main(Path(*sys.argv[1:2] or ["dist"])), sep="\n")
