"""The keys of Detectron2's config that its engine does not honour.

A key that is accepted and then ignored would stand in a protocol without having decided anything.
So a refused key is an error with any other value than Detectron2's own; a neutral one (protocol.NEUTRAL) may
differ between two runs of one protocol; with every other key another value changes what runs. A test
changes every key that Detectron2 has and holds it to that.

The torchvision engine needs no such table: it reads what configs/detection/_base_rcnn_fpn.yaml
states and dialect.DEFAULTS holds, and refuses everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from backbench.errors import BadInput
from detection.dialect import Given, Value

# Key, or a whole group with a dot at its end -> why no other value than Detectron2's is taken
_ONE_STAGE = "no detector here has it"
_PROPOSALS = "proposals come from the RPN"
_TRUNK = "the checkpoint's trunk has no other form"
REFUSED: dict[str, str] = {
    "MODEL.LOAD_PROPOSALS": _PROPOSALS,
    "MODEL.SEM_SEG_HEAD.": _ONE_STAGE,
    "MODEL.PANOPTIC_FPN.": _ONE_STAGE,
    "MODEL.RETINANET.": _ONE_STAGE,
    "MODEL.RESNETS.NUM_GROUPS": _TRUNK,
    "MODEL.RESNETS.WIDTH_PER_GROUP": _TRUNK,
    "MODEL.RESNETS.RES5_DILATION": _TRUNK,
    "MODEL.RESNETS.STEM_OUT_CHANNELS": _TRUNK,
    "MODEL.RESNETS.DEFORM_ON_PER_STAGE": _TRUNK,
    "MODEL.RESNETS.DEFORM_MODULATED": _TRUNK,
    "MODEL.RESNETS.DEFORM_NUM_GROUPS": _TRUNK,
    "MODEL.ANCHOR_GENERATOR.NAME": "boxes are not rotated",
    "MODEL.ANCHOR_GENERATOR.ANGLES": "boxes are not rotated",
    "MODEL.PROPOSAL_GENERATOR.NAME": _PROPOSALS,
    "MODEL.RPN.HEAD_NAME": "there is no other head",
    "MODEL.ROI_BOX_HEAD.USE_FED_LOSS": "it needs LVIS's counts of its classes",
    "MODEL.ROI_BOX_HEAD.FED_LOSS_FREQ_WEIGHT_POWER": "it needs LVIS's counts of its classes",
    "MODEL.ROI_BOX_HEAD.FED_LOSS_NUM_CLASSES": "it needs LVIS's counts of its classes",
    "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE": "an image needs one marked keypoint",
    "DATASETS.PROPOSAL_FILES_TRAIN": _PROPOSALS,
    "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN": _PROPOSALS,
    "DATASETS.PROPOSAL_FILES_TEST": _PROPOSALS,
    "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST": _PROPOSALS,
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS": "images without objects are not trained on",
    "SOLVER.REFERENCE_WORLD_SIZE": "state batch, rate and iterations as they shall be",
    "TEST.EXPECTED_RESULTS": "tolerances are in the leaderboard",
    "TEST.AUG.": "an image is looked at once",
    "CUDNN_BENCHMARK": "it makes runs differ",
    "FLOAT32_PRECISION": "use SOLVER.AMP",
    "VIS_PERIOD": "pictures are in RUN/pictures",
    "GLOBAL.HACK": "it does nothing",
}


def why_refused(key: str) -> str | None:
    """The reason in the key's own row or its group's; None for a key that is not refused."""
    group = key.rpartition(".")[0]
    while group:
        if f"{group}." in REFUSED:
            return REFUSED[f"{group}."]
        group = group.rpartition(".")[0]
    return REFUSED.get(key)


def check(given: Given, defaults: Mapping[str, Value]) -> None:
    """Raise BadInput for a refused key with another value than in `defaults`, Detectron2's whole
    config, flat."""
    for key, value in given.values.items():
        reason = why_refused(key)
        if reason is None or key not in defaults:
            continue  # a key that Detectron2 has not is refused where it is merged
        if _as_lists(value) != _as_lists(defaults[key]):
            raise BadInput(
                f"{given.path}: {key} {value!r} would decide nothing here: {reason}; "
                f"leave it at {defaults[key]!r}"
            )
    if given.get("VERSION", 2) != 2:
        raise BadInput(f"{given.path}: VERSION {given.get('VERSION')}: only Detectron2's 2")


def _as_lists(value: Value) -> Value:
    """Turn tuples into lists, so that the two compare equal."""
    return [_as_lists(v) for v in value] if isinstance(value, list | tuple) else value
