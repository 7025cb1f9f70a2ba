"""The published formats as data: where each keeps its trunks, what it calls the tensors, what else it implies.

A trunk is found by its names, not by the file's extension: `find_trunks` looks under every prefix of every table of
tensors for a ResNet in one of four dialects, and `recognise` says which format has its trunks in exactly those places.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from backbench.images.preprocess import CIFAR_MEAN, SWAV_STD, Pixels
from backbench.weights.resnet import ARCHS, trunk_shapes

# --- the names that a trunk's tensors have ---


def is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


def _sequential(first_layer: int) -> Callable[[str], str]:
    def rename(key: str) -> str:
        part, rest = key.split(".", 1)
        position = {"conv1": 0, "bn1": 1}.get(
            part, first_layer + int(part[-1]) - 1 if part[-1].isdigit() else 0
        )
        return f"{position}.{rest}"

    return rename


def detectron2_name(key: str) -> str:
    """layer1.0.bn2.weight -> res2.0.conv2.norm.weight; detectron2/modeling/backbone/resnet.py names the modules."""
    parts = key.split(".")
    if parts[0] == "conv1":
        return f"stem.{key}"
    if parts[0] == "bn1":
        return f"stem.conv1.norm.{parts[1]}"
    stage, block, part, *rest = parts
    inner = {"downsample.0": "shortcut", "downsample.1": "shortcut.norm"}
    name = (
        inner[f"{part}.{rest.pop(0)}"]
        if part == "downsample"
        else re.sub(r"^bn(\d)$", r"conv\1.norm", part)
    )
    return ".".join([f"res{int(stage[-1]) + 1}", block, name, *rest])


@dataclass(frozen=True)
class Dialect:
    name: str
    rename: Callable[[str], str]  # our name -> this dialect's
    inside: str  # regex of a name's start: such a tensor is part of the trunk, whether known or not


DIALECTS = (
    Dialect("torchvision", lambda key: key, r"(conv|bn|norm|layer|downsample)\d"),
    # nn.Sequential of a ResNet's children: conv1 0, bn1 1, relu 2, max-pool 3, layer1 4
    Dialect("sequential", _sequential(4), r"\d+\."),
    # the same of a ResNet without max-pool: layer1 3
    Dialect("sequential without max-pool", _sequential(3), r"\d+\."),
    Dialect("detectron2", detectron2_name, r"(stem\.conv|res\d)"),
)


@functools.cache
def names(dialect: Dialect, arch: str) -> dict[str, str]:
    """The dialect's name -> ours, for every tensor of the trunk."""
    return {dialect.rename(key): key for key in trunk_shapes(arch)}


# --- finding trunks ---

Tables = dict[str, dict[str, Tensor]]


def tables(tree: Any) -> Tables:
    """Every dict in the file that holds tensors under text keys, by its dotted path ('' for the file itself)."""
    out: Tables = {}
    seen: set[int] = set()

    def walk(value: Any, path: str, depth: int) -> None:
        if id(value) in seen or depth > 20:
            return
        if isinstance(value, Mapping):
            seen.add(id(value))
            found = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, Tensor)}
            if found:
                out[path] = found
            for key, child in value.items():
                if isinstance(child, Mapping | list | tuple):
                    walk(child, f"{path}.{key}" if path else str(key), depth + 1)
        elif isinstance(value, list | tuple):
            seen.add(id(value))
            for index, child in enumerate(value):
                if isinstance(child, Mapping | list | tuple):
                    walk(child, f"{path}.{index}" if path else str(index), depth + 1)

    walk(tree, "", 0)
    return out


def unwrapped(key: str) -> str:
    """The key without what DistributedDataParallel and torch.compile put before it."""
    return re.sub(r"^((module|_orig_mod)\.)+", "", key)


@dataclass(frozen=True)
class FoundTrunk:
    """A ResNet under one prefix of one table. `keys`: our name -> the file's key."""

    table: str
    prefix: str
    dialect: Dialect
    arch: str
    keys: Mapping[str, str]
    extra: tuple[str, ...]  # keys inside the trunk that no ResNet of this architecture has
    heads: tuple[str, ...]  # the other keys under the prefix

    @property
    def place(self) -> str:
        """'table:prefix', the prefix without `module.`: what formats are recognised by."""
        return f"{self.table}:{unwrapped(self.prefix)}"

    @property
    def label(self) -> str:
        return shown(f"{self.table + ': ' if self.table else ''}{self.prefix or '(no prefix)'}")

    @property
    def missing(self) -> list[str]:
        return [k for k in trunk_shapes(self.arch) if k not in self.keys and not is_counter(k)]


