"""Finds vision transformers and ConvNeXts in files: where they stand, and which timm model each is."""

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights.families import file_classifier
from backbench.weights.families.timm_formats import REGISTERS, TIMM
from backbench.weights.families.timm_layouts import Layout, Piece, layouts, pieces
from backbench.weights.families.timm_model_names import PREFIX, parse
from backbench.weights.families.timm_trunk import differences
from backbench.weights.family import (
    NATIVE,
    Format,
    Shape,
    Tables,
    TrunkFamily,
    TrunkInFile,
    TrunkMetadata,
    find_by_votes,
    identical,
    in_file,
)
from backbench.weights.tensor_names import first_names, without_wrapped_parts

Tensors = Mapping[str, Tensor]

MOST = 16  # prefixes that are tried in a table
_LONGEST = 300  # longer names are passed over; in characters


@dataclass(frozen=True, kw_only=True)
class TimmInFile(TrunkInFile):
    """A vision transformer or ConvNeXt under one prefix of one table.

    `arch`, `sources`, `folds` and `heads` are empty until `identified`. From then on, `keys` has only
    the names of `local` that are part of the trunk.
    """

    family: TrunkFamily
    layout: Layout
    local: Mapping[str, str]  # the file's name below the prefix -> its key
    # timm's tensor -> the pieces of the file's tensors that make it
    sources: Mapping[str, list[Piece]] = field(default_factory=dict)
    folds: bool = False  # whether the class token's position is added to the token
    heads: tuple[str, ...] = ()  # other keys under the prefix, which are kept

    @property
    def blank(self) -> Tensors:
        """The model's own tensors, without elements."""
        return self.family.tensors(self.arch, NATIVE)

    @property
    def has_registers(self) -> bool:
        """True if the file holds register tokens."""
        return any(name.endswith(REGISTERS) for name in self.local)

    def shapes(self) -> Mapping[str, Shape]:
        shapes = {}
        for parts in self.sources.values():
            for part in parts:
                shapes[part.key] = part.shape
        return shapes

    def assembled(self, tensors: Tensors) -> dict[str, Tensor]:
        blank = self.blank
        out = {}
        for ours, parts in self.sources.items():
            # A counter may be missing, and statistics where that is allowed.
            if any(part.key not in self.keys for part in parts):
                continue
            taken = []
            for part in parts:
                tensor = tensors[self.keys[part.key]].detach()
                taken.append(part.taken(tensor))
            if self.folds and ours in ("cls_token", "pos_embed"):
                out[ours] = _folded(ours, [tensor.float() for tensor in taken])
                continue
            if len(taken) == 1:
                whole = taken[0]
            else:
                # The types of the parts may differ, and some pairs have no common type.
                whole = torch.cat([tensor.float() for tensor in taken])
            out[ours] = whole.reshape(blank[ours].shape)
        return out

    def identified(self, tensors: Tensors) -> "TimmInFile":
        form = self.form
        folds = form is not None and form.folds and self.has_registers
        arch = self.metadata.arch
        if not arch:
            if form is None or not form.timm:
                raise BadInput(
                    f"holds {self.described}, in no known format; say what it is with"
                    f" --arch {PREFIX}NAME --pixels P (and --reading), or whose it is with --method"
                    " dino, ibot or mae,"
                    " in `backbench import FILE --out X.safetensors`"
                )
            arch = _model_of_format(self, tensors, form, folds)
        arch, _ = self.family.canonical(arch, NATIVE)
        return _fitted(replace(self, arch=arch, folds=folds))

    @property
    def described(self) -> str:
        """The trunk's place and first names, for messages."""
        return f"'{self.label}' ({first_names(list(self.local), 2)})"

    def contradictions(self, tensors: Tensors) -> list[str]:
        # These biases are whole in the file, for queries, keys and values; timm's model takes only
        # the queries' and the values' thirds
        in_thirds = set()
        for parts in self.sources.values():
            in_thirds |= {part.key for part in parts if part.parts == 3}
        out = []
        for name, key in self.local.items():
            if not name.endswith(_LOOKED_INTO) and not name.startswith("norms.3."):
                continue
            tensor = tensors[key]
            if not in_file(tensor):
                # If it is one of the trunk's own, `wholeness.problems` names it anyway.
                if name not in self.keys:
                    out.append(f"{key} (its elements are not all in the file)")
            elif name.endswith("rope_embed.periods") and not _usual_periods(tensor):
                out.append(f"{key} (not 100 ** (i / n), the periods of timm's model)")
            elif name.endswith("attn.qkv.bias") and name in in_thirds:
                if not _keys_are_masked(tensor, tensors.get(f"{key}_mask")):
                    out.append(f"{key} (not its keys' third alone is masked)")
            elif name.startswith("norms.3."):
                twin = self.local.get(name.replace("norms.3.", "norm."))
                if twin is not None and not identical(tensor, tensors[twin]):
                    out.append(f"{key} (differs from {twin}, whose copy it should be)")
        return out

    def pixels(self) -> Pixels | None:
        if self.form is not None and "pixels" not in self.form.asks:
            return self.form.pixels
        # The model that the command line or a file beside the weights names has pixels of its own.
        return self.family.default_pixels(self.arch) if self.metadata.arch else None

    def reading(self) -> str:
        if self.form is None or self.metadata.reading:
            return self.metadata.reading
        # The last norm is as wide as a transformer, or as the last stage of a ConvNeXt.
        norm = self.blank.get("norm.weight")
        if norm is None:
            norm = self.blank.get("head.norm.weight")
        width = norm.shape[0] if norm is not None else 0
        return self.form.readings.get(width, self.form.reading)

    def head_keys(self, tensors: Tensors, others: tuple[str, ...]) -> list[str]:
        """Return the keys of the model's own heads; text towers and decoders are not kept."""
        return list(self.heads)

    def classifier(self, tensors: Tensors) -> Mapping[str, str]:
        keys = self.keys.values()
        there = file_classifier.found(self.arch, self.prefix, tensors, keys)
        return there.names if there is not None else {}

    def provenance(self) -> dict[str, str]:
        about = {"licence": self.metadata.licence, "told by": self.metadata.source}
        form = self.form
        if form is not None:
            about["licence"] = self.metadata.licence or form.licence
            if "pos_embed" in self.blank:
                about["positions"] = form.positions
                if self.has_registers and form.positions_with_registers:
                    about["positions"] = form.positions_with_registers
        if self.folds:
            about["changed"] = (
                "the class token's position is added to it, as timm's model has it"
            )
        return {key: value for key, value in about.items() if value}


