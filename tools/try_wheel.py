"""python tools/try_wheel.py WHEEL [--python 3.13] [--demo] [REQUIREMENT ...]: install a wheel as a
stranger does and type the first page's commands, beside somebody else's code.

The environment is new, and so is the folder: it has a `pretrain`, `transfer`, `detection`,
`configs`, `tools` and `tests` of its own, which no command of backbench may import. REQUIREMENTs
(torch==2.11.*) are installed with the wheel. It takes uv on PATH, or else this Python's venv.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOREIGN = ("pretrain", "transfer", "detection", "configs", "tools", "tests")
IMAGES = """
import sys
from pathlib import Path
import numpy as np
from PIL import Image

draw = np.random.default_rng(0)
for name, level in (("dark", 60), ("light", 180)):
    folder = Path("mine") / name
    folder.mkdir(parents=True)
    for i in range(20):
        pixels = draw.normal(level, 40, (64, 64, 3)).clip(0, 255).astype("uint8")
        Image.fromarray(pixels).save(folder / f"{i}.png")
"""
GRID = """
data: .
checkpoints: ["timm:resnet18@random"]
evaluate:
  - {verb: linear, protocol: logreg_own, datasets: [mine]}
"""
API = """
import backbench, backbench.detection, backbench.pretrain, backbench.transfer

checkpoint = backbench.load("timm:resnet18@random")
found = backbench.evaluate(checkpoint, ["knn"], data="mine", out="api", workers=0)
print(len(found), "numbers by Python")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", metavar="WHEEL", type=Path)
    parser.add_argument("requirements", metavar="REQUIREMENT", nargs="*")
    parser.add_argument("--python", metavar="X.Y", default=sys.executable)
    parser.add_argument("--demo", action="store_true", help="also run the tiny demo")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="backbench-wheel-") as place:
        python = installed(args.wheel.resolve(), args, Path(place) / "env")
        folder = Path(place) / "work"
        for name in FOREIGN:
            package = folder / name
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(
                f"raise ImportError('another {name} was imported')\n"
            )
        use(python, folder, demo=args.demo)
    return 0


def installed(wheel: Path, args: argparse.Namespace, env: Path) -> Path:
    """Install into a new environment, say how long it took and how large it is."""
    python = env / "bin" / "python"
    uv = shutil.which("uv")
    if uv is None:
        subprocess.run([args.python, "-m", "venv", env], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
    else:
        make = [uv, "venv", "--quiet", "--python", args.python, env]
        subprocess.run(make, check=True)
        install = [uv, "pip", "install", "--quiet", "--python", python]
    start = time.monotonic()
    subprocess.run([*install, wheel, *args.requirements], check=True)
    seconds = time.monotonic() - start
    (packages,) = (env / "lib").glob("python*/site-packages")
    count = len(list(packages.glob("*.dist-info")))
    files = [file for file in packages.rglob("*") if file.is_file()]
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    print(f"{count} packages, {megabytes:.0f} MB, {seconds:.0f} s", flush=True)
    return python


def use(python: Path, folder: Path, *, demo: bool) -> None:
    """Type the commands one after another; the first that fails ends this."""
    trunk = "timm:resnet18@random"
    measured = ["evaluate", trunk, "--data", "mine", "--out", "runs", "--workers", "0"]
    grid = ["launch", "run", "grid.yaml", "--out", "grid", "--cluster", "local"]
    (folder / "grid.yaml").write_text(GRID)
    backbench = python.parent / "backbench"
    commands = [
        [python, "-c", IMAGES],
        [backbench, "--version"],
        [backbench, "doctor"],
        [python, "-m", "backbench", *measured],
        [python, "-c", API],
        [python, "-m", "backbench", *grid],
    ]
    if demo:
        commands.append([backbench, "demo", "--size", "tiny", "--out", "demo"])
    for command in commands:
        start = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False
        )
        shown = " ".join(str(word) for word in command[1:])
        if "\n" in shown:
            shown = shown.strip().splitlines()[-1]
        print(f"{time.monotonic() - start:6.1f} s  {shown}", flush=True)
        if done.returncode:
            raise SystemExit(f"exit status {done.returncode}: {done.stderr.strip()}")
        if "--version" in command:
            print(f"          {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