_LONGEST = (
    5  # parts of the longest names: layer1.0.downsample.0.weight, res2.0.conv1.norm.running_mean
)
_FEWEST, _MOST = (
    20,
    32,
)  # names before a prefix is looked at; prefixes looked at (a file may have been made to delay)


def find_trunks(found: Tables) -> list[FoundTrunk]:
    """All ResNets in the file of which at least half the tensors are there, in the file's order."""
    out = []
    for table, tensors in found.items():
        votes: Counter[tuple[str, int]] = Counter()
        for key in tensors:
            parts = key.rsplit(".", _LONGEST)  # what stands further left cannot be part of a name
            starts = [len(key) - len(".".join(parts[i:])) for i in range(len(parts))]
            for index, dialect in enumerate(DIALECTS):
                known = _all_names(dialect)
                start = next((s for s in starts if key[s:] in known), None)
                if start is not None:
                    votes[key[:start], index] += 1
        best: dict[str, tuple[int, FoundTrunk]] = {}
        for (prefix, index), count in votes.most_common(_MOST):
            if count < _FEWEST:
                break
            score, trunk = _fit(table, prefix, DIALECTS[index], tensors)
            if score > 0 and score > best.get(prefix, (0, None))[0]:
                best[prefix] = score, trunk
        order = {key: position for position, key in enumerate(tensors)}
        trunks = [trunk for _, trunk in best.values()]
        out += sorted(trunks, key=lambda trunk: min(order[key] for key in trunk.keys.values()))
    return out


@functools.cache
def _all_names(dialect: Dialect) -> frozenset[str]:
    return frozenset(name for arch in ("resnet34", "resnet152") for name in names(dialect, arch))


def _fit(
    table: str, prefix: str, dialect: Dialect, tensors: Mapping[str, Tensor]
) -> tuple[int, FoundTrunk]:
    """The architecture that explains most of the names under the prefix; score: tensors there minus tensors absent."""
    local = {key[len(prefix) :]: key for key in tensors if key.startswith(prefix)}
    scores = {}
    for arch in ARCHS:
        wanted = {name for name in names(dialect, arch) if not is_counter(name)}
        here = sum(name in local for name in wanted)
        beyond = sum(
            name not in wanted
            for name in local
            if re.match(dialect.inside, name) and not is_counter(name)
        )
        scores[arch] = 2 * here - len(wanted) - beyond
    arch = max(scores, key=lambda name: scores[name])
    ours = names(dialect, arch)
    wanted_here = sum(name in local for name in ours if not is_counter(name))
    unknown = [name for name in local if name not in ours]
    inside = [name for name in unknown if re.match(dialect.inside, name)]
    trunk = FoundTrunk(
        table,
        prefix,
        dialect,
        arch,
        {ours[name]: key for name, key in local.items() if name in ours},
        tuple(local[name] for name in inside),
        tuple(local[name] for name in unknown if name not in set(inside)),
    )
    return 2 * wanted_here - sum(not is_counter(name) for name in ours), trunk


# --- the formats ---

# The CIFAR statistics that ARB's CIFAR/main.py and solo-learn's classification_dataloader.py share
_CIFAR_ROUNDED = Pixels(CIFAR_MEAN, (0.247, 0.243, 0.261))
_SWAV = Pixels(std=SWAV_STD)


@dataclass(frozen=True, kw_only=True)
class Format:
    """`encoders`: name -> places 'table:prefix' of that trunk; several places are the same weights written twice.

    A place without a table stands for the usual ones (`_USUAL`). `needs`: patterns of other keys, or of '@key' at the
    file's top, that must be there. The first format that fits is the one, so special ones stand before general ones.
    """

    name: str
    source: str  # repository: file that builds the modules, file that saves them
    method: str  # what Checkpoint.method becomes, unless --method says otherwise
    also: str = ""  # whose files look just the same
    encoders: Mapping[str, tuple[str, ...]]
    default: str
    needs: tuple[str, ...] = ()
    test: Callable[[Tables, list[FoundTrunk]], bool] | None = None
    dialects: tuple[str, ...] = ("torchvision",)
    pixels: Pixels = field(default_factory=Pixels)
    small_pixels: Pixels | None = None  # with a 3x3 conv1
    conv3: str | None = (
        None  # what a 3x3 conv1 means here, where one may be known: its padding is not in the file
    )
    epoch: tuple[str, int] = ("epoch", 0)  # where the finished epochs are counted, and what to add


