"""Builds a model with its own classifier from a checkpoint that kept it.

That is one of timm's weights (`timm:NAME.TAG`), a file whose classifier came along with its trunk
(`file_classifier`), or a ResNet whose file holds an fc: torchvision's, or a trunk with a probe's head.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families import file_classifier
from backbench.weights.families.resnet_tables import ARCHS
from backbench.weights.families.timm_model_names import PREFIX, parse
from backbench.weights.undrawn import Undrawn

WEIGHTS = "timm_weights"  # a key of the provenance; its value is NAME.TAG
CLASSES = 1000
# Of a ResNet's features, by its kind of block
WIDTH = {"BasicBlock": 512, "Bottleneck": 2048}


class OwnHead(NamedTuple):
    """The classifier with which a trunk was trained, by timm's names."""

    classes: int
    tensors: dict[str, Tensor]

    @property
    def digest(self) -> str:
        """The sha256 over names and bytes, by which rows name it."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            sha.update(name.replace(".", "/").encode())
            # As bytes, because numpy has no bfloat16
            flat = tensor.detach().cpu().contiguous().view(-1)
            sha.update(flat.view(torch.uint8).numpy().data)
        return sha.hexdigest()


def own_head(checkpoint: Checkpoint) -> OwnHead | None:
    """Return the whole classifier that the checkpoint kept; None for none."""
    arch = checkpoint.arch
    if arch in ARCHS and checkpoint.stem == "imagenet":
        return _fc_of_resnet(checkpoint)
    if not arch.startswith(PREFIX):
        return None
    found = file_classifier.found(arch, "", checkpoint.heads, ())
    if found is None or any(key != name for key, name in found.names.items()):
        return None
    tensors = {name: checkpoint.heads[name] for name in found.names}
    return OwnHead(found.classes, tensors)


def _fc_of_resnet(checkpoint: Checkpoint) -> OwnHead | None:
    """Return the fc that a ResNet has in timm as in torchvision; None for none of its shape.

    Neither library is asked: to import them takes longer than all the rest of reading a file."""
    heads = checkpoint.heads
    if "fc.weight" not in heads or "fc.bias" not in heads:
        return None
    weight, bias = heads["fc.weight"], heads["fc.bias"]
    classes = bias.numel()
    block, _ = ARCHS[checkpoint.arch]
    one_layer = bias.shape == (classes,) and weight.shape == (classes, WIDTH[block])
    if classes == 0 or not one_layer:
        return None
    return OwnHead(classes, {"fc.weight": weight, "fc.bias": bias})


def classifier(checkpoint: Checkpoint) -> tuple[nn.Module, OwnHead]:
    """Return the whole model in eval mode, whose output are logits of ImageNet's 1000 classes, and
    its head. BadInput for a checkpoint that is no such model."""
    import timm

    # 1. The classifier, all of which was kept
    head = own_head(checkpoint)
    if head is None:
        raise BadInput(
            f"'{checkpoint.name}' has no head of its own that is known: its file held no whole"
            " classifier of that model; name timm's weights as timm:NAME.TAG, or use a head that"
            " `backbench linear` trains (--protocol ood)"
        )
    if head.classes != CLASSES:
        raise BadInput(
            f"'{checkpoint.name}': its own head has {head.classes} classes, not ImageNet's 1000;"
            " use a head that `backbench linear` trains (--protocol ood)"
        )
    # 2. The model, which must be one of timm's as it is
    arch = checkpoint.arch
    name = parse(arch if arch.startswith(PREFIX) else PREFIX + arch)
    if name.options:
        raise BadInput(
            f"'{checkpoint.name}': {arch} is changed, and its own head is for timm's {name.model} as"
            " it is; use a head that `backbench linear` trains (--protocol ood)"
        )
    with Undrawn():
        model: Any = timm.create_model(
            name.model, pretrained=False, num_classes=CLASSES
        )
    _about(checkpoint)  # refuses pixels that are not those of timm's weights
    # 3. Both together
    try:
        model.load_state_dict({**checkpoint.state_dict, **head.tensors}, strict=True)
    except RuntimeError as error:
        raise BadInput(
            f"'{checkpoint.name}': its head does not fit: {error!s:.200}"
        ) from None
    return model.eval().requires_grad_(False), head


def evaluation(checkpoint: Checkpoint, *, test_size: bool) -> dict[str, Any]:
    """Return how these weights are evaluated: input_size, interpolation, mean, std, crop_pct and
    crop_mode, as timm has them, or the usual ones of its model, or of a ResNet with an fc. With `test_size`, they are
    those of the larger size for tests, where there is one."""
    from timm.data import resolve_data_config

    about = _about(checkpoint).to_dict()
    return dict(resolve_data_config({}, pretrained_cfg=about, use_test_size=test_size))


def view(config: Mapping[str, Any]) -> Any:
    """Return timm's evaluation transform of a PIL image, up to the cropped PIL image."""
    from timm.data import create_transform

    transform: Any = create_transform(**config, is_training=False, use_prefetcher=True)
    # The last step makes a tensor of the image.
    return type(transform)(transform.transforms[:-1])


def _about(checkpoint: Checkpoint) -> Any:
    """Return timm's record of these weights, or one in the same form for a file's classifier."""
    from timm.models import PretrainedCfg, get_pretrained_cfg

    pixels = checkpoint.pixels
    # 1. timm's weights
    weights = checkpoint.provenance.get(WEIGHTS)
    about = get_pretrained_cfg(str(weights)) if weights else None
    if about is not None:
        if (tuple(about.mean), tuple(about.std)) != (pixels.mean, pixels.std):
            raise BadInput(
                f"'{checkpoint.name}' has other pixels than timm's {weights}; import it without"
                " --pixels"
            )
        return about
    # 2. A file that told no more than its tensors. timm's own size and crop for that model are
    # taken, without the larger size for tests, which belongs to timm's weights
    arch = checkpoint.arch
    head = own_head(checkpoint)
    classes = head.classes if head is not None else 0
    if arch.startswith(PREFIX):
        usual = get_pretrained_cfg(parse(arch).model) or PretrainedCfg()
        return dataclasses.replace(
            usual,
            num_classes=classes,
            mean=tuple(pixels.mean),
            std=tuple(pixels.std),
            test_input_size=None,
            test_crop_pct=None,
        )
    # 3. A ResNet with an fc. Published heads of ResNets are scored so: the shorter side to 256, and
    # the middle 224 of it
    return PretrainedCfg(
        num_classes=classes,
        input_size=(3, 224, 224),
        crop_pct=0.875,
        interpolation="bilinear",
        mean=tuple(pixels.mean),
        std=tuple(pixels.std),
    )
