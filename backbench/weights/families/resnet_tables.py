"""ResNets as data: architectures, stems, and the published formats.

A format's row says where it keeps its trunks, what it calls the tensors, and what else it implies.
The rows have no order (`formats.recognise`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import CIFAR_MEAN, SWAV_STD, Pixels
from backbench.weights.family import Format, Shape, Tables, TrunkInFile
from backbench.weights.tensor_names import unwrapped

if TYPE_CHECKING:
    from torch import Tensor

# Name -> torchvision's kind of block, and how many each stage has
ARCHS = {
    "resnet18": ("BasicBlock", (2, 2, 2, 2)),
    "resnet34": ("BasicBlock", (3, 4, 6, 3)),
    "resnet50": ("Bottleneck", (3, 4, 6, 3)),
    "resnet101": ("Bottleneck", (3, 4, 23, 3)),
    "resnet152": ("Bottleneck", (3, 8, 36, 3)),
}
# Multiplies the channels of all stages, not the stem's: `resnet18,width=0.25`
WIDTHS = {"0.125": 0.125, "0.25": 0.25, "0.5": 0.5, "1": 1.0, "2": 2.0}
# conv3: 3x3 stride 1 and no max-pool, for small images. The padding differs between papers:
# 1 is SimCLR's (appendix B.9), 0 is what MIO's released code has, 2 what ARB's has.
STEMS = {"imagenet": None, "conv3": 1, "conv3_p0": 0, "conv3_p2": 2}
SMALL_CONV1 = (64, 3, 3, 3)  # the shape of a conv3 stem's convolution


def check_stem(stem: str) -> None:
    """Raise BadInput for a stem that no ResNet here has."""
    if stem not in STEMS:
        raise BadInput(f"unknown stem '{stem}'; {nearest(stem, STEMS)}")


# --- formats ---

# The CIFAR statistics that ARB's CIFAR/main.py and solo-learn's classification_dataloader.py share
_CIFAR_ROUNDED = Pixels(CIFAR_MEAN, (0.247, 0.243, 0.261))
_SWAV = Pixels(std=SWAV_STD)


# Lightning counts finished epochs here; its `epoch` was one more before version 1.6
_LIGHTNING = ("loops.fit_loop.epoch_progress.current.processed", 0)
_SEQUENTIAL = ("sequential",)


def _queue_per_crop(tables: Tables, trunks: list[TrunkInFile]) -> bool:
    """LORAC and MoCo-M keep one queue for each assigned crop: (2, d, K) where MoCo has (d, K)."""
    entries = [entry for tensors in tables.values() for entry in tensors.items()]
    return any(unwrapped(key) == "queue" and tensor.dim() == 3 for key, tensor in entries)


def _small_stem(tables: Tables, trunks: list[TrunkInFile]) -> bool:
    """The conv1 of every trunk is 3x3."""
    return all(conv1_shape(trunk.keys, tables[trunk.table]) == SMALL_CONV1 for trunk in trunks)


def conv1_shape(keys: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Shape:
    """The shape of a trunk's first convolution; empty where the file lacks it."""
    tensor = tensors.get(keys.get("conv1.weight", ""))
    return () if tensor is None else tuple(tensor.shape)


def _below(tables: Sequence[str], prefixes: Sequence[str]) -> tuple[str, ...]:
    """Every place of the kind 'table:prefix'."""
    return tuple(f"{table}:{prefix}" for table in tables for prefix in prefixes)


