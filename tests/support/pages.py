"""The command lines of the README and the docs."""

import re
import shlex
from pathlib import Path

HOME = Path(__file__).parents[2]
# From the start on: what a page makes, those behind it go on with
START = (HOME / "README.md", HOME / "docs" / "index.md")
PAGES = [
    *START,
    *(page for page in sorted((HOME / "docs").glob("*.md")) if page not in START),
]
PROGRAMS = (
    "backbench ",
    "python detection/train_net.py",
    "python tools/convert_to_d2.py",
)
# What stands for anything in a usage line -> something that is there
PLACES = {
    "X": "x.safetensors",
    "FILE": "foreign.pth",
    "NAME": "imagenet",
    "/datasets": "ROOT",
    "F": "out.pth",
    "OUT.pkl": "out.pkl",
    "N": "3",
    "R": "0",
    "KEY": "SEED",
    "VALUE": "7",
}


def commands():
    """(a short name, line) of each; the lines that a backslash continues in one."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE
        ):
            if language:  # no commands, but Python, YAML or what a command prints
                continue
            for line in block.replace("\\\n", " ").splitlines():
                if (
                    line.strip().startswith(PROGRAMS)
                    and "..." not in line.split("#")[0][:20]
                ):
                    found.append((f"{page.name}: {line.strip()[:60]}", line.strip()))
    return found


def words_of(line, *, optional=True):
    """A line's arguments, placeholders filled in, with or without what is optional."""
    line = line.partition("   the same as")[0]
    # Without what may be repeated; what may be left out is there; of several the first
    line = re.sub(r"\[[A-Z]+ \.\.\.\]", "", line)
    brackets = re.sub(r"(?<![=\w])\[([^\[\]=]*)\]", r"\1" if optional else "", line)
    words = [PLACES.get(word, word) for word in shlex.split(brackets, comments=True)]
    words = [word.split("|")[0] for word in words if word != "..."]
    if words[1:2] == ["detection/train_net.py"]:
        return ["detect", *words[2:]]
    if words[1:2] == ["tools/convert_to_d2.py"]:
        return ["export", words[2], "--format", "detectron2", "--out", words[3]]
    # The names that the papers' encoders have are each file's own
    for option in ("--encoder", "--stem"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    return words[1:]
