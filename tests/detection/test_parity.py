"""Compares torchvision's engine with Detectron2's, with the weights copied across."""

import numpy as np
import pytest
import torch
from pycocotools import mask

pytest.importorskip(
    "detectron2", reason="Detectron2 is not installed: `make detectron2`"
)

from detectron2.data import DatasetMapper
from detectron2.structures import Boxes, ImageList
from detectron2.utils.events import EventStorage
from support.detection_runs import built, overrides, rates_and_decays, run_of_config

from backbench.detection import dialect, engine_detectron2
from backbench.detection.data.images import load_image, shortest_edge, targets, to_uint8
from backbench.detection.data.split import training_records
from backbench.detection.rcnn.detector import Detector
from backbench.detection.run import SolverSchedule
from backbench.detection.task_rows import DETECTION_TASKS
from backbench.weights import exporting

pytestmark = pytest.mark.usefixtures("one_trunk")


def to_detectron2_names(state):
    """Return the torchvision engine's whole state under Detectron2's names, its classes in
    Detectron2's order."""
    out = {}
    # 1. The trunk
    prefix = "backbone.body."
    body = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if any(name.startswith("trunk.layer4.") for name in body):
        # Under the Detectron2 engine a ResNet is Detectron2's own.
        trunk = {k.removeprefix("trunk."): v for k, v in body.items()}
        body = exporting.to_detectron2(trunk)
    is_simple_pyramid = "backbone.fpn.levels.0.0.weight" in state
    trunk_path = "backbone.net" if is_simple_pyramid else "backbone.bottom_up"
    for name, value in body.items():
        out[f"{trunk_path}.{name}"] = value
    # 2. What stands on it
    for key, value in state.items():
        parts = key.split(".")
        if key.startswith("backbone.fpn.levels."):
            out[simple_pyramid_name(parts)] = value
        elif key.startswith("backbone.fpn."):
            out[fpn_name(parts)] = value
        elif key.startswith("rpn.head."):
            heads = {"cls_logits": "objectness_logits", "bbox_pred": "anchor_deltas"}
            name = heads.get(parts[2], "conv")
            out[f"proposal_generator.rpn_head.{name}.{parts[-1]}"] = value
        elif key.startswith("roi_heads."):
            name, rotated = head_entry(parts, value)
            out[name] = rotated
    return out


def fpn_name(parts):
    """Translate backbone.fpn.BLOCKS.LEVEL.LAYER.NAME, where layer 1 is the norm."""
    _, _, blocks, level, layer, last = parts
    kinds = {"inner_blocks": "fpn_lateral", "layer_blocks": "fpn_output"}
    if layer == "1":
        last = f"norm.{last}"
    return f"backbone.{kinds[blocks]}{int(level) + 2}.{last}"


RESIZING = (4, 1, 0, 1)  # layers of each level before its two convolutions


def simple_pyramid_name(parts):
    """Translate backbone.fpn.levels.LEVEL.LAYER.NAME.

    Each of the two convolutions is followed by a norm, which Detectron2 has inside it.
    """
    level = int(parts[3])
    layer = int(parts[4])
    last = parts[5]
    after = layer - RESIZING[level]
    if after >= 0:
        layer = RESIZING[level] + after // 2
        if after % 2:
            last = f"norm.{last}"
    return f"backbone.simfp_{level + 2}.{layer}.{last}"


def to_detectron2_names_of(values):
    """Rename values that stand for a parameter, such as its rate, in the same way."""
    # Each is replaced by a tensor of its index, which can be rotated and cut as a weight.
    indices = {name: torch.full((9, 9), float(i)) for i, name in enumerate(values)}
    known = list(values.values())
    named = to_detectron2_names(indices)
    return {name: known[int(v.flatten()[0])] for name, v in named.items()}


