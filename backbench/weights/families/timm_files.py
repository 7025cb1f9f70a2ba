"""Vision transformers and ConvNeXts in files: where they stand, and which timm model each is."""

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
from backbench.weights.tensor_names import first_names

Tensors = Mapping[str, Tensor]

MOST = 16  # prefixes looked at in a table
_LONGEST = 300  # characters of a name that is looked at


@dataclass(frozen=True, kw_only=True)
class TimmInFile(TrunkInFile):
    """A vision transformer or ConvNeXt under one prefix of one table.

    `local`: the file's names below the prefix -> its keys. `arch` is empty until `identified`; then
    `sources` says which pieces of the file make each of timm's tensors, and `keys` (the file's
    names -> its keys) which of them are there.
    """

    family: TrunkFamily
    layout: Layout
    local: Mapping[str, str]
    sources: Mapping[str, list[Piece]] = field(default_factory=dict)
    folds: bool = False
    heads: tuple[str, ...] = ()  # the other keys under the prefix that are kept

    @property
    def blank(self) -> Tensors:
        """The model's own tensors, without elements."""
        return self.family.tensors(self.arch, NATIVE)

    @property
    def has_registers(self) -> bool:
        return any(name.endswith(REGISTERS) for name in self.local)

    def shapes(self) -> Mapping[str, Shape]:
        return {
            each.key: each.shape for parts in self.sources.values() for each in parts
        }

    def assembled(self, tensors: Tensors) -> dict[str, Tensor]:
        blank = self.blank
        out = {}
        for ours, parts in self.sources.items():
            there = [each for each in parts if each.key in self.keys]
            if len(there) < len(parts):  # a counter, or what is allowed to be missing
                continue
            taken = [
                each.taken(tensors[self.keys[each.key]].detach()) for each in there
            ]
            if self.folds and ours in ("cls_token", "pos_embed"):
                out[ours] = _folded(ours, [tensor.float() for tensor in taken])
                continue
            # Their types may differ, and some have no common one
            whole = (
                taken[0]
                if len(taken) == 1
                else torch.cat([each.float() for each in taken])
            )
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
            arch = _known(self, tensors, form, folds)
        arch, _ = self.family.canonical(arch, NATIVE)
        return _fitted(replace(self, arch=arch, folds=folds))

    @property
    def described(self) -> str:
        """Its place and first names, for messages."""
        return f"'{self.label}' ({first_names(list(self.local), 2)})"

    def contradictions(self, tensors: Tensors) -> list[str]:
        out = []
        # Biases of which the model takes the queries' and the values' third alone
        in_thirds = {
            p.key for parts in self.sources.values() for p in parts if p.parts == 3
        }
        for name, key in self.local.items():
            if not name.endswith(_LOOKED_INTO) and not name.startswith("norms.3."):
                continue
            if not in_file(
                tensors[key]
            ):  # said below where it is one of the trunk's own
                if name not in self.keys:
                    out.append(f"{key} (its elements are not all in the file)")
            elif name.endswith("rope_embed.periods") and not _usual_periods(
                tensors[key]
            ):
                out.append(f"{key} (not 100 ** (i / n), the periods of timm's model)")
            elif name.endswith("attn.qkv.bias") and name in in_thirds:
                if not _masked(tensors[key], tensors.get(f"{key}_mask")):
                    out.append(f"{key} (not its keys' third alone is masked)")
            elif name.startswith("norms.3."):
                twin = self.local.get(name.replace("norms.3.", "norm."))
                if twin is not None and not identical(tensors[key], tensors[twin]):
                    out.append(f"{key} (differs from {twin}, whose copy it should be)")
        return out

    def pixels(self) -> Pixels | None:
        if self.form is not None and "pixels" not in self.form.asks:
            return self.form.pixels
        # The model that the command or a file beside it names has pixels of its own
        return self.family.default_pixels(self.arch) if self.metadata.arch else None

    def reading(self) -> str:
        if self.form is None or self.metadata.reading:
            return self.metadata.reading
        # The last norm is as wide as a transformer, or as a ConvNeXt's last stage
        norm = self.blank.get("norm.weight", self.blank.get("head.norm.weight"))
        width = norm.shape[0] if norm is not None else 0
        return self.form.readings.get(width, self.form.reading)

    def head_keys(self, tensors: Tensors, others: tuple[str, ...]) -> list[str]:
        """The model's own heads; text towers and decoders are not kept."""
        return list(self.heads)

    def provenance(self) -> dict[str, str]:
        about = {"licence": self.metadata.licence, "told by": self.metadata.source}
        if self.form is not None:
            about["licence"] = self.metadata.licence or self.form.licence
            if (
                "pos_embed" in self.blank
            ):  # the rule by which its authors resize it, if it is known
                with_registers = (
                    self.form.positions_with_registers if self.has_registers else ""
                )
                about["positions"] = with_registers or self.form.positions
        if self.folds:
            about["changed"] = (
                "the class token's position is added to it, as timm's model has it"
            )
        return {key: value for key, value in about.items() if value}