# --- where they stand ---


def find(
    family: TrunkFamily, tables: Tables, metadata: TrunkMetadata, form: Format | None
) -> list[TimmInFile]:
    """Find the trunks of a file by the names of a layout or, where none fits, by the names of the
    model that `metadata` has. They are not identified yet."""

    # A model may itself call a part as wrappers do (timm's iformer), and tables have it without that.
    own_names: dict[str, str] = {}

    def trunk_below(table: str, prefix: str, layout: Layout) -> TimmInFile:
        local: dict[str, str] = {}
        for key in tables[table]:
            if key.startswith(prefix):
                name_in_file = key[len(prefix) :]
                name = layout.local(name_in_file)
                name = own_names.get(name, name)
                # If two chunks hold the same block, the second keeps its own name: it is extra then.
                local[name_in_file if name in local else name] = key
        return TimmInFile(
            table=table,
            prefix=prefix,
            dialect=layout.name,
            family=family,
            metadata=metadata,
            form=form,
            layout=layout,
            keys=local,
            local=local,
        )

    def by_layout(table: str, prefix: str, layout: Layout) -> tuple[int, TimmInFile]:
        trunk = trunk_below(table, prefix, layout)
        score = sum(name in trunk.local for name in layout.outside)
        return score if 2 * score >= len(layout.outside) else 0, trunk

    trunks = find_by_votes(tables, _block_prefixes, by_layout, fewest=12, most=MOST)
    if trunks or not metadata.arch:
        return trunks
    arch, _ = family.canonical(metadata.arch, NATIVE)
    names = family.tensors(arch, NATIVE)
    own_names |= {without_wrapped_parts(name): name for name in names}
    timms_own = Layout("timm's", "", ())

    def prefix_of(key: str) -> list[tuple[str, Layout]]:
        if len(key) > _LONGEST:
            return []
        parts = key.split(".")
        for i in range(len(parts)):
            name = ".".join(parts[i:])
            if name in own_names:
                return [(key.removesuffix(name), timms_own)]
        return []

    def by_model(table: str, prefix: str, layout: Layout) -> tuple[int, TimmInFile]:
        return 1, trunk_below(table, prefix, layout)

    half = (len(names) + 1) // 2
    return find_by_votes(tables, prefix_of, by_model, fewest=half, most=MOST)