# Lightning counts finished epochs here; its `epoch` was one more before version 1.6
_LIGHTNING = ("loops.fit_loop.epoch_progress.current.processed", 0)
_USUAL = ("", "state_dict", "model", "model_state_dict", "net")
_SEQUENTIAL = ("sequential",)


def _queue_per_crop(found: Tables, trunks: list[FoundTrunk]) -> bool:
    """LORAC and MoCo-M keep one queue for each assigned crop: (2, d, K) where MoCo has (d, K)."""
    queues = [
        t for tensors in found.values() for key, t in tensors.items() if unwrapped(key) == "queue"
    ]
    return any(queue.dim() == 3 for queue in queues)


def _small_stem(found: Tables, trunks: list[FoundTrunk]) -> bool:
    return all(stem_shape(found, trunk) == (64, 3, 3, 3) for trunk in trunks)


def stem_shape(found: Tables, trunk: FoundTrunk) -> tuple[int, ...] | None:
    tensor = found[trunk.table].get(trunk.keys.get("conv1.weight", ""))
    return None if tensor is None else tuple(tensor.shape)


FORMATS: tuple[Format, ...] = (
    Format(
        name="detectron2",
        source="facebookresearch/detectron2: modeling/backbone/resnet.py, tools/convert-torchvision-to-d2.py",
        also="facebookresearch/moco detection/convert-pretrain-to-detectron2.py",
        method="unknown",
        encoders={"backbone": ("", "backbone.bottom_up.", "backbone.")},
        default="backbone",
        dialects=("detectron2",),
        epoch=("", 0),
    ),
    Format(
        name="lorac",
        source="ssl-codelab/lorac: models/moco_m.py, main_lorac.py; pixels: src/multicropdataset.py",
        also="MoCo-M (--method moco_m)",
        method="lorac",
        encoders={"query": ("encoder_q.",), "key": ("encoder_k.",)},
        default="query",
        test=_queue_per_crop,
        pixels=_SWAV,
    ),
    Format(
        name="moco",
        source="facebookresearch/moco: moco/builder.py, main_moco.py",
        also="JCL (--method jcl), MoCo v1",
        method="moco",
        encoders={"query": ("encoder_q.",), "key": ("encoder_k.",)},
        default="query",
    ),
    Format(
        name="moco-v3",
        source="facebookresearch/moco-v3: moco/builder.py, main_moco.py",
        method="moco_v3",
        encoders={"query": ("base_encoder.",), "key": ("momentum_encoder.",)},
        default="query",
        needs=("predictor.*",),
    ),
    Format(
        name="mio",
        source="miossl/miossl: miossl/mio.py, miossl/trainer.py, miossl/utils.py; pixels: miossl/dataloader_modules.py",
        method="mio",
        encoders={"encoder": ("base_encoder.", "net.base_encoder.")},
        default="encoder",
        conv3="conv3_p0",
        epoch=("", 0),
    ),
    Format(
        name="deepcluster-v2",
        source="facebookresearch/swav: src/resnet50.py, main_deepclusterv2.py",
        method="deepcluster_v2",
        encoders={"trunk": ("",)},
        default="trunk",
        needs=("prototypes.prototypes*",),
        pixels=_SWAV,
    ),
    Format(
        name="swav",
        source="facebookresearch/swav: src/resnet50.py, main_swav.py; pixels: src/multicropdataset.py",
        method="swav",
        encoders={"trunk": ("",)},
        default="trunk",
        needs=("prototypes.*",),
        pixels=_SWAV,
    ),
    Format(
        name="dino",
        source="facebookresearch/dino: utils.py (MultiCropWrapper), main_dino.py",
        method="dino",
        encoders={"student": ("student:backbone.",), "teacher": ("teacher:backbone.",)},
        default="teacher",
    ),
    Format(
        name="simsiam",
        source="facebookresearch/simsiam: simsiam/builder.py, main_simsiam.py",
        method="simsiam",
        encoders={"encoder": ("encoder.",)},
        default="encoder",
        needs=("encoder.fc.*", "predictor.*"),
    ),
    Format(
        name="arb-cifar",
        source="Sherrylone/Align_Representation_with_Base: CIFAR/main.py",
        method="arb",
        encoders={"backbone": ("model:backbone.",)},
        default="backbone",
        needs=("projector.*",),
        test=_small_stem,
        small_pixels=_CIFAR_ROUNDED,
        conv3="conv3_p2",
    ),
    Format(
        name="barlow-twins",
        source="facebookresearch/barlowtwins: main.py",
        also="ARB on ImageNet (Sherrylone/Align_Representation_with_Base: ImageNet/main.py; --method arb)",
        method="barlow_twins",
        encoders={"backbone": ("model:backbone.",)},
        default="backbone",
        needs=("projector.*", "bn.running_mean"),
    ),
    Format(
        name="vicreg",
        source="facebookresearch/vicreg: resnet.py, main_vicreg.py",
        method="vicreg",
        encoders={"backbone": ("model:backbone.",)},
        default="backbone",
        needs=("projector.*",),
    ),
    Format(
        name="cllr",
        source="functioncs/CLLR: model.py, cl_train.py; pixels: utils.py",
        method="cllr",
        encoders={"encoder": ("f.",)},
        default="encoder",
        needs=("g.*", "r"),
        dialects=("sequential without max-pool",),
        pixels=Pixels(CIFAR_MEAN, (0.2023, 0.1994, 0.2010)),
        conv3="conv3",
        epoch=("", 0),
    ),
    Format(
        name="vissl",
        source="facebookresearch/vissl: vissl/models/trunks/resnext.py, vissl/hooks/{log,moco,swav_momentum}_hooks.py",
        method="vissl",
        encoders={
            "trunk": tuple(
                f"{table}:{prefix}_feature_blocks."
                for table in ("classy_state_dict.base_model.model.trunk", "model_state_dict", "")
                for prefix in ("", "base_model.")
            ),
            "momentum": tuple(
                f"{table}:{name}.trunk._feature_blocks."
                for table in ("loss", "classy_state_dict.loss")
                for name in (
                    "moco_encoder",
                    "momentum_encoder",
                    "momentum_teacher",
                    "momentum_teacher.module",
                )
            ),
        },
        default="trunk",
        epoch=("train_phase_idx", 1),
    ),
    Format(
        name="solo-learn",
        source="vturrisi/solo-learn: solo/methods/base.py (a CIFAR conv1 has padding 2)",
        method="solo_learn",
        encoders={
            "online": ("state_dict:backbone.", "state_dict:encoder."),
            "momentum": ("state_dict:momentum_backbone.", "state_dict:momentum_encoder."),
        },
        default="online",
        needs=("@pytorch-lightning_version", "classifier.*"),
        small_pixels=_CIFAR_ROUNDED,
        conv3="conv3_p2",
        epoch=_LIGHTNING,
    ),
    Format(
        name="lightly",
        source="lightly-ai/lightly: examples/pytorch_lightning, benchmarks/imagenet/resnet50",
        method="lightly",
        encoders={
            "online": ("state_dict:backbone.",),
            "student": ("state_dict:student_backbone.",),
            "momentum": (
                "state_dict:backbone_momentum.",
                "state_dict:key_backbone.",
                "state_dict:teacher_backbone.",
            ),
        },
        default="online",
        needs=("@pytorch-lightning_version",),
        dialects=("torchvision", "sequential"),
        epoch=_LIGHTNING,
    ),
    Format(
        name="mmselfsup",
        source="open-mmlab/mmselfsup: mmselfsup/models/algorithms (0.9, 1.0); open-mmlab/mmpretrain: models/selfsup",
        also="mmpretrain",
        method="mmselfsup",
        encoders={
            "online": tuple(
                f"state_dict:{prefix}"
                for prefix in (
                    "backbone.",
                    "encoder_q.0.",
                    "online_net.0.",
                    "base_encoder.0.",
                    "encoder.0.",
                )
            ),
            "momentum": tuple(
                f"state_dict:{prefix}0."
                for name in ("encoder_k", "target_net", "momentum_encoder")
                for prefix in (f"{name}.", f"{name}.module.")
            ),
        },
        default="online",
        needs=("@meta",),
        conv3="conv3",  # mmpretrain/models/backbones/resnet_cifar.py: padding 1
        epoch=("meta.epoch", 0),
    ),
    Format(
        name="byol (sthalles)",
        source="sthalles/PyTorch-BYOL: models/resnet_base_network.py, trainer.py",
        method="byol",
        encoders={
            "online": ("online_network_state_dict:encoder.",),
            "target": ("target_network_state_dict:encoder.",),
        },
        default="online",
        dialects=_SEQUENTIAL,
        epoch=("", 0),
    ),
    Format(
        name="byol (yaox12)",
        source="yaox12/BYOL-PyTorch: model/byol_model.py, model/basic_modules.py, trainer/byol_trainer.py",
        method="byol",
        encoders={
            "online": ("model:online_network.encoder.",),
            "target": ("model:target_network.encoder.",),
        },
        default="online",
        dialects=_SEQUENTIAL,
    ),
    Format(
        name="byol (lucidrains)",
        source="lucidrains/byol-pytorch: byol_pytorch/byol_pytorch.py",
        method="byol",
        encoders={"online": ("online_encoder.net.", "net."), "target": ("target_encoder.net.",)},
        default="online",
        needs=("online_predictor.*",),
        epoch=("", 0),
    ),
    Format(
        name="byol (DeepMind, converted)",
        source="yaox12/BYOL-PyTorch: utils/load_and_convert.py",
        method="byol",
        encoders={"online": ("online_backbone:",), "target": ("target_backbone:",)},
        default="online",
        epoch=("", 0),
    ),
    Format(
        name="timm training",
        source="huggingface/pytorch-image-models: timm/utils/checkpoint_saver.py",
        method="supervised",
        encoders={"model": ("state_dict:",), "ema": ("state_dict_ema:",)},
        default="ema",
        needs=("@state_dict_ema",),
        epoch=("epoch", 1),
    ),
    Format(
        name="torchvision training",
        source="pytorch/vision: references/classification/train.py",
        method="supervised",
        encoders={"model": ("model:",), "ema": ("model_ema:",)},
        default="ema",
        needs=("@model_ema",),
        epoch=("epoch", 1),
    ),
    Format(
        name="torchvision",
        source="pytorch/vision: torchvision/models/resnet.py",
        also="timm (huggingface/pytorch-image-models: timm/models/resnet.py)",
        method="supervised",
        encoders={"trunk": ("",)},
        default="trunk",
        needs=("fc.weight",),
    ),
    Format(
        name="plain trunk",
        source="facebookresearch/barlowtwins: main.py, facebookresearch/vicreg: main_vicreg.py (the trunk alone)",
        also="ARB, DINO, mmselfsup's extracted backbones, lucidrains/byol-pytorch's trainer",
        method="unknown",
        encoders={"trunk": ("",)},
        default="trunk",
    ),
)