# --- where they stand ---


def find(
    family: TrunkFamily, tables: Tables, metadata: TrunkMetadata, form: Format | None
) -> list[TimmInFile]:
    """The trunks of a file by layout, or by the names of the model that `metadata` has where no
    layout fits; only their names are known yet."""

    def trunk_below(table: str, prefix: str, layout: Layout) -> TimmInFile:
        local: dict[str, str] = {}
        for key in tables[table]:
            if key.startswith(prefix):
                name = layout.local(key[len(prefix) :])
                # Two chunks may not hold one block: the second stays under its own name, as extra
                local[key[len(prefix) :] if name in local else name] = key
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
    plain = Layout("timm's", "", ())

    def prefix_of(key: str) -> list[tuple[str, Layout]]:
        parts = key.split(".") if len(key) <= _LONGEST else []
        for i in range(len(parts)):
            name = ".".join(parts[i:])
            if name in names:
                return [(key.removesuffix(name), plain)]
        return []

    half = (len(names) + 1) // 2
    return find_by_votes(
        tables,
        prefix_of,
        lambda *place: (1, trunk_below(*place)),
        fewest=half,
        most=MOST,
    )


def _block_prefixes(key: str) -> list[tuple[str, Layout]]:
    """The prefix before the name of a block, for each layout that has such a name."""
    out = []
    if len(key) <= _LONGEST:
        for layout in layouts():
            match = re.match(rf"(.*?\.)??{layout.blocks}\.\d", key)
            if match is not None:
                out.append((match[1] or "", layout))
    return out


# --- which model ---


def signature(trunk: TimmInFile, tensors: Tensors) -> str:
    """'384/16', '1536/14+reg+glu', '96x27+grn': what tells the models of a format apart."""
    names = list(trunk.local)
    if "stages" in trunk.layout.blocks or trunk.layout.blocks == "features":
        return _stages(trunk, tensors)
    # Most vectors of a block are as wide as the trunk
    widths: Counter[int] = Counter()
    patches = []
    for key in trunk.local.values():
        if tensors[key].dim() == 1:
            widths[tensors[key].shape[0]] += 1
        elif tensors[key].dim() == 4:
            patches.append(tensors[key].shape[-1])
    width = widths.most_common(1)[0][0] if widths else 0
    out = f"{width}/{patches[0] if patches else 16}"
    if trunk.has_registers:
        out += "+reg"
    gates = (
        "mlp.w3.weight",
        "mlp.weights_in.weight",
        "mlp.gate_proj.weight",
        "mlp.fc1_g.weight",
    )
    return out + ("+glu" if any(name.endswith(gates) for name in names) else "")


def _stages(trunk: TimmInFile, tensors: Tensors) -> str:
    widths: Counter[int] = Counter()
    third = set()
    for name, key in trunk.local.items():
        parts = name.removeprefix("encoder.").split(".")
        if parts[0] == "features":  # torchvision's: every second one is a stage
            stage = {"1": "0", "5": "2"}.get(parts[1], "")
            parts = ["stages", stage, *parts[2:]]
        if parts[0] == "stages" and parts[1] == "0" and tensors[key].dim() == 1:
            widths[tensors[key].shape[0]] += 1
        if parts[0] == "stages" and parts[1] == "2" and "downsampl" not in name:
            third.add(next((part for part in parts[2:] if part.isdigit()), ""))
    width = widths.most_common(1)[0][0] if widths else 0
    grn = "+grn" if any(".grn." in name for name in trunk.local) else ""
    # A file without one block is no smaller model: what is missing is told of the next larger one
    depth = next((depth for depth in (6, 8, 9, 27) if len(third) <= depth), 27)
    if not grn or width >= 96:
        depth = 9 if len(third) <= 9 and width == 96 else 27
    return f"{width}x{depth}{grn}"


