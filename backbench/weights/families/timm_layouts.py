"""The names that publishers of vision transformers and ConvNeXts give their tensors.

A layout, in timm_layouts.toml, is a table from timm's names to those of a file, a line each:

    @attn.qkv.*    @attention.{q,k,v}_proj.*

`@` stands for what precedes the names within a block (`blocks.#.`, `layer.#.`), `#` for a number,
`?` for one digit or letter, `*` for a word. In the second column `a|b` is the first of these that
the file has, `{q,k,v}` three tensors one below the other, `x[0:1/3]` the first third of one. A third
column says how the file's shape differs (`SHAPES`).
"""

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from backbench.weights.family import Shape

# timm's shape -> the file's
SHAPES: dict[str, Callable[[Shape], Shape]] = {
    "same": lambda shape: shape,
    "no_batch": lambda shape: shape[1:],  # (1, n, D) -> (n, D)
    "vector": lambda shape: shape[-1:],  # (1, 1, D) -> (D,)
    "linear": lambda shape: shape[
        :2
    ],  # a 1 x 1 convolution: (out, in, 1, 1) -> (out, in)
    "last_two_one": lambda shape: (*shape, 1, 1),  # (C,) -> (C, 1, 1)
    "per_channel": lambda shape: (1, 1, 1, *shape),  # (C,) -> (1, 1, 1, C)
}
_WILDCARDS = {"#": r"(\d+)", "?": r"([\dqv])", "*": r"(\w+)"}


@dataclass(frozen=True)
class Rule:
    """One line of a layout: a regex of timm's names, and templates of the file's."""

    ours: str
    theirs: tuple[str, ...]
    shape: str = "same"


@dataclass(frozen=True)
class Piece:
    """Parts `start` to `stop` of `parts` equal ones of a file's tensor, for one of timm's."""

    key: str
    shape: Shape  # of the file's tensor
    start: int = 0
    stop: int = 1
    parts: int = 1

    def taken(self, tensor: Tensor) -> Tensor:
        if self.parts == 1:
            return tensor
        rows = tensor.shape[0] // self.parts
        return tensor[self.start * rows : self.stop * rows]


@dataclass(frozen=True)
class Layout:
    """One project's names. `blocks` is what stands before a block's number, `outside` tensors of no
    block: half of them must be there, or it is a text tower or a decoder."""

    name: str
    blocks: str
    outside: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    # DINOv2's and DINOv3's large models: blocks.CHUNK.NUMBER, where the number counts through
    chunked: bool = False

    def local(self, name: str) -> str:
        """A name of the file without the number of its chunk."""
        if not self.chunked:
            return name
        return re.sub(rf"^{self.blocks}\.\d+\.(\d+\.)", rf"{self.blocks}.\1", name)


def _layout(
    name: str, blocks: str, outside: list[str], names: str = "", chunked: bool = False
) -> Layout:
    """A layout from its row of the file."""
    parsed = []
    for line in names.splitlines():
        ours, theirs, *shape = line.split()
        ours, theirs = (
            ours.replace("@", "blocks.#."),
            theirs.replace("@", f"{blocks}.#."),
        )
        regex = "".join(_WILDCARDS.get(letter, re.escape(letter)) for letter in ours)
        parsed.append(Rule(regex, _templates(theirs), *shape))
    return Layout(name, re.escape(blocks), tuple(outside), tuple(parsed), chunked)


def _templates(theirs: str) -> tuple[str, ...]:
    """'a.#.b|c.#.b' -> (r'a.\1.b', r'c.\1.b')"""
    out = []
    for alternative in theirs.split("|"):
        first, *others = re.split(r"[#?*]", alternative)
        out.append(
            first + "".join(f"\\{i}{other}" for i, other in enumerate(others, 1))
        )
    return tuple(out)


@functools.cache
def layouts() -> tuple[Layout, ...]:
    """The layouts of timm_layouts.toml."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return tuple(_layout(name, **row) for name, row in rows.items())


# --- a layout's names of one model ---


def pieces(
    layout: Layout, tensors: Mapping[str, Tensor], there: Mapping[str, object]
) -> dict[str, list[Piece]]:
    """The pieces of a file with the names `there` that make each of timm's tensors (`tensors`)."""
    # 1. The rule of each tensor, and the pieces that each of the rule's alternatives takes
    chosen: dict[str, tuple[Rule, list[list[Piece]]]] = {}
    habits: Counter[tuple[Rule, int]] = Counter()  # which alternatives this file uses
    for ours, tensor in tensors.items():
        rule, theirs = _UNCHANGED, [ours]
        for each in layout.rules:
            match = re.fullmatch(each.ours, ours)
            if match is not None:
                rule, theirs = (
                    each,
                    [match.expand(template) for template in each.theirs],
                )
                break
        shape = SHAPES[rule.shape](tuple(tensor.shape))
        chosen[ours] = rule, [_pieces(name, shape) for name in theirs]
        for i, some in enumerate(chosen[ours][1]):
            habits[rule, i] += all(piece.key in there for piece in some)
    # 2. A missing tensor is called as its like in the other blocks
    out = {}
    for ours, (rule, alternatives) in chosen.items():
        usual = max(range(len(alternatives)), key=lambda i: habits[rule, i])
        out[ours] = alternatives[usual]
    return out


_UNCHANGED = Rule("", ())  # the file has timm's own name
_BRACE = re.compile(r"\{([\w,]+)\}")
_PART = re.compile(r"(.*)\[(\d):(\d)/(\d)\]")


def _pieces(text: str, shape: Shape) -> list[Piece]:
    """'a.{q,k}.b' -> the tensors a.q.b and a.k.b, and 'a[0:1/3]' -> the first third of a."""
    part = _PART.fullmatch(text)
    if part is not None:
        start, stop, parts = int(part[2]), int(part[3]), int(part[4])
        whole = (shape[0] * parts // (stop - start), *shape[1:])
        return [Piece(part[1], whole, start, stop, parts)]
    keys = [text]
    brace = _BRACE.search(text)
    if brace is not None:
        before, after = text[: brace.start()], text[brace.end() :]
        keys = [before + word + after for word in brace[1].split(",")]
    return [
        Piece(key, (shape[0] // len(keys), *shape[1:]) if shape else ()) for key in keys
    ]
