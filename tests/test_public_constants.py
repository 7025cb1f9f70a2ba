"""Tables that are the public's: each is held against another program that has it."""

import numpy as np
import pytest
import torch
from PIL import ExifTags, TiffImagePlugin
from pycocotools.cocoeval import Params
from timm.data import constants
from torchvision.models import get_model
from torchvision.models.detection import (
    FasterRCNN_ResNet50_FPN_Weights,
    KeypointRCNN_ResNet50_FPN_Weights,
)
from torchvision.models.segmentation import FCN_ResNet50_Weights

from backbench.datasets import catalog
from backbench.datasets.readers import VOC07_CLASSES
from backbench.detection import own_heads
from backbench.detection.data import coco_lists
from backbench.images import decoding, preprocess
from backbench.published import timm_scores
from backbench.records.data_manifests import DETECTION_SIZES
from backbench.weights.families.resnet_trunk import build_backbone


def test_cocos_classes_have_torchvisions_numbers():
    theirs = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    known = {
        n: name
        for n, name in enumerate(theirs)
        if name not in ("__background__", "N/A")
    }
    assert known == coco_lists.CLASSES
    assert len(known) == 80


def test_cocos_keypoints_have_pycocotools_sigmas():
    names = KeypointRCNN_ResNet50_FPN_Weights.COCO_V1.meta["keypoint_names"]
    assert tuple(own_heads.COCO_SIGMAS) == tuple(names)
    sigmas = list(own_heads.COCO_SIGMAS.values())
    np.testing.assert_allclose(sigmas, Params("keypoints").kpt_oks_sigmas)
    assert max(sigmas) == own_heads.OTHER_SIGMA


def test_statistics_of_pixels_are_timms():
    assert preprocess.IMAGENET_MEAN == constants.IMAGENET_DEFAULT_MEAN
    assert preprocess.IMAGENET_STD == constants.IMAGENET_DEFAULT_STD
    assert preprocess.CLIP_MEAN == constants.OPENAI_CLIP_MEAN
    assert preprocess.CLIP_STD == constants.OPENAI_CLIP_STD
    assert preprocess.HALF == constants.IMAGENET_INCEPTION_MEAN
    # timm has no others; these are the numbers of SwAV's code and of CIFAR-10's own pixels
    assert preprocess.SWAV_STD == (0.228, 0.224, 0.225)
    assert preprocess.CIFAR_MEAN == (0.4914, 0.4822, 0.4465)
    assert preprocess.CIFAR_STD == (0.2470, 0.2435, 0.2616)


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
)
def test_resnets_have_torchvisions_blocks(name):
    with torch.device("meta"):
        ours = build_backbone(name).state_dict()
        theirs = get_model(name, weights=None).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {
        k: v.shape for k, v in theirs.items() if not k.startswith("fc.")
    }


def test_the_orientation_of_a_picture_is_exifs():
    assert ExifTags.Base.Orientation == decoding.EXIF_ORIENTATION
    # Those that lie on their side
    assert set(decoding.SIDEWAYS) == {5, 6, 7, 8}
    assert decoding.TIFF_WIDTH == TiffImagePlugin.IMAGEWIDTH
    assert decoding.TIFF_HEIGHT == TiffImagePlugin.IMAGELENGTH
    assert decoding.TIFF_BITS_PER_SAMPLE == TiffImagePlugin.BITSPERSAMPLE
    assert decoding.TIFF_PHOTOMETRIC == TiffImagePlugin.PHOTOMETRIC_INTERPRETATION


def test_detections_sets_have_their_published_sizes():
    assert DETECTION_SIZES["coco2017"] == (118287, 5000)
    assert DETECTION_SIZES["voc2007"] == (16551, 4952)


def test_vocs_classes_are_torchvisions():
    theirs = FCN_ResNet50_Weights.DEFAULT.meta["categories"]
    assert set(VOC07_CLASSES) == set(theirs) - {"__background__"}
    assert list(VOC07_CLASSES) == sorted(VOC07_CLASSES)


def test_timms_sets_have_as_many_images_as_ours():
    for name, printed in timm_scores.SETS.items():
        known = catalog.DATASETS[name]
        assert printed.images == known.sizes[-1], name
        assert timm_scores.LISTS[f"timm-{printed.column}"] == name