def _block_prefixes(key: str) -> list[tuple[str, Layout]]:
    """Return the prefix before the name of a block, for each layout that has such a name."""
    if len(key) > _LONGEST:
        return []
    out = []
    for layout in layouts():
        match = re.match(rf"(.*?\.)??{layout.blocks}\.\d", key)
        if match is not None:
            out.append((match[1] or "", layout))
    return out


# --- which model ---


_GATES = (
    "mlp.w3.weight",
    "mlp.weights_in.weight",
    "mlp.gate_proj.weight",
    "mlp.fc1_g.weight",
)


def signature(trunk: TimmInFile, tensors: Tensors) -> str:
    """Return what tells the models of a format apart: '384/16', '1536/14+reg+glu', '96x27+grn'."""
    if "stages" in trunk.layout.blocks or trunk.layout.blocks == "features":
        return _signature_of_stages(trunk, tensors)
    # Most vectors of a block are as wide as the trunk.
    widths: Counter[int] = Counter()
    patches = []
    for key in trunk.local.values():
        if tensors[key].dim() == 1:
            widths[tensors[key].shape[0]] += 1
        elif tensors[key].dim() == 4:
            patches.append(tensors[key].shape[-1])
    width = widths.most_common(1)[0][0] if widths else 0
    patch = patches[0] if patches else 16
    out = f"{width}/{patch}"
    if trunk.has_registers:
        out += "+reg"
    if any(name.endswith(_GATES) for name in trunk.local):
        out += "+glu"
    return out


def _signature_of_stages(trunk: TimmInFile, tensors: Tensors) -> str:
    """Return a ConvNeXt's width and the number of blocks in its third stage, '96x27+grn'."""
    # 1. The vectors of the first stage, and the blocks of the third
    widths: Counter[int] = Counter()
    third_stage = set()
    for name, key in trunk.local.items():
        parts = name.removeprefix("encoder.").split(".")
        if parts[0] == "features":
            # torchvision counts the stages and what is before each: features.1 is the first stage.
            stage = {"1": "0", "5": "2"}.get(parts[1], "")
            parts = ["stages", stage, *parts[2:]]
        if parts[0] != "stages":
            continue
        if parts[1] == "0" and tensors[key].dim() == 1:
            widths[tensors[key].shape[0]] += 1
        if parts[1] == "2" and "downsampl" not in name:
            block = next((part for part in parts[2:] if part.isdigit()), "")
            third_stage.add(block)
    width = widths.most_common(1)[0][0] if widths else 0
    grn = "+grn" if any(".grn." in name for name in trunk.local) else ""
    # 2. A file without one block is no smaller model. It is taken for the next larger model, so that
    # the refusal names the missing block.
    depths: tuple[int, ...] = (6, 8, 9, 27)
    if not grn or width >= 96:
        depths = (9, 27) if width == 96 else (27,)
    depth = next((depth for depth in depths if len(third_stage) <= depth), 27)
    return f"{width}x{depth}{grn}"


def _model_of_format(
    trunk: TimmInFile, tensors: Tensors, form: Format, folds: bool
) -> str:
    """Return the format's model of this width and patch, with the options that file and metadata
    add."""
    # 1. The model
    key = signature(trunk, tensors)
    model = form.timm.get(key)
    if model is None:
        # Without a patch embedding the file does not tell the patch: take the first model of this
        # width, so that the refusal names what is missing.
        has_patches = any(tensors[key].dim() == 4 for key in trunk.local.values())
        width = key.split("/")[0]
        alike = [
            name for known, name in form.timm.items() if known.split("/")[0] == width
        ]
        if not alike or "/" not in key or has_patches:
            raise BadInput(
                f"holds {trunk.described}, format {form.name}, of width and patch {key};"
                f" known are {', '.join(form.timm)}; say which model it is with --arch timm:NAME"
            )
        model = alike[0]
    # 2. CLIP's files do not tell the activation, and timm has a model for each
    if "{}" in model:
        kinds = {"quick_gelu": "clip_quickgelu", "gelu": "clip"}
        if trunk.metadata.activation not in kinds:
            raise BadInput(
                f"format {form.name}: neither the file nor one beside it tells the activation; say it"
                " by --arch timm:vit_base_patch16_clip_quickgelu_224 (OpenAI's, MetaCLIP's, DFN's) or"
                " --arch timm:vit_base_patch16_clip_224 (LAION's, DataComp's), or the like of its size"
            )
        model = model.format(kinds[trunk.metadata.activation])
    # 3. The options that differ from the model's own
    name = parse(PREFIX + model)
    options = {**name.options}
    img_size = _img_size(trunk, tensors, PREFIX + model, folds)
    if img_size is not None:
        options["img_size"] = str(img_size)
    options |= differences(name, trunk.metadata.options)
    return str(name._replace(options=options))


