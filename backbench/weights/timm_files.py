"""From what is found of a vision transformer or ConvNeXt in a file to the timm model that it is."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.weights import archs, layouts, timm_trunk
from backbench.weights.format_row import Format
from backbench.weights.layouts import FoundTimm, Piece
from backbench.weights.names import Tables, Tree
from backbench.weights.sidecar_metadata import Told
from backbench.weights.timm_formats import TIMM

Tensors = Mapping[str, Tensor]


def find(found: Tables, told: Told) -> list[FoundTimm]:
    """The trunks in a file, by layout; by the names of the model that was told where no layout
    fits."""
    trunks = layouts.find(found)
    if not trunks and told.arch:
        trunks = layouts.by_names(found, archs.tensors(told.arch))
    return trunks


def training_arch(tree: Tree) -> str:
    """The model that a checkpoint of timm's training names: {'arch': ..., 'version': 2, ...}."""
    if not isinstance(tree, Mapping) or "version" not in tree or "state_dict" not in tree:
        return ""
    arch = tree.get("arch")
    return timm_trunk.PREFIX + arch if isinstance(arch, str) else ""


def of_format(trunk: FoundTimm, tensors: Tensors, form: Format | None, told: Told) -> FoundTimm:
    """The trunk with its model's name, and which of the model's tensors the file has."""
    folds = form is not None and form.folds and _registers(trunk)
    arch = told.arch
    if not arch:
        if form is None or not form.timm:
            raise BadInput(
                f"holds {layouts.described(trunk)}, in no known format; say what it is with"
                " --arch timm:NAME (and --pixels, --reading) in `backbench import FILE --out X.safetensors`"
            )
        arch = _known(trunk, tensors, form, told, folds)
    if "pos" in told.options:
        arch = archs.with_options(arch, {"pos": told.options["pos"]})
    return _fitted(trunk, arch, form, folds)


# --- which model ---


def signature(trunk: FoundTimm, tensors: Tensors) -> str:
    """'384/16', '1536/14+reg+glu', '96x27+grn': what tells the models of a format apart."""
    names = list(trunk.local)
    if "stages" in trunk.layout.blocks:
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
    if _registers(trunk):
        out += "+reg"
    gates = ("mlp.w3.weight", "mlp.weights_in.weight", "mlp.gate_proj.weight", "mlp.fc1_g.weight")
    return out + ("+glu" if any(name.endswith(gates) for name in names) else "")


def _registers(trunk: FoundTimm) -> bool:
    return any(
        name.endswith(("register_tokens", "storage_tokens", "reg_token")) for name in trunk.local
    )


def _stages(trunk: FoundTimm, tensors: Tensors) -> str:
    widths: Counter[int] = Counter()
    third = set()
    for name, key in trunk.local.items():
        parts = name.removeprefix("encoder.").split(".")
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


def _known(trunk: FoundTimm, tensors: Tensors, form: Format, told: Told, folds: bool) -> str:
    """The format's model of this width and patch, with what the file and `told` say of it."""
    key = signature(trunk, tensors)
    model = form.timm.get(key)
    if model is None:  # the patch or a mark may be what is damaged
        like = [name for each, name in form.timm.items() if each.split("/")[0] == key.split("/")[0]]
        if not like or "/" not in key or _has_patch(trunk, tensors):
            raise BadInput(
                f"holds {layouts.described(trunk)}, format {form.name}, of width and patch {key};"
                f" known are {', '.join(form.timm)}; say which model it is with --arch timm:NAME"
            )
        model = like[0]
    if "{}" in model:
        model = model.format(_clip(form, told))
    arch = timm_trunk.PREFIX + model
    name = timm_trunk.parse(arch)
    options = {**_size(trunk, tensors, arch, folds), **_differences(arch, told)}
    return str(name._replace(options={**name.options, **options}))


def _has_patch(trunk: FoundTimm, tensors: Tensors) -> bool:
    return any(tensors[key].dim() == 4 for key in trunk.local.values())


def _clip(form: Format, told: Told) -> str:
    kinds = {"quick_gelu": "clip_quickgelu", "gelu": "clip"}
    if told.activation in kinds:
        return kinds[told.activation]
    raise BadInput(
        f"format {form.name}: neither the file nor one beside it tells the activation; say it by"
        " --arch timm:vit_base_patch16_clip_quickgelu_224 (OpenAI's, MetaCLIP's, DFN's) or"
        " --arch timm:vit_base_patch16_clip_224 (LAION's, DataComp's), or the like of its size"
    )


