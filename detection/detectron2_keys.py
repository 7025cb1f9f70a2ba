"""Lists the keys of Detectron2's config that its engine honours, and refuses the others.

A key that is accepted and then ignored would stand in a protocol without having decided anything.
Therefore every key is of one of three kinds: an honoured key changes what runs; a neutral key
(protocol.NEUTRAL) may differ between two runs of one protocol; any other key must have Detectron2's
own value. A test changes every key.

The torchvision engine needs no such table: it reads what configs/detection/_base_rcnn_fpn.yaml
states and dialect.DEFAULTS holds, and refuses everything else.
"""

from collections.abc import Mapping

from backbench.detection.dialect import Given, Value
from backbench.detection.protocol import NEUTRAL
from backbench.errors import BadInput

# A word with a colon is the group of the keys that follow it.
_HONOURED = """
MODEL: MASK_ON KEYPOINT_ON META_ARCHITECTURE WEIGHTS PIXEL_MEAN PIXEL_STD
MODEL.BACKBONE: NAME FREEZE_AT
MODEL.RESNETS: DEPTH OUT_FEATURES NORM STRIDE_IN_1X1 RES2_OUT_CHANNELS
MODEL.TRUNK: ARCH FROZEN DROP_PATH MAP_NORM
MODEL.FPN: IN_FEATURES OUT_CHANNELS NORM FUSE_TYPE
MODEL.ANCHOR_GENERATOR: SIZES ASPECT_RATIOS OFFSET
MODEL.PROPOSAL_GENERATOR: MIN_SIZE
MODEL.RPN: IN_FEATURES BOUNDARY_THRESH IOU_THRESHOLDS IOU_LABELS BATCH_SIZE_PER_IMAGE
  POSITIVE_FRACTION BBOX_REG_LOSS_TYPE BBOX_REG_LOSS_WEIGHT BBOX_REG_WEIGHTS SMOOTH_L1_BETA
  LOSS_WEIGHT PRE_NMS_TOPK_TRAIN PRE_NMS_TOPK_TEST POST_NMS_TOPK_TRAIN POST_NMS_TOPK_TEST
  NMS_THRESH CONV_DIMS
MODEL.ROI_HEADS: NAME NUM_CLASSES IN_FEATURES IOU_THRESHOLDS IOU_LABELS BATCH_SIZE_PER_IMAGE
  POSITIVE_FRACTION SCORE_THRESH_TEST NMS_THRESH_TEST PROPOSAL_APPEND_GT
MODEL.ROI_BOX_HEAD: NAME BBOX_REG_LOSS_TYPE BBOX_REG_LOSS_WEIGHT BBOX_REG_WEIGHTS SMOOTH_L1_BETA
  POOLER_RESOLUTION POOLER_SAMPLING_RATIO POOLER_TYPE NUM_FC FC_DIM NUM_CONV CONV_DIM NORM
  CLS_AGNOSTIC_BBOX_REG TRAIN_ON_PRED_BOXES USE_SIGMOID_CE
MODEL.ROI_BOX_CASCADE_HEAD: BBOX_REG_WEIGHTS IOUS
MODEL.ROI_MASK_HEAD: NAME POOLER_RESOLUTION POOLER_SAMPLING_RATIO POOLER_TYPE NUM_CONV CONV_DIM
  NORM CLS_AGNOSTIC_MASK
MODEL.ROI_KEYPOINT_HEAD: NAME POOLER_RESOLUTION POOLER_SAMPLING_RATIO POOLER_TYPE CONV_DIMS
  NUM_KEYPOINTS NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS LOSS_WEIGHT
INPUT: MIN_SIZE_TRAIN MIN_SIZE_TRAIN_SAMPLING MAX_SIZE_TRAIN MIN_SIZE_TEST MAX_SIZE_TEST
  RANDOM_FLIP FORMAT MASK_FORMAT
DATASETS: TRAIN TEST
DATALOADER: ASPECT_RATIO_GROUPING
SOLVER: LR_SCHEDULER_NAME EPOCHS MAX_ITER BASE_LR BASE_LR_END MOMENTUM NESTEROV WEIGHT_DECAY
  WEIGHT_DECAY_NORM GAMMA STEPS WARMUP_FACTOR WARMUP_ITERS WARMUP_METHOD
  IMS_PER_BATCH BIAS_LR_FACTOR WEIGHT_DECAY_BIAS OPTIMIZER LAYER_DECAY
SOLVER.CLIP_GRADIENTS: ENABLED CLIP_TYPE CLIP_VALUE NORM_TYPE
SOLVER.AMP: ENABLED PRECISION
TEST: KEYPOINT_OKS_SIGMAS DETECTIONS_PER_IMAGE
TEST.PRECISE_BN: ENABLED NUM_ITER
"""
HONOURED: set[str] = set()
for _word in _HONOURED.split():
    if _word.endswith(":"):
        _group = _word.removesuffix(":")
    else:
        HONOURED.add(f"{_group}.{_word}")


def check(given: Given, defaults: Mapping[str, Value]) -> None:
    """Raise BadInput for a key, neither honoured nor neutral, that differs from `defaults`."""
    for key, value in given.values.items():
        if key in HONOURED or key in NEUTRAL:
            continue
        if key not in defaults:
            # Detectron2 does not know it. It is refused where the config is merged.
            continue
        if _as_lists(value) != _as_lists(defaults[key]):
            raise BadInput(
                f"{given.path}: {key} {value!r} would decide nothing here; "
                f"leave it at {defaults[key]!r}"
            )
    if given.get("VERSION", 2) != 2:
        raise BadInput(
            f"{given.path}: VERSION {given.get('VERSION')}: only Detectron2's 2"
        )


def _as_lists(value: Value) -> Value:
    """Turn tuples into lists at all depths, so that the two compare equal."""
    if isinstance(value, list | tuple):
        return [_as_lists(v) for v in value]
    return value