def _img_size(
    trunk: TimmInFile, tensors: Tensors, arch: str, folds: bool
) -> int | None:
    """Return the image side, in pixels, for which the file has position embeddings; None where it
    is the model's own, or not to be told."""
    # 1. The position embeddings of model and file
    blank = trunk.family.tensors(*trunk.family.canonical(arch, NATIVE))
    if "pos_embed" not in blank or "patch_embed.proj.weight" not in blank:
        return None
    sources = pieces(trunk.layout, blank, trunk.local)
    key = trunk.local.get(sources["pos_embed"][0].key)
    if key is None or tensors[key].dim() < 2:
        return None
    # 2. Some are not of patches: those that the model's square of patches leaves over
    rows_of_model = blank["pos_embed"].shape[1]
    patches_of_model = math.isqrt(rows_of_model) ** 2
    prefix = 1 if folds else rows_of_model - patches_of_model
    patches = tensors[key].shape[-2] - prefix
    # 3. The patches of the file are a square, too, but another one
    side = math.isqrt(max(patches, 0))
    if side == 0 or side**2 != patches or patches == patches_of_model:
        return None
    return side * blank["patch_embed.proj.weight"].shape[-1]


# --- which tensors ---


def _fitted(trunk: TimmInFile) -> TimmInFile:
    """Sort the trunk's keys into those of the model, heads, and those left over inside it."""
    form = trunk.form
    # 1. The pieces of which the model's tensors are made
    sources = pieces(trunk.layout, trunk.blank, trunk.local)
    if trunk.folds and "pos_embed" in trunk.blank and "cls_token" in trunk.blank:
        # The file's positions have a row more than the model's, which goes into the class token.
        (position,) = sources["pos_embed"]
        one, rows, width = position.shape
        whole = Piece(position.key, (one, rows + 1, width))
        sources["pos_embed"] = [whole]
        sources["cls_token"] = [*sources["cls_token"], whole]
    wanted = set()
    for parts in sources.values():
        wanted |= {part.key for part in parts}
    # 2. A known format tells which other keys may stand below the prefix. Elsewhere, keys whose
    # first part is that of a tensor of the model are inside the trunk, and all others are heads.
    beside = form.beside if form is not None else TIMM.beside
    known = form is not None and form is not TIMM
    first_parts = {name.split(".")[0] for name in wanted}
    keys = {}
    extra = []
    heads = []
    for name, key in trunk.local.items():
        if name in wanted:
            keys[name] = key
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in beside):
            heads.append(key)
        elif known or name.split(".")[0] in first_parts:
            extra.append(key)
        else:
            heads.append(key)
    return replace(
        trunk, keys=keys, extra=tuple(extra), heads=tuple(heads), sources=sources
    )


def _folded(ours: str, taken: list[Tensor]) -> Tensor:
    """Return the class token with its position added, (1, 1, D), or the positions without that one,
    (1, n, D). timm's model has no position for its class token: its token is the sum."""
    if ours == "cls_token":
        token, positions = taken
        return token + positions[:, :1]
    (positions,) = taken
    return positions[:, 1:]


# --- contradictions of the model ---


# Tensors that timm's model does not have; it computes as if they had the values that are checked
_LOOKED_INTO = ("rope_embed.periods", "attn.qkv.bias", "attn.qkv.bias_mask")


def _usual_periods(periods: Tensor) -> bool:
    """Return True for the periods 100 ** (i / n), to the precision of the bfloat16 in which they
    are kept (facebookresearch/dinov3: dinov3/layers/rope_position_encoding.py, base 100)."""
    count = periods.numel()
    expected = 100 ** (torch.arange(count) / max(count, 1))
    same = periods.shape == expected.shape
    return same and torch.allclose(periods.float(), expected, rtol=1e-2)


def _keys_are_masked(bias: Tensor, mask: Tensor | None) -> bool:
    """Return True where all of a bias of queries, keys and values (3 * D) counts but the keys'
    third."""
    if mask is None:
        return not bool((bias.chunk(3)[1] != 0).any())
    if mask.shape != bias.shape or not in_file(mask):
        return False
    queries, keys, values = mask.float().chunk(3)
    return bool((queries == 1).all() and (keys == 0).all() and (values == 1).all())
