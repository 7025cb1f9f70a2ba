"""Translates the names that publishers of vision transformers and ConvNeXts give their tensors.

A layout, in timm_layouts.toml, is a table from timm's names to those of a file, one a line:

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
    # A 1 x 1 convolution is a linear layer: (out, in, 1, 1) -> (out, in)
    "linear": lambda shape: shape[:2],
    "last_two_one": lambda shape: (*shape, 1, 1),  # (C,) -> (C, 1, 1)
    "per_channel": lambda shape: (1, 1, 1, *shape),  # (C,) -> (1, 1, 1, C)
}
_WILDCARDS = {"#": r"(\d+)", "?": r"([\dqv])", "*": r"(\w+)"}


@dataclass(frozen=True)
class Rule:
    """One line of a layout."""

    ours: str  # a regex of timm's names
    theirs: tuple[str, ...]  # templates of the file's names, the alternatives
    shape: str = "same"  # how the file's shape differs, a key of `SHAPES`


@dataclass(frozen=True)
class Piece:
    """A piece is what one of timm's tensors takes from one of a file's: of `parts` equal parts, those
    from `start` to `stop`."""

    key: str
    shape: Shape  # of the file's whole tensor
    start: int = 0
    stop: int = 1
    parts: int = 1

    def taken(self, tensor: Tensor) -> Tensor:
        """Cut the piece out of the file's tensor."""
        if self.parts == 1:
            return tensor
        rows = tensor.shape[0] // self.parts
        return tensor[self.start * rows : self.stop * rows]


@dataclass(frozen=True)
class Layout:
    """The names of one project."""

    name: str
    blocks: str  # a regex of what stands before a block's number
    # Tensors of no block. If fewer than half are there, it is a text tower or a decoder.
    outside: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    # Names may be blocks.CHUNK.NUMBER, where the number counts on from chunk to chunk: DINOv2's and
    # DINOv3's large models have this.
    chunked: bool = False

    def local(self, name: str) -> str:
        """Return a name of the file without the number of its chunk."""
        if not self.chunked:
            return name
        return re.sub(rf"^{self.blocks}\.\d+\.(\d+\.)", rf"{self.blocks}.\1", name)


def _layout(
    name: str, blocks: str, outside: list[str], names: str = "", chunked: bool = False
) -> Layout:
    """Make a layout of its row of the file."""
    parsed = []
    for line in names.splitlines():
        ours, theirs, *shape = line.split()
        ours = ours.replace("@", "blocks.#.")
        theirs = theirs.replace("@", f"{blocks}.#.")
        regex = "".join(_WILDCARDS.get(letter, re.escape(letter)) for letter in ours)
        parsed.append(Rule(regex, _templates(theirs), *shape))
    return Layout(name, re.escape(blocks), tuple(outside), tuple(parsed), chunked)


def _templates(theirs: str) -> tuple[str, ...]:
    r"""Make templates of the alternatives: 'a.#.b|c.#.b' -> (r'a.\1.b', r'c.\1.b')."""
    out = []
    for alternative in theirs.split("|"):
        template, *others = re.split(r"[#?*]", alternative)
        for number, other in enumerate(others, 1):
            template += f"\\{number}{other}"
        out.append(template)
    return tuple(out)


@functools.cache
def layouts() -> tuple[Layout, ...]:
    """Return the layouts of timm_layouts.toml."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return tuple(_layout(name, **row) for name, row in rows.items())


# --- a layout's names of one model ---


def pieces(
    layout: Layout, tensors: Mapping[str, Tensor], there: Mapping[str, object]
) -> dict[str, list[Piece]]:
    """Return the pieces that make each of timm's tensors (`tensors`), of a file with the names
    `there`."""
    # 1. The rule of each tensor, the pieces that each of the rule's alternatives takes, and how often
    # the file has all pieces of an alternative
    chosen: dict[str, tuple[Rule, list[list[Piece]]]] = {}
    uses: Counter[tuple[Rule, int]] = Counter()
    for ours, tensor in tensors.items():
        rule = _UNCHANGED
        names = [ours]
        for candidate in layout.rules:
            match = re.fullmatch(candidate.ours, ours)
            if match is not None:
                rule = candidate
                names = [match.expand(template) for template in candidate.theirs]
                break
        shape = SHAPES[rule.shape](tuple(tensor.shape))
        alternatives = [_pieces(name, shape) for name in names]
        chosen[ours] = rule, alternatives
        for i, alternative in enumerate(alternatives):
            if all(piece.key in there for piece in alternative):
                uses[rule, i] += 1
    # 2. Each tensor takes the alternative that the file uses most, also where it is missing: then the
    # refusal calls it as the file calls the same tensor of other blocks
    out = {}
    for ours, (rule, alternatives) in chosen.items():
        most_used = max(range(len(alternatives)), key=lambda i: uses[rule, i])
        out[ours] = alternatives[most_used]
    return out


_UNCHANGED = Rule("", ())  # the file has timm's own name
_BRACE = re.compile(r"\{([\w,]+)\}")
_PART = re.compile(r"(.*)\[(\d):(\d)/(\d)\]")


def _pieces(text: str, shape: Shape) -> list[Piece]:
    """Return the pieces that a layout's text stands for: 'a.{q,k}.b' for the tensors a.q.b and a.k.b,
    'a[0:1/3]' for the first third of a. `shape` is that of all pieces together."""
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
    each: Shape = ()
    if shape:
        each = (shape[0] // len(keys), *shape[1:])
    return [Piece(key, each) for key in keys]
