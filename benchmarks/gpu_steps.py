"""Pretraining on a GPU: steps of the papers' recipes beside the encoders alone, and MoCo beside
lightly's and solo-learn's. A part of gpu.py."""

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import step as peers
import torch
from machine import Work, least
from torch import Tensor, nn

from backbench.parallel import precision
from backbench.recipes import config as recipes
from backbench.weights.families.resnet_trunk import build_backbone
from backbench.weights.trunk import Trunk
from pretrain import optim
from pretrain.method import Method, Setup, build_method
from pretrain.recipe import PretrainConfig

RECIPES = {
    "SimCLR": "lorac/simclr_imagenet",
    "MoCo v2": "lorac/moco_v2_imagenet",
    "LORAC, 3 x 224 + 5 x 96": "lorac/lorac_imagenet",
    "JCL, 5 keys": "jcl/jcl_imagenet",
    "ARB": "arb/arb_imagenet_2048",
}
COMPILED = ("MoCo v2",)  # compiling takes a minute each
PRECISIONS = ("fp32", "tf32", "bf16", "bf16, compiled")


@dataclass(frozen=True)
class Scale:
    """Full size, or that of --small, on a device."""

    small: bool
    device: str

    def least(self, ways: Mapping[str, Work]) -> dict[str, float]:
        """The least seconds of one call of each."""
        return least(ways, 1 if self.small else 5, device=self.device)

    def forget_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """The GPU's peak since the last `forget_peak`; nan without one."""
        if self.device != "cuda":
            return float("nan")
        return torch.cuda.max_memory_allocated() / 2**30

    @property
    def batch(self) -> int:
        return 8 if self.small else 256

    @property
    def queue(self) -> int:
        return 64 if self.small else 65536

    def pixels(self, size: int) -> int:
        return size // 7 if self.small else size

    @property
    def words(self) -> list[str]:
        """The sizes that replace a recipe's own."""
        words = [f"batch_size={self.batch}"]
        return [*words, "arch=resnet18"] if self.small else words

    def recipe(self, name: str) -> PretrainConfig:
        config = recipes.load(PretrainConfig, name, self.words, kind="pretrain")
        if self.small and hasattr(config.method, "queue"):
            tiny = replace(config.method, queue=self.queue, groups=2)
            return replace(config, method=tiny)
        return config


# Steps


@contextlib.contextmanager
def computing(way: str, device: str) -> Iterator[None]:
    """In one of PRECISIONS."""
    precision.use("tf32" if way == "tf32" else "fp32")
    with torch.autocast(device, torch.bfloat16, enabled=way.startswith("bf16")):
        yield


def drawn_views(config: PretrainConfig, scale: Scale) -> list[Tensor]:
    out = []
    for crops in config.views.per_view:
        side = scale.pixels(crops.size)
        view = torch.randn(scale.batch, 3, side, side, device=scale.device)
        out.append(view.contiguous(memory_format=torch.channels_last))
    return out


def method_of(config: PretrainConfig, scale: Scale) -> Method:
    torch.manual_seed(0)
    views = len(config.views.per_view)
    setup = Setup(batch_size=scale.batch, views=views, seed=0, images=10_000, classes=10)
    method = build_method(config.method, build_backbone(config.arch, config.stem), setup)
    return method.to(scale.device).to(memory_format=torch.channels_last)


def stepper(method: Method, config: PretrainConfig, way: str, scale: Scale) -> Work:
    """The loop's step on views that are there."""
    optimizer = optim.of_recipe(config, method)
    views, context = drawn_views(config, scale), partial(computing, way, scale.device)
    return peers.method_step(method, optimizer, views, context, epoch=120, progress=0.6)


def bare(config: PretrainConfig, way: str, scale: Scale) -> Work:
    """No method can do with less: ResNet-50 forward and backward, forward on the keys, and SGD."""
    from torchvision.models import resnet18, resnet50

    torch.manual_seed(0)
    network: nn.Module = resnet18(num_classes=128) if scale.small else resnet50(num_classes=128)
    network = network.to(scale.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, fused=True)
    trained, keys = _passes(config)
    views = drawn_views(config, scale)

    def step() -> None:
        with computing(way, scale.device):
            outputs = [network(views[i]).float().square().mean() for i in trained]
            with torch.no_grad():
                for i in keys:
                    network(views[i])
        torch.stack(outputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _passes(config: PretrainConfig) -> tuple[list[int], list[int]]:
    """Which views take a gradient, and which are keys."""
    views = list(range(len(config.views.per_view)))
    if config.method.name == "lorac":
        return views, views[: config.method.keys]
    if config.method.name in ("moco", "jcl"):
        return views[:1], views[1:]
    return views, []


def steps(scale: Scale) -> None:
    print(f"\npretraining steps, batch {scale.batch}: images/s, of the encoders alone, peak GiB")
    for name, recipe in RECIPES.items():
        config = scale.recipe(recipe)
        for way in PRECISIONS:
            compiled = way.endswith("compiled")
            if compiled and name not in COMPILED:
                continue
            method = method_of(config, scale)
            if compiled and scale.device == "cuda":
                for module in method.modules():  # as the loop does: every trunk
                    if isinstance(module, Trunk):
                        module.compile()
            scale.forget_peak()
            ours = scale.least({"": stepper(method, config, way, scale)})[""]
            memory = scale.peak_gib()
            del method
            gc.collect()
            floor = scale.least({"": bare(config, way, scale)})[""]
            print(
                f"  {name:26}{way:16}{scale.batch / ours:9.0f} images/s"
                f"{floor / ours:8.1%}{memory:8.1f}",
                flush=True,
            )


def beside_lightly(scale: Scale) -> None:
    sizes = peers.Sizes(scale.device, "resnet50", "imagenet", scale.batch, 224, scale.queue)
    if scale.small:
        sizes = replace(sizes, arch="resnet18", stem="conv3", pixels=16)
    shape = (sizes.batch, 3, sizes.pixels, sizes.pixels)
    views = [torch.randn(shape, device=sizes.device) for _ in range(2)]
    print("\nMoCo v2 beside lightly's and solo-learn's, equal precision (goal: 1.05 of lightly's)")
    for cast, way in ((False, "tf32"), (True, "bf16")):
        precision.use("tf32")
        timed = peers.of_all(sizes, views, cast)
        found = scale.least(timed)
        base = ""
        for name, each in found.items():
            base = base if name.startswith("ours") else name
            ratio = found[base] / each
            print(
                f"  {f'{name}, {way}':36}{sizes.batch / each:9.0f} images/s{ratio:7.2f}x",
                flush=True,
            )
