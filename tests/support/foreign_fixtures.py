"""Makes files of each published format: what its project saves of a torchvision ResNet."""

import argparse
import copy
import functools
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torchvision.models import resnet18, resnet50

from backbench.images.preprocess import (
    CIFAR_MEAN,
    IMAGENET_MEAN,
    IMAGENET_STD,
    SWAV_STD,
)
from backbench.weights.undrawn import without_memory

BUILDERS = {"resnet18": resnet18, "resnet50": resnet50}


def known_resnet(arch, seed=0):
    """Copy a torchvision ResNet whose parameters, buffers and counters have values of their own.

    All copies share their tensors: change a module, and do not write into a tensor."""
    model = _known_resnet(arch, seed)
    shared = {
        id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()
    }
    model = copy.deepcopy(model, memo=shared)
    torch.manual_seed(seed)
    return model


@functools.cache
def _known_resnet(arch, seed):
    torch.manual_seed(seed)
    # Everything is overwritten, so nothing needs to be initialised.
    with without_memory():
        model = BUILDERS[arch]()
    model.to_empty(device="cpu")
    cut_from_one_row(model)
    for index, tensor in enumerate(model.state_dict().values()):
        if not tensor.is_floating_point():
            tensor.fill_(index)
        elif tensor.dim() == 1:
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def cut_from_one_row(model):
    """Give each parameter of the model values of its own, most of them in the same memory: each
    weight begins 16 numbers further on in one row of draws than the one before it, so a file has a
    fraction of the bytes."""
    weights = [weight for weight in model.parameters() if weight.dim() > 1]
    most = max(weight.numel() for weight in weights)
    row = torch.randn(most + 16 * len(weights)) * 0.02
    for number, weight in enumerate(weights):
        part = row[16 * number : 16 * number + weight.numel()]
        weight.data = part.view(weight.shape)
    for weight in model.parameters():
        if weight.dim() <= 1:
            weight.data = torch.rand(weight.shape) + 0.5
    return model


def trunk_of(model):
    parts = ("conv1.", "bn1.", "layer1.", "layer2.", "layer3.", "layer4.")
    tensors = model.state_dict(keep_vars=True)
    return {k: _kept(v) for k, v in tensors.items() if k.startswith(parts)}


@functools.lru_cache(maxsize=256)
def _kept(tensor):
    """Copy a tensor as it was drawn: whatever is done to the model's own, this one stays."""
    return tensor.detach().clone()


def second(model):
    """Make another network that shares all but two of its tensors with `model`."""
    other = copy.copy(model)
    other.__dict__ = {**model.__dict__, "_modules": dict(model._modules)}
    other.conv1 = copy.deepcopy(model.conv1)
    other.bn1 = copy.deepcopy(model.bn1)
    with torch.no_grad():
        other.conv1.weight.mul_(-1)
        other.bn1.running_mean.add_(1)
    return other


def small_stem(model):
    """Give the model the 3x3 first convolution for small images. A state dict does not show its
    padding."""
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def prefixed(prefix, module):
    return OrderedDict((prefix + k, v) for k, v in module.state_dict().items())


def ddp(state_dict):
    return OrderedDict(("module." + k, v) for k, v in state_dict.items())


def head(model, *sizes):
    width = model.fc.in_features if isinstance(model.fc, nn.Linear) else 512
    layers = [nn.Linear(a, b) for a, b in zip((width, *sizes), sizes)]
    return nn.Sequential(*layers)


def sgd_state(count=3):
    state = {i: {"momentum_buffer": torch.randn(4)} for i in range(count)}
    return {"state": state, "param_groups": [{"lr": 0.1}]}


def with_fc(model, fc):
    model.fc = fc
    return model


def moco(model, queue=(16, 32)):
    model = with_fc(model, head(model, 8, 4))
    state = prefixed("encoder_q.", model) | prefixed("encoder_k.", second(model))
    state |= {
        "queue": torch.randn(queue),
        "queue_ptr": torch.zeros(1, dtype=torch.long),
    }
    return {
        "epoch": 200,
        "arch": "resnet50",
        "state_dict": ddp(state),
        "optimizer": sgd_state(),
    }


def lorac(model):
    amp = {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}}
    return moco(model, queue=(2, 16, 32)) | {"amp": amp}