# A row: whose it is, where its trunks stand, what tells it from others, what it implies
# fmt: off
FORMATS: tuple[Format, ...] = (
    Format(
        name="detectron2",
        source="facebookresearch/detectron2: modeling/backbone/resnet.py, tools/convert-torchvision-to-d2.py",
        also="facebookresearch/moco detection/convert-pretrain-to-detectron2.py", method="unknown",
        encoders={"backbone": ("", "backbone.bottom_up.", "backbone.")}, dialects=("detectron2",),
        epoch=("", 0),
    ),
    Format(
        name="lorac",
        source="ssl-codelab/lorac: models/moco_m.py, main_lorac.py; pixels: src/multicropdataset.py",
        also="MoCo-M (--method moco_m)", method="lorac",
        encoders={"query": ("encoder_q.",), "key": ("encoder_k.",)}, refines=("moco",),
        test=_queue_per_crop, pixels=_SWAV,
    ),
    Format(
        name="moco", source="facebookresearch/moco: moco/builder.py, main_moco.py",
        also="JCL (--method jcl), MoCo v1", method="moco",
        encoders={"query": ("encoder_q.",), "key": ("encoder_k.",)},
    ),
    Format(
        name="moco-v3", source="facebookresearch/moco-v3: moco/builder.py, main_moco.py",
        method="moco_v3",
        encoders={"query": ("base_encoder.",), "key": ("momentum_encoder.",)}, refines=("mio",),
        needs=("predictor.*",),
    ),
    Format(
        name="mio",
        source="miossl/miossl: miossl/mio.py, miossl/trainer.py, miossl/utils.py; pixels: miossl/dataloader_modules.py",
        method="mio",
        encoders={"encoder": ("base_encoder.", "net.base_encoder.")}, conv3="conv3_p0",
        epoch=("", 0),
    ),
    Format(
        name="deepcluster-v2",
        source="facebookresearch/swav: src/resnet50.py, main_deepclusterv2.py",
        method="deepcluster_v2",
        encoders={"trunk": ("",)}, refines=("swav",), needs=("prototypes.prototypes*",),
        pixels=_SWAV,
    ),
    Format(
        name="swav",
        source="facebookresearch/swav: src/resnet50.py, main_swav.py; pixels: src/multicropdataset.py",
        method="swav",
        encoders={"trunk": ("",)}, refines=("plain trunk",), needs=("prototypes.*",), pixels=_SWAV,
    ),
    Format(
        name="dino", source="facebookresearch/dino: utils.py (MultiCropWrapper), main_dino.py",
        method="dino",
        encoders={"teacher": ("teacher:backbone.",), "student": ("student:backbone.",)},
    ),
    Format(
        name="simsiam", source="facebookresearch/simsiam: simsiam/builder.py, main_simsiam.py",
        method="simsiam",
        encoders={"encoder": ("encoder.",)}, needs=("encoder.fc.*", "predictor.*"),
    ),
    Format(
        name="arb-cifar", source="Sherrylone/Align_Representation_with_Base: CIFAR/main.py",
        method="arb",
        encoders={"backbone": ("model:backbone.",)}, refines=("barlow-twins", "vicreg"),
        needs=("projector.*",), test=_small_stem, small_pixels=_CIFAR_ROUNDED, conv3="conv3_p2",
    ),
    Format(
        name="barlow-twins", source="facebookresearch/barlowtwins: main.py",
        also="ARB on ImageNet (Sherrylone/Align_Representation_with_Base: ImageNet/main.py; --method arb)",
        method="barlow_twins",
        encoders={"backbone": ("model:backbone.",)}, refines=("vicreg",),
        needs=("projector.*", "bn.running_mean"),
    ),
    Format(
        name="vicreg", source="facebookresearch/vicreg: resnet.py, main_vicreg.py", method="vicreg",
        encoders={"backbone": ("model:backbone.",)}, needs=("projector.*",),
    ),
    Format(
        name="cllr", source="functioncs/CLLR: model.py, cl_train.py; pixels: utils.py",
        method="cllr",
        encoders={"encoder": ("f.",)}, needs=("g.*", "r"),
        dialects=("sequential without max-pool",),
        pixels=Pixels(CIFAR_MEAN, (0.2023, 0.1994, 0.2010)), conv3="conv3", epoch=("", 0),
    ),
    Format(
        name="vissl",
        source="facebookresearch/vissl: vissl/models/trunks/resnext.py, vissl/hooks/{log,moco,swav_momentum}_hooks.py",
        method="vissl",
        encoders={
            "trunk": _below(
                ("classy_state_dict.base_model.model.trunk", "model_state_dict", ""),
                ("_feature_blocks.", "base_model._feature_blocks."),
            ),
            "momentum": _below(
                ("loss", "classy_state_dict.loss"),
                ("moco_encoder.trunk._feature_blocks.", "momentum_encoder.trunk._feature_blocks.",
                 "momentum_teacher.trunk._feature_blocks.",
                 "momentum_teacher.module.trunk._feature_blocks."),
            ),
        },
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
        refines=("lightly",), needs=("@pytorch-lightning_version", "classifier.*"),
        small_pixels=_CIFAR_ROUNDED, conv3="conv3_p2", epoch=_LIGHTNING,
    ),
    Format(
        name="lightly",
        source="lightly-ai/lightly: examples/pytorch_lightning, benchmarks/imagenet/resnet50",
        method="lightly",
        encoders={
            "online": ("state_dict:backbone.",),
            "student": ("state_dict:student_backbone.",),
            "momentum": ("state_dict:backbone_momentum.", "state_dict:key_backbone.",
                         "state_dict:teacher_backbone."),
        },
        needs=("@pytorch-lightning_version",), dialects=("torchvision", "sequential"),
        epoch=_LIGHTNING,
    ),
    Format(
        name="mmselfsup",
        source="open-mmlab/mmselfsup: mmselfsup/models/algorithms (0.9, 1.0); open-mmlab/mmpretrain: models/selfsup",
        also="mmpretrain", method="mmselfsup",
        encoders={
            "online": _below(
                ("state_dict",),
                ("backbone.", "encoder_q.0.", "online_net.0.", "base_encoder.0.", "encoder.0."),
            ),
            "momentum": _below(
                ("state_dict",),
                ("encoder_k.0.", "encoder_k.module.0.", "target_net.0.", "target_net.module.0.",
                 "momentum_encoder.0.", "momentum_encoder.module.0."),
            ),
        },
        # mmpretrain/models/backbones/resnet_cifar.py: padding 1
        needs=("@meta",), conv3="conv3", epoch=("meta.epoch", 0),
    ),
    Format(
        name="byol (sthalles)",
        source="sthalles/PyTorch-BYOL: models/resnet_base_network.py, trainer.py", method="byol",
        encoders={
            "online": ("online_network_state_dict:encoder.",),
            "target": ("target_network_state_dict:encoder.",),
        },
        dialects=_SEQUENTIAL, epoch=("", 0),
    ),
    Format(
        name="byol (yaox12)",
        source="yaox12/BYOL-PyTorch: model/byol_model.py, model/basic_modules.py, trainer/byol_trainer.py",
        method="byol",
        encoders={
            "online": ("model:online_network.encoder.",),
            "target": ("model:target_network.encoder.",),
        },
        dialects=_SEQUENTIAL,
    ),
    Format(
        name="byol (lucidrains)", source="lucidrains/byol-pytorch: byol_pytorch/byol_pytorch.py",
        method="byol",
        encoders={"online": ("online_encoder.net.", "net."), "target": ("target_encoder.net.",)},
        needs=("online_predictor.*",), epoch=("", 0),
    ),
    Format(
        name="byol (DeepMind, converted)", source="yaox12/BYOL-PyTorch: utils/load_and_convert.py",
        method="byol",
        encoders={"online": ("online_backbone:",), "target": ("target_backbone:",)}, epoch=("", 0),
    ),
    Format(
        name="timm training",
        source="huggingface/pytorch-image-models: timm/utils/checkpoint_saver.py",
        method="supervised",
        encoders={"ema": ("state_dict_ema:",), "model": ("state_dict:",)},
        refines=("torchvision", "plain trunk"), needs=("@state_dict_ema",), epoch=("epoch", 1),
    ),
    Format(
        name="torchvision training", source="pytorch/vision: references/classification/train.py",
        method="supervised",
        encoders={"ema": ("model_ema:",), "model": ("model:",)},
        refines=("torchvision", "plain trunk"), needs=("@model_ema",), epoch=("epoch", 1),
    ),
    Format(
        name="torchvision", source="pytorch/vision: torchvision/models/resnet.py",
        also="timm (huggingface/pytorch-image-models: timm/models/resnet.py)", method="supervised",
        encoders={"trunk": ("",)}, refines=("plain trunk",), needs=("fc.weight",),
    ),
    Format(
        name="plain trunk",
        source="facebookresearch/barlowtwins: main.py, facebookresearch/vicreg: main_vicreg.py (the trunk alone)",
        also="ARB, DINO, mmselfsup's extracted backbones, lucidrains/byol-pytorch's trainer",
        method="unknown",
        encoders={"trunk": ("",)},
    ),
)
# fmt: on
