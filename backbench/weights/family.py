"""A family is one typed object that knows everything the suite asks about a kind of trunk.

`families/` has a file for each, listed in `archs.FAMILIES`; no other file tests a trunk's kind.
That file imports no torch, so planning and `--help` stay fast; the network is in a second file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from backbench.errors import BadInput
from backbench.images.preprocess import PIXELS, Pixels
from backbench.untrusted.printable import shown
from backbench.weights.readings import POOLED
from backbench.weights.tensor_names import is_counter, unwrapped

if TYPE_CHECKING:
    from torch import Tensor, nn

    from backbench.weights.trunk import Trunk

Shape = tuple[int, ...]
Tables = dict[str, dict[str, "Tensor"]]  # dotted path in a file -> its tensors by key
# A file's content: nested dicts and lists with tensors and plain values at the leaves
Tree = object

NATIVE = "native"  # the stem of a trunk that has only one
# The stems that the shape of conv1 alone tells: a 7x7 convolution, and a 3x3 one
PLAIN_STEMS = ("imagenet", "conv3")
# Rules by which authors resize position embeddings (`timm_trunk.resized`)
POSITION_RULES = ("+0.1", "aa", "size")


# --- a trunk in a file ---


def channels_advice(channels: int) -> str:
    """Say what to do with a network whose first convolution takes other than three channels."""
    counted = "1 channel" if channels == 1 else f"{channels} channels"
    return (
        f"its first convolution takes {counted}, and pictures are read as three (RGB); measure the"
        f" module itself in Python, with `features` that make {channels} of three (docs/python.md)"
    )


@dataclass(frozen=True, kw_only=True)
class TrunkMetadata:
    """Holds what a file's tensors do not tell. It comes from the command line, or from a small file
    beside the weights."""

    arch: str = ""  # the trunk's whole name
    reading: str = ""
    pixels: Pixels | None = None
    # Options of the model (heads, eps, activation) that may differ from those of the format's model
    options: Mapping[str, str] = field(default_factory=dict)
    activation: str = ""  # as timm calls it
    licence: str = ""
    source: str = ""  # the file that all this is from; empty for the command line
    names_model: bool = False  # whether that file names the model
    # --method: it tells whose file this is where no mark in the file does
    method: str = ""

    def over(self, other: TrunkMetadata) -> TrunkMetadata:
        """Return this metadata, with the empty fields filled from `other`."""
        values = {
            key: value or getattr(other, key) for key, value in vars(self).items()
        }
        values["options"] = {**other.options, **self.options}
        return TrunkMetadata(**values)


@dataclass(frozen=True, kw_only=True)
class TrunkInFile(ABC):
    """A trunk found under one prefix of one table of a file; each family has its own subclass."""

    # Advice that ends the refusal of tensors with other shapes
    if_misshaped: ClassVar[str] = ""
    table: str
    prefix: str
    dialect: str  # the project whose names its tensors have
    arch: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)  # tensor -> key in the file
    extra: tuple[str, ...] = ()  # keys inside the trunk that its architecture has not
    metadata: TrunkMetadata = TrunkMetadata()
    form: Format | None = None  # its format, once it is known

    @property
    def place(self) -> str:
        """'table:prefix', the prefix without `module.`: formats are recognised by it."""
        return f"{self.table}:{unwrapped(self.prefix)}"

    @property
    def label(self) -> str:
        """The table and prefix, for messages."""
        table = f"{self.table}: " if self.table else ""
        return shown(f"{table}{self.prefix or '(no prefix)'}")

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that the file does not have; a counter is never missed."""
        return [
            key for key in self.shapes() if key not in self.keys and not is_counter(key)
        ]

    @abstractmethod
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of each tensor that a whole trunk has, named as in `keys`."""

    def assembled(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the trunk's own state dict of the tensors of its table."""
        return {ours: tensors[key].detach() for ours, key in self.keys.items()}

    def stem(self, wanted: str | None = None) -> str | None:
        """Return the stem, checked against the `wanted` one; None where nothing tells it."""
        if wanted is not None:
            raise BadInput(f"{self.arch} has no choice of stem; leave out --stem")
        return NATIVE

    @abstractmethod
    def pixels(self) -> Pixels | None:
        """Return the pixels of its training where `metadata` has none; None where nothing tells."""

    def head_keys(
        self, tensors: Mapping[str, Tensor], others: tuple[str, ...]
    ) -> list[str]:
        """Return the keys to keep as heads; `others` are prefixes of the file's other trunks."""
        return []

    def classifier(self, tensors: Mapping[str, Tensor]) -> Mapping[str, str]:
        """Return key in the file -> name in the whole model, for the classifier that stands beside
        the trunk; empty for none, and where the file's names are the model's."""
        return {}

    def name_in_file(self, key: str) -> str:
        """Return the file's name, below the prefix, for a tensor of `keys`."""
        return key

    def identified(self, tensors: Mapping[str, Tensor]) -> TrunkInFile:
        """Return the trunk with its model's name, now that its format is known."""
        return self

    def contradictions(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return keys that the trunk leaves out, though they would change its features."""
        return []

    def reading(self) -> str:
        """Return the reading that was asked for, or its authors' own; empty for the default."""
        return ""

    def provenance(self) -> dict[str, str]:
        """Return decisions about this trunk that are not in the file."""
        return {}


def in_file(tensor: Tensor) -> bool:
    """Return True for a plain CPU tensor whose elements are all in the file."""
    import torch

    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    if tensor.is_quantized:
        return False
    # Strides of 0 make a few bytes look like a large tensor.
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def identical(one: Tensor, other: Tensor) -> bool:
    """Return True for two tensors whose elements are in the file, and equal."""
    import torch

    if not in_file(one) or not in_file(other):
        return False
    if one.dtype == other.dtype == torch.float32:
        return one.equal(other)
    # As float64, because torch compares no float8
    return one.double().equal(other.double())


Naming = TypeVar("Naming")
InFile = TypeVar("InFile", bound=TrunkInFile)


def find_by_votes(
    tables: Tables,
    candidates: Callable[[str], Iterable[tuple[str, Naming]]],
    fit: Callable[[str, str, Naming], tuple[int, InFile]],
    *,
    fewest: int,
    most: int,
) -> list[InFile]:
    """Find the trunks of a file, in the file's order.

    `candidates(key)` gives the pairs of prefix and naming that a key may have; `fit(table, prefix,
    naming)` makes the trunk of such a pair, with a score. For each prefix the trunk with the largest
    score above 0 counts.
    """
    out: list[InFile] = []
    for table, tensors in tables.items():
        # 1. Each key votes for its candidates
        votes: Counter[tuple[str, Naming]] = Counter()
        for key in tensors:
            votes.update(candidates(key))
        # 2. The best trunk of each prefix. A fit is costly, and a file may be made to delay its
        # reader: only the `most` pairs with at least `fewest` votes are tried.
        best: dict[str, tuple[int, InFile]] = {}
        for (prefix, naming), count in votes.most_common(most):
            if count < fewest:
                break
            score, trunk = fit(table, prefix, naming)
            score_to_beat = best[prefix][0] if prefix in best else 0
            if score > score_to_beat:
                best[prefix] = score, trunk
        # 3. In the order of their first keys
        position = {key: i for i, key in enumerate(tensors)}
        trunks = [trunk for _, trunk in best.values()]
        out += sorted(
            trunks, key=lambda trunk: min(position[key] for key in trunk.keys.values())
        )
    return out


# --- published formats ---

FormatTest = Callable[[Tables, list[TrunkInFile]], bool]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A published checkpoint format: one row of a family's table."""

    name: str
    source: str  # repository: file that builds the modules, file that saves them
    method: str  # Checkpoint.method, unless --method says otherwise
    also: str = ""  # other projects whose files look just the same
    # Encoder -> places 'table:prefix' that all hold the same weights; the default encoder is first.
    # A place without a table means the usual tables (`formats.USUAL_TABLES`).
    encoders: Mapping[str, tuple[str, ...]]
    # Patterns of other keys that must be there; '@key' is one at the file's top
    needs: tuple[str, ...] = ()
    refines: tuple[str, ...] = ()  # more general formats that its files fit, too
    test: FormatTest | None = None  # what names alone cannot tell
    dialects: tuple[str, ...] = ("torchvision",)
    pixels: Pixels = field(default_factory=Pixels)
    small_pixels: Pixels | None = None  # the pixels of a trunk with a 3x3 conv1
    # The stem that a 3x3 conv1 means, where it is known: no file tells its padding
    conv3: str | None = None
    # The key that counts finished epochs, and what to add to its value
    epoch: tuple[str, int] = ("epoch", 0)

    # The fields from here on are for vision transformers and ConvNeXts. No file holds them.
    # 'width', 'width/patch' and more (`timm_files.signature`) -> timm's model with its options
    timm: Mapping[str, str] = field(default_factory=dict)
    # Patterns of keys that may stand below the trunk's prefix without being part of it
    beside: tuple[str, ...] = ()
    reading: str = ""  # the authors' reading; empty: the model's default
    # The authors' reading for trunks of these widths
    readings: Mapping[int, str] = field(default_factory=dict)
    positions: str = ""  # the rule by which its authors resize position embeddings
    positions_with_registers: str = ""  # their rule for trunks with register tokens
    # The file's position embeddings begin with one of the class token, which timm's model has not
    folds: bool = False
    # What neither file nor format tells: "activation", "pixels"
    asks: tuple[str, ...] = ()
    licence: str = ""

    @property
    def default(self) -> str:
        """The encoder that is taken where none is named."""
        return next(iter(self.encoders))


def format_row(
    name: str, row: Mapping[str, Any], tests: Mapping[str, FormatTest]
) -> Format:
    """Make a Format of a row of a family's TOML file, which has its test and its pixels by name."""
    fields: dict[str, Any] = {}
    for key, value in row.items():
        fields[key] = tuple(value) if isinstance(value, list) else value
    fields["encoders"] = {
        encoder: tuple(places) for encoder, places in row["encoders"].items()
    }
    for key, known in (("test", tests), ("pixels", PIXELS), ("small_pixels", PIXELS)):
        if key in row:
            fields[key] = known[row[key]]
    return Format(name=name, **fields)


# --- the kind itself ---


class NamedWeights(NamedTuple):
    """The weights that a name stands for: a cached file, or else a fresh trunk (`metadata.arch`)."""

    name: str  # the name of its row on the leaderboard
    metadata: TrunkMetadata
    file: Path | None = None


class TrunkFamily(ABC):
    """One kind of trunk. Its methods get canonical names and stems."""

    prefix: str = ""  # how the names of its trunks begin
    # A digest is over the tensors alone, and there is only one reading
    tensors_say_all: bool = False
    named_for_files: bool = False  # `import --arch` may name such a trunk
    elsewhere: bool = True  # other processes can build it, too
    # It cannot be built on the meta device, nor without drawing its weights
    reads_memory: bool = False
    formats: tuple[Format, ...] = ()

    def __init__(self) -> None:
        # (arch, stem, reading) -> a trunk without memory
        self._blanks: dict[tuple[str, str, str], Trunk] = {}

    # Names

    def owns(self, arch: str) -> bool:
        """Return True for the name of a trunk of this kind, or for what can only be meant as
        one."""
        return bool(self.prefix) and arch.startswith(self.prefix)

    def lasting(self, arch: str) -> bool:
        """Return True if the name means the same network in another process, so features may be
        kept."""
        return True

    def suggestions(self) -> Collection[str]:
        """Return names for "did you mean"."""
        return ()

    @abstractmethod
    def canonical(self, arch: str, stem: str) -> tuple[str, str]:
        """Return the one way to write a trunk's name and stem. BadInput for an unknown trunk."""

    def with_options(self, arch: str, options: Mapping[str, str]) -> str:
        """Return the name with other options (`--pos`). BadInput where the trunk has none."""
        raise BadInput(f"{arch} takes images of any size; leave out --pos")

    def name_in_papers(self, arch: str) -> str:
        """Return the name that papers print for this trunk."""
        return arch

    def dialect(self, arch: str) -> str:
        """Return the project whose names its state dict has."""
        return "its own"

    # The trunk

    @abstractmethod
    def build(self, arch: str, stem: str, reading: str) -> Trunk:
        """Return a fresh trunk, read by `reading` (empty: its default). BadInput if unknown."""

    def default_reading(self, arch: str) -> str:
        """Return the reading of its features where nobody says otherwise."""
        return POOLED

    def default_pixels(self, arch: str) -> Pixels:
        """Return the statistics of its pixels where no file says otherwise."""
        return Pixels()

    def refuse_pixels(self, arch: str, pixels: Pixels) -> None:  # noqa: B027 - most take any
        """Raise BadInput if the trunk converts pixels itself and takes others than these."""

    def blank(self, arch: str, stem: str, reading: str) -> Trunk:
        """Return the trunk in eval() on the meta device, for names, shapes and costs.

        It is built once; do not change it.
        """
        import torch

        key = arch, stem, reading
        if key not in self._blanks:
            with torch.device("cpu" if self.reads_memory else "meta"):
                trunk = self.unfilled(arch, stem, reading)
            self._blanks[key] = trunk.to("meta").eval()
        return self._blanks[key]

    def unfilled(self, arch: str, stem: str, reading: str) -> Trunk:
        """Return a trunk whose parameters hold anything, for a state dict that fills them all."""
        from backbench.weights.undrawn import Undrawn

        if self.reads_memory:
            return self.build(arch, stem, reading)
        with Undrawn():
            return self.build(arch, stem, reading)

    def tensors(self, arch: str, stem: str) -> Mapping[str, Tensor]:
        """Return its state dict without elements; parameters are `nn.Parameter`."""
        blank = self.blank(arch, stem, self.default_reading(arch))
        return blank.state_dict(keep_vars=True)

    # Files, modules and names that hold weights

    def find(
        self, tables: Tables, tree: Tree, path: Path, metadata: TrunkMetadata
    ) -> list[TrunkInFile]:
        """Find the trunks of this family in an opened file, in the file's order."""
        return []

    def named_weights(self, name: str, metadata: TrunkMetadata) -> NamedWeights | None:
        """Return the weights that a name stands for; None for a name of another family."""
        return None

    def meant_by(self, word: str) -> str:
        """Return this family's name of weights that a word is the end of; empty for none."""
        return ""

    def advice(self, tables: Tables) -> str:
        """Say which trunks of this family have the tensors of a file that nothing recognises, and
        what to type; empty for none."""
        return ""

    def twins(self, arch: str, *, pixels_told: bool) -> str:
        """Say which other trunks have the tensors of this one, and how they differ; empty for none."""
        return ""

    def renamed(
        self, tables: Tables, arch: str, rules: str
    ) -> tuple[Tables, Mapping[str, str]]:
        """Return a file's tables with the trunk's own names, and the map of names that have changed.
        BadInput where they cannot be told one by one."""
        raise BadInput(f"--rename {rules[:80]}: say whose names it gets, by --arch")

    def cached_names(self) -> list[str]:
        """Return the names whose weights are on this machine already."""
        return []

    def of_module(self, module: nn.Module) -> tuple[str, Pixels] | None:
        """Return the name and pixels of the trunk that a torch module is; None if it is none."""
        return None

    def loaded_by(self, arch: str, stem: str, library: str) -> str | None:
        """Return how torchvision, timm or Detectron2 loads an exported file; None if it cannot."""
        return None


def refuse_other_readings(arch: str, reading: str) -> None:
    """Raise BadInput for another reading than the trunk's own pooling."""
    if reading not in ("", POOLED):
        raise BadInput(f"{arch} is read by '{POOLED}' alone, not by '{reading[:40]}'")


def native_stem(arch: str, stem: str) -> str:
    """Return the stem of a trunk that has only one. BadInput where another is asked for."""
    # A recipe that says nothing of the stem has "imagenet".
    if stem not in (NATIVE, "imagenet"):
        raise BadInput(
            f"{arch[:80]} has no stem '{stem[:40]}', only its own; leave out stem, or write"
            " stem=imagenet where a recipe has another"
        )
    return NATIVE