def head_entry(parts, v):
    """Return a head's name and its weights in Detectron2.

    The background is class 0 here and the last there. Boxes and masks have no background there.
    """
    match parts[1:]:
        case ["box_head", layer, last]:
            fc = {"fc6": "fc1", "fc7": "fc2"}.get(layer, layer)
            return f"roi_heads.box_head.{fc}.{last}", v
        case ["box_predictor", "cls_score", last]:
            rotated = torch.cat([v[1:], v[:1]])
            return f"roi_heads.box_predictor.cls_score.{last}", rotated
        case ["box_predictor", "bbox_pred", last]:
            return f"roi_heads.box_predictor.bbox_pred.{last}", v[4:]
        case ["mask_head", layer, _, last]:
            return f"roi_heads.mask_head.mask_fcn{int(layer) + 1}.{last}", v
        case ["mask_predictor", "conv5_mask", last]:
            return f"roi_heads.mask_head.deconv.{last}", v
        case ["mask_predictor", "mask_fcn_logits", last]:
            return f"roi_heads.mask_head.predictor.{last}", v[1:]
        case ["keypoint_head", layer, last]:
            return f"roi_heads.keypoint_head.conv_fcn{int(layer) // 2 + 1}.{last}", v
        case ["keypoint_predictor", "kps_score_lowres", last]:
            return f"roi_heads.keypoint_head.score_lowres.{last}", v
    raise AssertionError(parts)


# Trunks of ours under both engines. The images of the plain one are scaled, because of its patch.
TRUNKS = {
    "ConvNeXt_FPN": "timm:test_convnext",
    "ViT_SFP": "timm:vit_tiny_patch16_224,img_size=56,patch_size=14,depth=2,embed_dim=32,"
    "num_heads=2,init_values=1,reg_tokens=2,pos=+0.1",
}


