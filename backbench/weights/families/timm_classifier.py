"""A model with its own classifier, from a checkpoint that kept it: timm's (`timm:NAME.TAG`), or a
ResNet whose file holds an fc, torchvision's or a trunk with a probe's head."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.timm_model_names import PREFIX, parse

WEIGHTS = "timm_weights"  # in the provenance: NAME.TAG
CLASSES = 1000


def classifier(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Tensor]]:
    """The whole model in eval mode, whose output are logits of ImageNet's 1000 classes, and the
    tensors of its head. BadInput for a checkpoint that is no such model."""
    import timm

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
    wanted, trunk = model.state_dict(), checkpoint.state_dict
    head = {key: checkpoint.heads.get(key) for key in wanted if key not in trunk}
    missing = [key for key, tensor in head.items() if tensor is None]
    if missing or not head or not trunk.keys() <= wanted.keys():
        raise BadInput(
            f"'{checkpoint.name}' has kept no whole head of its own ({', '.join(missing[:3])} missing);"
            " name it as timm:NAME.TAG, or use a head that `backbench linear` trains"
        )
    own = {key: tensor for key, tensor in head.items() if tensor is not None}
    try:
        model.load_state_dict({**trunk, **own}, strict=True)
    except RuntimeError as error:
        raise BadInput(
            f"'{checkpoint.name}': its head does not fit: {error!s:.200}"
        ) from None
    return model.eval().requires_grad_(False), own


def evaluation(checkpoint: Checkpoint, *, test_size: bool) -> dict[str, Any]:
    """The evaluation of these weights, timm's or the usual one of a ResNet with an fc: input_size,
    interpolation, mean, std, crop_pct and crop_mode; of the larger size for tests, where there is
    one, if `test_size`."""
    from timm.data import resolve_data_config

    about = _about(checkpoint).to_dict()
    return dict(resolve_data_config({}, pretrained_cfg=about, use_test_size=test_size))


def view(config: Mapping[str, Any]) -> Any:
    """timm's evaluation of a PIL image, up to the cropped PIL image."""
    from timm.data import create_transform

    steps: Any = create_transform(**config, is_training=False, use_prefetcher=True)
    return type(steps)(steps.transforms[:-1])  # the last one makes a tensor of it


def _about(checkpoint: Checkpoint) -> Any:
    from timm.models import PretrainedCfg, get_pretrained_cfg

    weights, pixels = checkpoint.provenance.get(WEIGHTS), checkpoint.pixels
    about = get_pretrained_cfg(str(weights)) if weights else None
    if about is not None and (tuple(about.mean), tuple(about.std)) != (
        pixels.mean,
        pixels.std,
    ):
        raise BadInput(
            f"'{checkpoint.name}' has other pixels than timm's {weights}; import it without --pixels"
        )
    has_fc = checkpoint.stem == "imagenet" and checkpoint.heads.keys() == {
        "fc.weight",
        "fc.bias",
    }
    # As published heads of ResNets are scored: the shorter side to 256, of which 224
    if about is None and has_fc:
        return PretrainedCfg(
            num_classes=len(checkpoint.heads["fc.bias"]),
            input_size=(3, 224, 224),
            crop_pct=0.875,
            interpolation="bilinear",
            mean=tuple(pixels.mean),
            std=tuple(pixels.std),
        )
    if about is None:
        raise BadInput(
            f"'{checkpoint.name}' has no head of its own that is known: neither timm's weights nor a"
            " ResNet's fc; name it as timm:NAME.TAG, or use a head that `backbench linear` trains"
        )
    return about
