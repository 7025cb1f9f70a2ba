"""Says what may be meant by a file of weights that is not there."""

import difflib
from pathlib import Path

from backbench.untrusted import printable
from backbench.weights import archs

# How files of weights are usually called
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar")


def refusal(file: str | Path) -> str:
    """Return the message that refuses a file that is not there: a near name in its folder, or what
    may be given in its place."""
    path = Path(file)
    scheme = path.parts[0] if path.parts else ""
    if scheme in ("http:", "https:"):
        # A Path has one slash of the two
        address = f"{scheme}//{'/'.join(path.parts[1:])}"
        return f"{address}: is an address; download the file and give its path"
    there = []
    if path.parent.is_dir():
        for neighbour in path.parent.iterdir():
            if neighbour.suffix in SUFFIXES:
                there.append(neighbour.name)
    close = difflib.get_close_matches(path.name, there, 1)
    if close:
        meant = printable.shown(str(path.with_name(close[0])))
        return f"{file}: no such file; did you mean {meant}?"
    meant = archs.meant_by(str(file))
    if meant:
        return f"{file}: no such file; did you mean {meant}?"
    return f"{file}: no such file; give the path of a file of weights, or timm:NAME for timm's"