def _known(trunk: TimmInFile, tensors: Tensors, form: Format, folds: bool) -> str:
    """The format's model of this width and patch, with the facts that file and metadata add."""
    key = signature(trunk, tensors)
    model = form.timm.get(key)
    if model is None:  # the patch or a mark may be what is damaged
        like = [
            name
            for each, name in form.timm.items()
            if each.split("/")[0] == key.split("/")[0]
        ]
        patches = any(tensors[key].dim() == 4 for key in trunk.local.values())
        if not like or "/" not in key or patches:
            raise BadInput(
                f"holds {trunk.described}, format {form.name}, of width and patch {key};"
                f" known are {', '.join(form.timm)}; say which model it is with --arch timm:NAME"
            )
        model = like[0]
    if "{}" in model:
        kinds = {"quick_gelu": "clip_quickgelu", "gelu": "clip"}
        if trunk.metadata.activation not in kinds:
            raise BadInput(
                f"format {form.name}: neither the file nor one beside it tells the activation; say it"
                " by --arch timm:vit_base_patch16_clip_quickgelu_224 (OpenAI's, MetaCLIP's, DFN's) or"
                " --arch timm:vit_base_patch16_clip_224 (LAION's, DataComp's), or the like of its size"
            )
        model = model.format(kinds[trunk.metadata.activation])
    size = _size(trunk, tensors, PREFIX + model, folds)
    name = parse(PREFIX + model)
    options = {**name.options, **size, **differences(name, trunk.metadata.options)}
    return str(name._replace(options=options))


def _size(
    trunk: TimmInFile, tensors: Tensors, arch: str, folds: bool
) -> dict[str, str]:
    """`img_size` where the file has position embeddings for another size than the model's."""
    blank = trunk.family.tensors(*trunk.family.canonical(arch, NATIVE))
    if "pos_embed" not in blank or "patch_embed.proj.weight" not in blank:
        return {}
    sources = pieces(trunk.layout, blank, trunk.local)
    key = trunk.local.get(sources["pos_embed"][0].key)
    if key is None or tensors[key].dim() < 2:
        return {}
    ours = blank["pos_embed"].shape[1]
    prefix = ours - math.isqrt(ours) ** 2
    patches = tensors[key].shape[-2] - (1 if folds else prefix)
    side = math.isqrt(max(patches, 0))
    if side == 0 or side**2 != patches or patches == ours - prefix:
        return {}
    return {"img_size": str(side * blank["patch_embed.proj.weight"].shape[-1])}


# --- which tensors ---


def _fitted(trunk: TimmInFile) -> TimmInFile:
    """The trunk with its keys sorted: those of the model, heads, and those left over inside it."""
    form = trunk.form
    sources = pieces(trunk.layout, trunk.blank, trunk.local)
    if trunk.folds and "pos_embed" in trunk.blank and "cls_token" in trunk.blank:
        (position,) = sources["pos_embed"]
        one, rows, width = position.shape
        whole = Piece(position.key, (one, rows + 1, width))
        sources["pos_embed"] = [whole]
        sources["cls_token"] = [*sources["cls_token"], whole]
    wanted = {each.key for parts in sources.values() for each in parts}
    beside = form.beside if form is not None else TIMM.beside
    known = form is not None and form is not TIMM
    insides = {name.split(".")[0] for name in wanted}
    keys, extra, heads = {}, [], []
    for name, key in trunk.local.items():
        if name in wanted:
            keys[name] = key
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in beside):
            heads.append(key)
        elif known or name.split(".")[0] in insides:
            extra.append(key)
        else:
            heads.append(key)
    return replace(
        trunk, keys=keys, extra=tuple(extra), heads=tuple(heads), sources=sources
    )


def _folded(ours: str, taken: list[Tensor]) -> Tensor:
    """The class token with its position added, and the positions without it: (1, 1, D), (1, n, D).
    timm's model has no position of its class token, so its sum is the token."""
    if ours == "cls_token":
        token, positions = taken
        return token + positions[:, :1]
    return taken[0][:, 1:]


# --- contradictions of the model ---


_LOOKED_INTO = ("rope_embed.periods", "attn.qkv.bias", "attn.qkv.bias_mask")


def _usual_periods(periods: Tensor) -> bool:
    """facebookresearch/dinov3: dinov3/layers/rope_position_encoding.py, base 100; kept in bf16."""
    count = periods.numel()
    expected = 100 ** (torch.arange(count) / max(count, 1))
    same = periods.shape == expected.shape
    return same and torch.allclose(periods.float(), expected, rtol=1e-2)


def _masked(bias: Tensor, mask: Tensor | None) -> bool:
    """True where all of a bias (3 * D) counts but the keys' third."""
    if mask is None:
        return not bool((bias.chunk(3)[1] != 0).any())
    if mask.shape != bias.shape or not in_file(mask):
        return False
    queries, keys, values = mask.float().chunk(3)
    return bool((queries == 1).all() and (keys == 0).all() and (values == 1).all())