def _size(trunk: FoundTimm, tensors: Tensors, arch: str, folds: bool) -> dict[str, str]:
    """`img_size` where the file has position embeddings for images of another size than the
    model's."""
    blank = archs.tensors(arch)
    if "pos_embed" not in blank or "patch_embed.proj.weight" not in blank:
        return {}
    sources = layouts.pieces(trunk.layout, blank, trunk.local)
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


def _differences(arch: str, told: Told) -> dict[str, str]:
    """Heads and eps where a configuration says others than the model has.

    Not a smaller eps: the Hub's conversions took its default, 1e-12, for what was trained with
    1e-6.
    """
    if not told.options.keys() & {"num_heads", "eps"}:
        return {}
    with torch.device("meta"):
        model: torch.nn.Module = timm_trunk.create(timm_trunk.parse(arch))
    out = {}
    heads, eps = told.options.get("num_heads"), told.options.get("eps")
    blocks = getattr(model, "blocks", None)
    if heads is not None and blocks is not None and int(heads) != blocks[0].attn.num_heads:
        out["num_heads"] = heads
    norm = getattr(model, "norm", None)
    if eps is not None and isinstance(norm, torch.nn.LayerNorm) and float(eps) > 1.5 * norm.eps:
        out["eps"] = eps
    return out


# --- which tensors ---


def _fitted(trunk: FoundTimm, arch: str, form: Format | None, folds: bool) -> FoundTimm:
    blank = archs.tensors(arch)
    sources = layouts.pieces(trunk.layout, blank, trunk.local)
    if folds and "pos_embed" in blank and "cls_token" in blank:
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
        trunk,
        arch=arch,
        keys=keys,
        extra=tuple(extra),
        heads=tuple(heads),
        sources=sources,
        folds=folds,
    )


# --- what contradicts the model ---


def contradictions(trunk: FoundTimm, tensors: Tensors) -> list[str]:
    """Keys that the trunk leaves out, though they would change its features."""
    out = []
    for name, key in trunk.local.items():
        if not name.endswith(_LOOKED_INTO) and not name.startswith("norms.3."):
            continue
        if tensors[key].numel() > _SMALL:  # a file may pretend to any size
            out.append(f"{key} ({tensors[key].numel()} elements)")
        elif name.endswith("rope_embed.periods") and not _usual_periods(tensors[key]):
            out.append(f"{key} (not 100 ** (i / n), the periods of timm's model)")
        elif name.endswith("attn.qkv.bias") and _two_thirds(trunk, name):
            if not _masked(tensors[key], tensors.get(f"{key}_mask")):
                out.append(f"{key} (not its keys' third alone is masked)")
        elif name.startswith("norms.3."):
            twin = trunk.local.get(name.replace("norms.3.", "norm."))
            if twin is not None and not torch.equal(tensors[key], tensors[twin]):
                out.append(f"{key} (differs from {twin}, whose copy it should be)")
    return out


_LOOKED_INTO = ("rope_embed.periods", "attn.qkv.bias", "attn.qkv.bias_mask")
_SMALL = 1_000_000  # elements


def _usual_periods(periods: Tensor) -> bool:
    """facebookresearch/dinov3: dinov3/layers/rope_position_encoding.py, base 100; kept in bf16."""
    count = periods.numel()
    expected = 100 ** (torch.arange(count) / max(count, 1))
    same = periods.shape == expected.shape
    return same and torch.allclose(periods.float(), expected, rtol=1e-2)


def _two_thirds(trunk: FoundTimm, name: str) -> bool:
    """Whether the model takes the queries' and the values' third of this bias alone."""
    pieces = [each for parts in trunk.sources.values() for each in parts]
    return any(each.key == name and each.parts == 3 for each in pieces)


def _masked(bias: Tensor, mask: Tensor | None) -> bool:
    """Whether all of a bias (3 * D) counts but the keys' third."""
    if mask is None:
        return not bool((bias.chunk(3)[1] != 0).any())
    if mask.shape != bias.shape:
        return False
    queries, keys, values = mask.float().chunk(3)
    return bool((queries == 1).all() and (keys == 0).all() and (values == 1).all())


# --- what its format says of it ---


def widths(trunk: FoundTimm) -> tuple[int, ...]:
    """Of its features: a transformer's, or a ConvNeXt's last."""
    for name in ("norm.weight", "head.norm.weight"):
        blank = archs.tensors(trunk.arch)
        if name in blank:
            return tuple(blank[name].shape)
    return (0,)


def rule(form: Format | None, trunk: FoundTimm) -> str:
    """By which its authors resize its position embeddings; empty where it has none, or nobody
    says."""
    if form is None or "pos_embed" not in archs.tensors(trunk.arch):
        return ""
    if form.positions_with_registers and _registers(trunk):
        return form.positions_with_registers
    return form.positions
