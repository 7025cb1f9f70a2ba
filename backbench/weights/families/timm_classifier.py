"""Builds a model with its own classifier from a checkpoint that kept it.

That is one of timm's weights (`timm:NAME.TAG`), or a ResNet whose file holds an fc: torchvision's, or
a trunk with a probe's head.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.timm_model_names import PREFIX, parse

WEIGHTS = "timm_weights"  # a key of the provenance; its value is NAME.TAG
CLASSES = 1000


def classifier(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the whole model in eval mode, whose output are logits of ImageNet's 1000 classes, and
    the tensors of its head. BadInput for a checkpoint that is no such model."""
    import timm

    # 1. The model, which must be one of timm's as it is
    arch = checkpoint.arch
    name = parse(arch if arch.startswith(PREFIX) else PREFIX + arch)
    about = _about(checkpoint)
    if about.num_classes != CLASSES:
        raise BadInput(
            f"'{checkpoint.name}': its own head has {about.num_classes} classes, not ImageNet's 1000;"
            " use a head that `backbench linear` trains"
        )
    if name.options:
        raise BadInput(
            f"'{checkpoint.name}': {arch} is changed; its own head is for timm's model"
        )
    model: Any = timm.create_model(name.model, pretrained=False, num_classes=CLASSES)
    # 2. What the model has beside the trunk is its head, and all of it was kept
    wanted = model.state_dict()
    trunk = checkpoint.state_dict
    of_head = [key for key in wanted if key not in trunk]
    missing = [key for key in of_head if key not in checkpoint.heads]
    if missing or not of_head or not trunk.keys() <= wanted.keys():
        raise BadInput(
            f"'{checkpoint.name}' has kept no whole head of its own ({', '.join(missing[:3])} missing);"
            " name it as timm:NAME.TAG, or use a head that `backbench linear` trains"
        )
    head = {key: checkpoint.heads[key] for key in of_head}
    # 3. Both together
    try:
        model.load_state_dict({**trunk, **head}, strict=True)
    except RuntimeError as error:
        raise BadInput(
            f"'{checkpoint.name}': its head does not fit: {error!s:.200}"
        ) from None
    return model.eval().requires_grad_(False), head


def evaluation(checkpoint: Checkpoint, *, test_size: bool) -> dict[str, Any]:
    """Return how these weights are evaluated: input_size, interpolation, mean, std, crop_pct and
    crop_mode, as timm has them, or the usual ones of a ResNet with an fc. With `test_size`, they are
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
    """Return timm's record of these weights, or one in the same form for a ResNet with an fc."""
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
    # 2. A ResNet with an fc
    fc = {"fc.weight", "fc.bias"}
    if checkpoint.stem != "imagenet" or checkpoint.heads.keys() != fc:
        raise BadInput(
            f"'{checkpoint.name}' has no head of its own that is known: neither timm's weights nor a"
            " ResNet's fc; name it as timm:NAME.TAG, or use a head that `backbench linear` trains"
        )
    # Published heads of ResNets are scored so: the shorter side to 256, and the middle 224 of it
    return PretrainedCfg(
        num_classes=len(checkpoint.heads["fc.bias"]),
        input_size=(3, 224, 224),
        crop_pct=0.875,
        interpolation="bilinear",
        mean=tuple(pixels.mean),
        std=tuple(pixels.std),
    )