@pytest.fixture(scope="module", params=[*DETECTION_TASKS, *TRUNKS])
def pair(request, tiny_root, tmp_path_factory):
    """Build both engines of a task, or of a kind of trunk, with equal weights.

    Returns them with the training split and the task.
    """
    name = f"tiny_{request.param}_R_18_FPN"
    values = {"MODEL.WEIGHTS": "random"}
    if request.param in TRUNKS:
        name = f"tiny_faster_rcnn_{request.param}"
        values["MODEL.TRUNK.ARCH"] = TRUNKS[request.param]
        # These are the images' own sizes: images that the tests read themselves are not resized.
        values["INPUT.MIN_SIZE_TEST"] = 128
        values["INPUT.MAX_SIZE_TEST"] = 256
    words = overrides(values)
    out = tmp_path_factory.mktemp("run")
    p, ours = built(run_of_config(name, tiny_root, out, words))
    _, theirs = built(run_of_config(name, tiny_root, out, words, engine="detectron2"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # 1. Heads whose outputs have about the variance of their inputs
        for key, value in ours.model.named_parameters():
            if key.startswith(("rpn", "roi_heads")) and value.dim() > 1:
                drawn = torch.randn(value.shape, generator=generator)
                value.copy_(drawn * (1 / value[0].numel()) ** 0.5)
        # 2. Scales, tokens and positions that matter: they begin at next to nothing.
        if request.param in TRUNKS:
            for value in ours.model.backbone.body.parameters():
                if value.dim() != 4 and min(value.shape) in (1, max(value.shape)):
                    value.add_(torch.randn(value.shape, generator=generator) * 0.3)
        # 3. Batch norm's statistics that fit, so that scores spread and do not saturate
        kind = torch.nn.modules.batchnorm._BatchNorm
        norms = [m for m in ours.model.modules() if isinstance(m, kind)]
        for norm in norms:
            norm.momentum = 1.0
        images = [to_uint8(load_image(r)) for r in p.train.records[:4]]
        ours.model.backbone(ours.model.batch(images).tensors)
        for norm in norms:
            norm.momentum = 0.1
    theirs.model.load_state_dict(to_detectron2_names(ours.model.state_dict()))
    return ours, theirs, p.train, p.task


def test_every_weight_has_a_counterpart(pair):
    ours, theirs, _, _ = pair
    renamed = to_detectron2_names(ours.model.state_dict())
    assert renamed.keys() == theirs.model.state_dict().keys()
    assert to_detectron2_names_of(rates_and_decays(ours)) == rates_and_decays(theirs)


def test_features_anchors_proposals_boxes_and_scores(pair, monkeypatch):
    ours, theirs, split, task = pair
    ours.model.eval()
    theirs.model.eval()
    mapper = DatasetMapper(is_train=False, augmentations=[], image_format="RGB")
    preprocess = theirs.model.preprocess_image
    for record in split.records[:3]:
        image = to_uint8(load_image(record))
        batch = ours.model.batch([image])

        def the_same_pixels(records, batch=batch):
            # Each engine rounds the normalised pixels in its own way. From here on both have ours, so
            # that the networks' differences are their own
            images = preprocess(records)
            assert_close = torch.testing.assert_close
            assert_close(batch.tensors, images.tensor, rtol=1e-5, atol=1e-5)
            images.tensor = batch.tensors
            return images

        monkeypatch.setattr(theirs.model, "preprocess_image", the_same_pixels)
        # 1. What leads to the detections
        with torch.no_grad():
            features = ours.model.backbone(batch.tensors)
            anchors = ours.model.rpn.anchor_generator(batch, list(features.values()))
            proposals, _ = ours.model.rpn(batch, features)
            images = theirs.model.preprocess_image([mapper(dict(record))])
            their_features = theirs.model.backbone(images.tensor)
            generator = theirs.model.proposal_generator
            their_anchors = generator.anchor_generator(list(their_features.values()))
            their_proposals, _ = generator(images, their_features)
        for a, b in zip(features.values(), their_features.values(), strict=True):
            tolerance = 1e-5 * float(b.abs().max())
            torch.testing.assert_close(a, b, rtol=1e-5, atol=tolerance)
        all_anchors = Boxes.cat(their_anchors).tensor
        torch.testing.assert_close(anchors[0], all_anchors, rtol=0, atol=1e-5)
        boxes = their_proposals[0].proposal_boxes.tensor
        torch.testing.assert_close(proposals[0], boxes, rtol=1e-5, atol=1e-3)
        # 2. The detections
        a = ours.predict(record)
        b = theirs.predict(record)
        assert len(a) == len(b) > 0
        assert [x["category_id"] for x in a] == [x["category_id"] for x in b]
        np.testing.assert_allclose(
            [x["score"] for x in a], [x["score"] for x in b], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            [x["bbox"] for x in a], [x["bbox"] for x in b], rtol=1e-5, atol=1e-3
        )
        if task.outlines:
            for x, y in zip(a, b):
                bitmap = mask.decode(x["segmentation"])
                assert (bitmap != mask.decode(y["segmentation"])).sum() <= 2
        if task.keypoints:
            points = np.array([x["keypoints"] for x in a]).reshape(len(a), -1, 3)
            their_points = np.array([x["keypoints"] for x in b]).reshape(len(b), -1, 3)
            np.testing.assert_allclose(
                points[..., :2], their_points[..., :2], atol=1e-2
            )


def test_losses_from_the_same_images(pair, monkeypatch):
    ours, theirs, split, task = pair
    # 1. The same images and targets
    records = training_records(split, task)[:2]
    images = [to_uint8(load_image(record)) for record in records]
    our_targets = []
    for record in records:
        our_targets.append(
            targets(record, 128, 128, mirrored=False, flip_map=split.flip, task=task)
        )
    mapper = DatasetMapper(
        is_train=True,
        augmentations=[],
        image_format="RGB",
        use_instance_mask=task.outlines,
        use_keypoint=task.keypoints,
        keypoint_hflip_indices=np.array(split.flip) if split.flip else None,
    )
    mapped = [mapper(engine_detectron2.standard_dict(record)) for record in records]
    for target, their_input in zip(our_targets, mapped):
        instances = their_input["instances"]
        torch.testing.assert_close(target["boxes"], instances.gt_boxes.tensor)
        assert (target["labels"] - 1).tolist() == instances.gt_classes.tolist()
        if task.keypoints:
            torch.testing.assert_close(
                target["keypoints"], instances.gt_keypoints.tensor
            )
    ours.model.train()
    theirs.model.train()
    for sampler in ours.model.samplers().values():
        sampler.generators = None
    # 2. The same losses. Both get our pixels: with another rounding, a ReLU at zero may fall on the
    #    other side, and its gradient would be another.
    batch = ours.model.batch(images)
    pixels = ImageList(batch.tensors, batch.image_sizes)
    their_pixels = theirs.model.preprocess_image(mapped).tensor
    torch.testing.assert_close(their_pixels, pixels.tensor, rtol=0, atol=1e-6)
    torch.manual_seed(5)
    mine = ours.model(images, our_targets)
    torch.manual_seed(5)
    with EventStorage(0), monkeypatch.context() as patch:
        patch.setattr(theirs.model, "preprocess_image", lambda batched: pixels)
        reference = theirs.model(mapped)
    assert mine.keys() == reference.keys()
    for key, value in reference.items():
        assert float(value) > 0
        torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-6, msg=key)
    # 3. The same gradients
    sum(mine.values()).backward()
    sum(reference.values()).backward()
    our_gradients = {k: p.grad for k, p in ours.model.named_parameters()}
    gradients = to_detectron2_names(our_gradients)
    for key, parameter in theirs.model.named_parameters():
        if not parameter.requires_grad:  # no map depends on it
            assert parameter.grad is None
            assert gradients[key] is None
            continue
        norm = parameter.grad.norm().clamp(min=1e-4)
        difference = float((gradients[key] - parameter.grad).norm() / norm)
        assert difference < 2e-4, (key, difference)


def test_training_images_are_the_same(pair):
    """The filters of Detectron2's loader, and its mapper under flips, do as ours."""
    from detectron2.data import build, transforms
    from detectron2.data.detection_utils import transform_instance_annotations

    _, _, split, task = pair
    # 1. Which images are trained on
    kept = build.filter_images_with_only_crowd_annotations(split.records)
    if task.keypoints:
        kept = build.filter_images_with_few_keypoints(kept, 1)
    ours = training_records(split, task)
    assert [r["image_id"] for r in kept] == [r["image_id"] for r in ours]
    # 2. Their targets, resized and mirrored
    height, width = 160, 200
    resize = transforms.ResizeTransform(128, 128, height, width)
    for mirrored, flip in (
        (False, transforms.NoOpTransform()),
        (True, transforms.HFlipTransform(width)),
    ):
        both = transforms.TransformList([resize, flip])
        for record in split.records[:4]:
            mine = targets(
                record, height, width, mirrored=mirrored, flip_map=split.flip, task=task
            )
            annotations = engine_detectron2.standard_dict(record)["annotations"]
            for n, annotation in enumerate(annotations):
                theirs = transform_instance_annotations(
                    dict(annotation),
                    both,
                    (height, width),
                    keypoint_hflip_indices=split.flip or None,
                )
                np.testing.assert_allclose(mine["boxes"][n], theirs["bbox"], rtol=1e-6)
                if task.outlines:
                    polygons = zip(
                        mine["polygons"][n], theirs["segmentation"], strict=True
                    )
                    for a, b in polygons:
                        np.testing.assert_allclose(a, b)
                if task.keypoints:
                    np.testing.assert_allclose(
                        mine["keypoints"][n], theirs["keypoints"], rtol=1e-6
                    )


def test_resized_sizes():
    from detectron2.data.transforms import ResizeShortestEdge

    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        h, w = torch.randint(40, 2000, (2,), generator=generator).tolist()
        theirs = ResizeShortestEdge.get_output_shape(h, w, 800, 1333)
        assert shortest_edge(h, w, 800, 1333) == tuple(theirs)


def solver(**values):
    """Return the words that set these keys of SOLVER."""
    return overrides({f"SOLVER.{key}": value for key, value in values.items()})


@pytest.mark.parametrize(
    "words",
    [
        [],
        solver(STEPS="(100,300)", WARMUP_ITERS=500, MAX_ITER=1000),
        solver(STEPS="(100,)", WARMUP_ITERS=100, MAX_ITER=1000),
        solver(STEPS="()", WARMUP_ITERS=1000, MAX_ITER=300),
        solver(STEPS="(50,)", WARMUP_ITERS=1000, MAX_ITER=300),
        solver(STEPS="(60,900)", WARMUP_ITERS=10, MAX_ITER=300),
        solver(
            WARMUP_METHOD="constant", WARMUP_FACTOR=0.3, WARMUP_ITERS=40, MAX_ITER=300
        ),
        solver(LR_SCHEDULER_NAME="WarmupCosineLR", BASE_LR_END=0.001, MAX_ITER=2000),
        solver(LR_SCHEDULER_NAME="WarmupCosineLR", WARMUP_ITERS=3000, MAX_ITER=2000),
        solver(BIAS_LR_FACTOR=2.0, WEIGHT_DECAY_BIAS=0.0, MAX_ITER=300, STEPS="(200,)"),
    ],
)
def test_rates_are_detectron2s(words):
    from detectron2.solver import build_lr_scheduler, build_optimizer

    given = dialect.read("faster_rcnn_R_50_FPN_1x", words)
    cfg = engine_detectron2.Detectron2Engine.read_config(given)
    ours = SolverSchedule.of(cfg)
    optimizer = build_optimizer(cfg, torch.nn.Linear(2, 2))
    bases = [group["lr"] for group in optimizer.param_groups]
    assert len(bases) == 1 + (cfg.SOLVER.BIAS_LR_FACTOR != 1)
    scheduler = build_lr_scheduler(cfg, optimizer)
    iterations = list(range(cfg.SOLVER.MAX_ITER))
    if len(iterations) > 3000:
        # The shipped schedule: its warm-up, and the edges of its steps
        iterations = [*range(1500), 59_999, 60_000, 79_999, 80_000]
    for iteration in iterations:
        scheduler.last_epoch = iteration
        factor = ours.factor_at(iteration)
        assert scheduler.get_lr() == [base * factor for base in bases], iteration


def test_biases_have_a_rate_of_their_own(tiny_root, tmp_path):
    words = ("MODEL.WEIGHTS", "random", "SOLVER.BIAS_LR_FACTOR", "2.0")
    tables = []
    for name in ("torchvision", "detectron2"):
        run = run_of_config(
            "tiny_faster_rcnn_R_18_FPN", tiny_root, tmp_path, words, engine=name
        )
        _, engine = built(run)
        tables.append(rates_and_decays(engine))
    assert sorted(tables[0].values()) == sorted(tables[1].values())
    assert len(set(tables[0].values())) == 4


def test_initial_weights_are_drawn_alike(pair):
    ours, theirs, _, _ = pair
    fresh = Detector(ours.cfg, ours.checkpoint.backbone(), ours.model.pixels)
    reference = engine_detectron2.build_model(theirs.cfg).state_dict()
    for key, value in to_detectron2_names(fresh.state_dict()).items():
        small = value.numel() < 500 or not value.is_floating_point()
        if small or key.startswith(("backbone.bottom_up", "backbone.net")):
            continue
        theirs_std = float(reference[key].std())
        assert float(value.std()) == pytest.approx(theirs_std, rel=0.2, abs=1e-9), key