def moco_v3(model):
    model = with_fc(model, head(model, 8, 4))
    state = prefixed("base_encoder.", model) | prefixed(
        "momentum_encoder.", second(model)
    )
    state |= prefixed("predictor.", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    about = {"epoch": 100, "arch": "resnet50", "scaler": {"scale": 1}}
    return about | {"state_dict": ddp(state), "optimizer": sgd_state()}


def swav(model):
    model.fc = nn.Identity()
    model.projection_head = head(model, 8, 4)
    model.prototypes = nn.Linear(4, 30, bias=False)
    return ddp(model.state_dict())  # the release is the bare state dict


def deepcluster_v2(model):
    model.fc = nn.Identity()
    model.projection_head = head(model, 8, 4)
    prototypes = {f"prototypes{i}": nn.Linear(4, 30, bias=False) for i in range(3)}
    model.prototypes = nn.ModuleDict(prototypes)
    return {
        "epoch": 400,
        "state_dict": ddp(model.state_dict()),
        "optimizer": sgd_state(),
    }


def dino(model):
    def network(backbone):
        modules = {"backbone": backbone, "head": nn.Linear(4, 4)}
        return ddp(nn.ModuleDict(modules).state_dict())

    model.fc = nn.Identity()
    return {
        "student": network(second(model)),
        "teacher": network(model),
        "epoch": 300,
        "args": argparse.Namespace(arch="resnet50", lr=0.03),
        "optimizer": sgd_state(),
        "dino_loss": OrderedDict(center=torch.zeros(1, 4)),
    }


def simsiam(model):
    model = with_fc(model, head(model, 8, 4))
    state = prefixed("encoder.", model) | prefixed("predictor.", nn.Linear(4, 4))
    return {
        "epoch": 100,
        "arch": "resnet50",
        "state_dict": ddp(state),
        "optimizer": sgd_state(),
    }


def vicreg(model, **more):
    model.fc = nn.Identity()
    modules = {"backbone": model, "projector": head(model, 8), **more}
    state = nn.ModuleDict(modules).state_dict()
    return {"epoch": 1000, "model": ddp(state), "optimizer": sgd_state()}


def barlow_twins(model):
    return vicreg(model, bn=nn.BatchNorm1d(8, affine=False))


def plain(model):
    model.fc = nn.Identity()
    return model.state_dict()


def arb_cifar(model):
    return barlow_twins(small_stem(model))


def mio(model):
    small_stem(model).fc = nn.Identity()
    net = nn.ModuleDict({"base_encoder": model, "projector": head(model, 8)})
    others = {
        "optimizer_state_dict": sgd_state(),
        "scheduler_state_dict": {},
        "epoch": 9,
    }
    return {"model_state_dict": prefixed("net.", net), **others}


def mio_net(model):
    model.fc = nn.Identity()
    return nn.ModuleDict(
        {"base_encoder": model, "projector": head(model, 8)}
    ).state_dict()


def cllr(model):
    small_stem(model)
    children = [m for n, m in model.named_children() if n not in ("fc", "maxpool")]
    state = prefixed("f.", nn.Sequential(*children)) | prefixed("g.", head(model, 8, 4))
    return ddp({"r": torch.randn(4, 8), **state})


def vissl(model):
    names = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")

    def trunk(net):
        blocks = nn.ModuleDict({n: getattr(net, n) for n in names})
        return nn.ModuleDict({"_feature_blocks": blocks})

    loss = prefixed("moco_encoder.trunk.", trunk(second(model))) | {
        "queue": torch.randn(4, 8)
    }
    networks = {
        "trunk": trunk(model).state_dict(),
        "heads": head(model, 8).state_dict(),
    }
    classy = {
        "train": True,
        "base_model": {"model": networks},
        "optimizer": {"optim": sgd_state()},
    }
    counts = {"phase_idx": 200, "iteration": 1000, "train_phase_idx": 199}
    return {**counts, "loss": loss, "classy_state_dict": classy}


def lightning(state, **extra):
    counts = {"ready": 400, "started": 400, "processed": 400, "completed": 399}
    loops = {"fit_loop": {"epoch_progress": {"total": counts, "current": counts}}}
    about = {"epoch": 399, "global_step": 1000, "pytorch-lightning_version": "1.9.0"}
    about["loops"] = loops
    return about | {"state_dict": state, "optimizer_states": [sgd_state()]} | extra


def solo_learn(model):
    from omegaconf import OmegaConf

    model.fc = nn.Identity()
    modules = {"classifier": nn.Linear(4, 10), "predictor": nn.Linear(4, 4)}
    modules["projector"] = head(model, 8)
    state = prefixed("backbone.", model) | prefixed("momentum_backbone.", second(model))
    state |= nn.ModuleDict(modules).state_dict()
    about = OmegaConf.create({"method": "byol", "data": {"dataset": "imagenet100"}})
    return lightning(state, hyper_parameters=about)


def solo_learn_cifar(model):
    small_stem(model).fc = nn.Identity()
    state = prefixed("encoder.", model) | prefixed("classifier.", nn.Linear(4, 10))
    state["queue"] = torch.randn(2, 4, 8)
    return lightning(state)


def lightly_example(model):
    def backbone(net):
        return nn.Sequential(*list(net.children())[:-1])

    state = prefixed("backbone.", backbone(model)) | prefixed(
        "projection_head.", head(model, 8)
    )
    state |= prefixed("backbone_momentum.", backbone(second(model)))
    return lightning(state)


def lightly_benchmark(model):
    model.fc = nn.Identity()
    state = prefixed("backbone.", model) | prefixed("teacher_backbone.", second(model))
    return lightning(state | prefixed("projection_head.", head(model, 8)))


def mmselfsup_09(model):
    small_stem(model).fc = nn.Identity()
    query = nn.Sequential(model, head(model, 8))
    key = nn.Sequential(second(model), head(model, 8))
    state = prefixed("encoder_q.", query) | prefixed("encoder_k.", key)
    state |= prefixed("backbone.", query[0]) | prefixed("neck.", query[1])
    state["queue"] = torch.randn(4, 8)
    return {
        "meta": {"epoch": 200, "iter": 5000, "config": "model = dict()"},
        "state_dict": state,
    }


def mmselfsup_10(model):
    model.fc = nn.Identity()
    target = nn.Sequential(second(model), head(model, 8))
    state = prefixed("backbone.", model) | prefixed("neck.", head(model, 8))
    state |= prefixed("target_net.module.", target)
    state |= {"target_net.steps": torch.tensor(5)}
    history = {"loss": np.array([1.0, 2.0]), "lr": np.float64(0.1)}
    return {
        "meta": {"epoch": 300, "iter": 7},
        "state_dict": state,
        "message_hub": {"log_scalars": history},
    }


def mmselfsup_extracted(model):
    return {"state_dict": plain(model), "author": "MMSelfSup"}


def byol_sthalles(model):
    def network(net):
        parts = {
            "encoder": nn.Sequential(*list(net.children())[:-1]),
            "projetion": nn.ModuleDict({"net": head(net, 8)}),
        }
        return nn.ModuleDict(parts)

    return {
        "online_network_state_dict": network(model).state_dict(),
        "target_network_state_dict": network(second(model)).state_dict(),
        "optimizer_state_dict": sgd_state(),
    }


def byol_yaox12(model):
    def network(net):
        encoder = nn.Sequential(*list(net.children())[:-1])
        return nn.ModuleDict({"encoder": encoder, "projetion": head(net, 8)})

    modules = {
        "online_network": network(model),
        "target_network": network(second(model)),
        "predictor": nn.Linear(4, 4),
    }
    return {
        "config": {"model": {"base_momentum": 0.99}},
        "epoch": 300,
        "steps": 9,
        "amp": {},
        "model": ddp(nn.ModuleDict(modules).state_dict()),
    }


def byol_lucidrains(model):
    state = prefixed("net.", model) | prefixed("online_encoder.net.", model)
    state |= prefixed("online_predictor.", nn.Linear(4, 4))
    return state | prefixed("target_encoder.net.", second(model))


def byol_deepmind(model):
    model.fc = nn.Identity()
    return {
        "online_backbone": ddp(model.state_dict()),
        "target_backbone": ddp(second(model).state_dict()),
    }


def torchvision(model):
    return model.state_dict()


def timm_training(model):
    return {
        "epoch": 299,
        "arch": "resnet50",
        "version": 2,
        "metric": 76.1,
        "args": argparse.Namespace(opt="sgd"),
        "optimizer": sgd_state(),
        "state_dict": second(model).state_dict(),
        "state_dict_ema": model.state_dict(),
    }


def torchvision_training(model):
    return {
        "epoch": 89,
        "args": argparse.Namespace(lr=0.5),
        "optimizer": sgd_state(),
        "model": second(model).state_dict(),
        "model_ema": ddp(model.state_dict()) | {"n_averaged": torch.tensor(9)},
    }


def detectron2_names(state_dict):
    """Rename tensors as the community's converter scripts do, by text replacements."""
    out = {}
    for key, value in state_dict.items():
        name = key if "layer" in key else "stem." + key
        for t in (1, 2, 3, 4):
            name = name.replace(f"layer{t}", f"res{t + 1}")
        for t in (1, 2, 3):
            name = name.replace(f"bn{t}", f"conv{t}.norm")
        name = name.replace("downsample.0", "shortcut")
        name = name.replace("downsample.1", "shortcut.norm")
        out[name] = value
    return out


def detectron2_moco(model):
    # Its fc becomes stem.fc.
    arrays = {k: v.numpy() for k, v in detectron2_names(model.state_dict()).items()}
    return {"model": arrays, "__author__": "MOCO", "matching_heuristics": True}


def detectron2_trained(model):
    model.fc = nn.Identity()
    tensors = {}
    for key, value in detectron2_names(model.state_dict()).items():
        # FrozenBatchNorm2d has no counters.
        if not key.endswith("num_batches_tracked"):
            tensors[f"backbone.bottom_up.{key}"] = value
    tensors["backbone.fpn_lateral2.weight"] = torch.randn(2, 3)
    tensors["proposal_generator.rpn_head.conv.weight"] = torch.ones(2)
    return {"model": tensors, "optimizer": sgd_state(), "iteration": 89999}


RGB = (IMAGENET_MEAN, IMAGENET_STD)
SWAV = (IMAGENET_MEAN, SWAV_STD)
CIFAR = (CIFAR_MEAN, (0.247, 0.243, 0.261))
CLLR = (CIFAR_MEAN, (0.2023, 0.1994, 0.2010))

# maker -> format, encoder taken by default, another encoder, method, epochs, stem, pixels

EXPECTED = {
    moco: ("moco", "query", "key", "moco", 200, "imagenet", RGB),
    lorac: ("lorac", "query", "key", "lorac", 200, "imagenet", SWAV),
    moco_v3: ("moco-v3", "query", "key", "moco_v3", 100, "imagenet", RGB),
    swav: ("swav", "trunk", None, "swav", None, "imagenet", SWAV),
    deepcluster_v2: (
        "deepcluster-v2",
        "trunk",
        None,
        "deepcluster_v2",
        400,
        "imagenet",
        SWAV,
    ),
    dino: ("dino", "teacher", "student", "dino", 300, "imagenet", RGB),
    simsiam: ("simsiam", "encoder", None, "simsiam", 100, "imagenet", RGB),
    barlow_twins: (
        "barlow-twins",
        "backbone",
        None,
        "barlow_twins",
        1000,
        "imagenet",
        RGB,
    ),
    vicreg: ("vicreg", "backbone", None, "vicreg", 1000, "imagenet", RGB),
    plain: ("plain trunk", "trunk", None, "unknown", None, "imagenet", RGB),
    arb_cifar: ("arb-cifar", "backbone", None, "arb", 1000, "conv3_p2", CIFAR),
    mio: ("mio", "encoder", None, "mio", None, "conv3_p0", RGB),
    mio_net: ("mio", "encoder", None, "mio", None, "imagenet", RGB),
    cllr: ("cllr", "encoder", None, "cllr", None, "conv3", CLLR),
    vissl: ("vissl", "trunk", "momentum", "vissl", 200, "imagenet", RGB),
    solo_learn: (
        "solo-learn",
        "online",
        "momentum",
        "solo_learn",
        400,
        "imagenet",
        RGB,
    ),
    solo_learn_cifar: (
        "solo-learn",
        "online",
        None,
        "solo_learn",
        400,
        "conv3_p2",
        CIFAR,
    ),
    lightly_example: ("lightly", "online", "momentum", "lightly", 400, "imagenet", RGB),
    lightly_benchmark: (
        "lightly",
        "online",
        "momentum",
        "lightly",
        400,
        "imagenet",
        RGB,
    ),
    mmselfsup_09: ("mmselfsup", "online", "momentum", "mmselfsup", 200, "conv3", RGB),
    mmselfsup_10: (
        "mmselfsup",
        "online",
        "momentum",
        "mmselfsup",
        300,
        "imagenet",
        RGB,
    ),
    mmselfsup_extracted: (
        "plain trunk",
        "trunk",
        None,
        "unknown",
        None,
        "imagenet",
        RGB,
    ),
    byol_sthalles: (
        "byol (sthalles)",
        "online",
        "target",
        "byol",
        None,
        "imagenet",
        RGB,
    ),
    byol_yaox12: ("byol (yaox12)", "online", "target", "byol", 300, "imagenet", RGB),
    byol_lucidrains: (
        "byol (lucidrains)",
        "online",
        "target",
        "byol",
        None,
        "imagenet",
        RGB,
    ),
    byol_deepmind: (
        "byol (DeepMind, converted)",
        "online",
        "target",
        "byol",
        None,
        "imagenet",
        RGB,
    ),
    torchvision: ("torchvision", "trunk", None, "supervised", None, "imagenet", RGB),
    timm_training: (
        "timm training",
        "ema",
        "model",
        "supervised",
        300,
        "imagenet",
        RGB,
    ),
    torchvision_training: (
        "torchvision training",
        "ema",
        "model",
        "supervised",
        90,
        "imagenet",
        RGB,
    ),
    detectron2_moco: ("detectron2", "backbone", None, "unknown", None, "imagenet", RGB),
    detectron2_trained: (
        "detectron2",
        "backbone",
        None,
        "unknown",
        None,
        "imagenet",
        RGB,
    ),
}