def _places(spec: str) -> tuple[str, ...]:
    return (spec,) if ":" in spec else tuple(f"{table}:{spec}" for table in _USUAL)


def recognise(
    trunks: list[FoundTrunk], found: Tables, tree: Any
) -> tuple[Format, dict[str, list[FoundTrunk]]] | None:
    """The format that accounts for every trunk in the file, with its encoders; None where there is none."""
    marks = {unwrapped(key) for tensors in found.values() for key in tensors}
    if isinstance(tree, Mapping):
        marks |= {f"@{key}" for key in tree}
    for form in FORMATS:
        encoders: dict[str, list[FoundTrunk]] = {}
        for trunk in trunks:
            for name, specs in form.encoders.items():
                if trunk.dialect.name in form.dialects and any(
                    trunk.place in _places(spec) for spec in specs
                ):
                    encoders.setdefault(name, []).append(trunk)
        if not trunks or sum(map(len, encoders.values())) != len(trunks):
            continue
        if all(fnmatch.filter(marks, need) for need in form.needs) and (
            form.test is None or form.test(found, trunks)
        ):
            return form, encoders
    return None


def nearest_format(found: Tables) -> Format | None:
    """The format whose places look most like the prefixes in this file, for error messages."""
    keys = (unwrapped(key[:200]) for tensors in found.values() for key in tensors)
    prefixes = list(dict.fromkeys(key.split(".")[0] for key in keys))[:100]
    best, score = None, 0.6
    for form in FORMATS:
        for spec in (spec for specs in form.encoders.values() for spec in specs):
            start = spec.split(":")[-1].split(".")[0]
            for prefix in prefixes if start else ():
                ratio = difflib.SequenceMatcher(None, start, prefix).ratio()
                if ratio > score:
                    best, score = form, ratio
    return best


def shown(text: str) -> str:
    """A stranger's text for the terminal: printable, and not longer than a line."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 160 else f"{text[:150]}..."


def first_names(items: Iterable[str], count: int = 3) -> str:
    """'a, b, c and 7 more'"""
    listed = [shown(item) for item in items]
    return ", ".join(listed[:count]) + (
        f" and {len(listed) - count} more" if len(listed) > count else ""
    )
