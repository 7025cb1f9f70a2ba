"""What a published format is: the columns of the tables in `formats` and `timm_formats`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backbench.images.preprocess import Pixels
from backbench.weights.names import FoundTrunk, Tables


@dataclass(frozen=True, kw_only=True)
class Format:
    """`encoders`: name -> places 'table:prefix' of that trunk; several places are the same weights
    written twice.

    A place without a table stands for the usual ones (`_USUAL`). `needs`: patterns of other keys,
    or of '@key' at the file's top, that must be there. `refines`: formats that this one's files
    would pass for too; it is meant then.

    What follows `timm` is for vision transformers and ConvNeXts: much of such a network stands in
    no file, so its format's row has it.
    """

    name: str
    source: str  # repository: file that builds the modules, file that saves them
    method: str  # what Checkpoint.method becomes, unless --method says otherwise
    also: str = ""  # whose files look just the same
    encoders: Mapping[str, tuple[str, ...]]
    default: str
    needs: tuple[str, ...] = ()
    refines: tuple[str, ...] = ()
    test: Callable[[Tables, list[FoundTrunk]], bool] | None = None
    dialects: tuple[str, ...] = ("torchvision",)
    pixels: Pixels = field(default_factory=Pixels)
    small_pixels: Pixels | None = None  # with a 3x3 conv1
    # The stem that a 3x3 conv1 means, where it is known: no file tells its padding
    conv3: str | None = None
    epoch: tuple[str, int] = ("epoch", 0)  # where the finished epochs are counted, and what to add
    # 'width', 'width/patch', and what `timm_files.signature` adds -> timm's model with its options
    timm: Mapping[str, str] = field(default_factory=dict)
    # What may stand below the trunk's prefix without being part of it: patterns
    beside: tuple[str, ...] = ()
    reading: str = ""  # what its authors read (`readings`); empty: as the model is read by default
    readings: Mapping[int, str] = field(default_factory=dict)  # of trunks of some width
    positions: str = ""  # the rule by which its authors resize position embeddings (`positions`)
    positions_with_registers: str = ""  # where they changed it
    # Its position embeddings begin with one of the class token, which timm's model has not
    folds: bool = False
    # What neither file nor format tells: "activation", "pixels"
    asks: tuple[str, ...] = ()
    licence: str = ""
