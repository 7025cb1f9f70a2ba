"""Pretraining on a GPU: steps of the papers' recipes beside the encoders alone, MoCo beside
lightly's and solo-learn's, and what the losses cost. A part of gpu.py."""

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import losses as compared
import step as peers
import torch
from machine import Work, least
from torch import Tensor, nn

from backbench.parallel import precision
from backbench.pretrain import optim
from backbench.pretrain.method import Method, Setup, build_method
from backbench.pretrain.methods.arb import arb_loss
from backbench.pretrain.methods.cllr import cllr_regularizer
from backbench.pretrain.methods.lorac import lorac_loss, nuclear_norm
from backbench.pretrain.methods.simclr import nt_xent_loss
from backbench.pretrain.recipe import PretrainConfig
from backbench.recipes import config as recipes
from backbench.weights.families.resnet_trunk import build_backbone
from backbench.weights.trunk import Trunk

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
    setup = Setup(
        batch_size=scale.batch, views=views, seed=0, images=10_000, classes=10
    )
    method = build_method(
        config.method, build_backbone(config.arch, config.stem), setup
    )
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
    network: nn.Module = (
        resnet18(num_classes=128) if scale.small else resnet50(num_classes=128)
    )
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


def steps(scale: Scale) -> dict[str, float]:
    """Seconds of each recipe's step in bf16."""
    print(
        f"\npretraining steps, batch {scale.batch}: images/s, of the encoders alone, peak GiB"
    )
    seconds = {}
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
            if way == "bf16":
                seconds[name] = ours
            print(
                f"  {name:26}{way:16}{scale.batch / ours:9.0f} images/s"
                f"{floor / ours:8.1%}{memory:8.1f}",
                flush=True,
            )
    return seconds


def beside_lightly(scale: Scale) -> None:
    sizes = peers.Sizes(
        scale.device, "resnet50", "imagenet", scale.batch, 224, scale.queue
    )
    if scale.small:
        sizes = replace(sizes, arch="resnet18", stem="conv3", pixels=16)
    shape = (sizes.batch, 3, sizes.pixels, sizes.pixels)
    views = [torch.randn(shape, device=sizes.device) for _ in range(2)]
    print(
        "\nMoCo v2 beside lightly's and solo-learn's, equal precision (goal: 1.05 of lightly's)"
    )
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


# Losses


def _lorac(queries: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    rows = torch.cat([queries[:3], keys])
    norms = nuclear_norm(rows.transpose(0, 1))
    settings = {"temperature": 0.2, "beta": 4.0, "rows": rows, "norms": norms}
    met = (queries[1:], queries[:-1])
    parts = [lorac_loss(q, key, queue, **settings) for q, key in zip(met, keys)]
    return torch.stack(parts).mean()


def _lorac_products(queries: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    return compared.two_products(torch.cat([queries[1:], queries[:-1]]), keys, queue)


def loss_cases(
    scale: Scale,
) -> dict[str, tuple[compared.LossCase, compared.Loss | None]]:
    """By the recipe whose step they are part of: the loss, and what it cannot do without."""
    n, k, d = scale.batch, scale.queue, 128
    wide = 64 if scale.small else 2048
    products = compared.two_products

    def case(
        ours: compared.Loss, *shapes: compared.Shape, gradients: int = 1
    ) -> compared.LossCase:
        # `naive` is never called: only `ours` is timed
        return compared.LossCase("", ours, ours, shapes, gradients=gradients)

    nt_xent = partial(nt_xent_loss, temperature=0.1)
    arb = partial(arb_loss, ridge=1e-4, groups=8, permutation=None)
    cllr = partial(cllr_regularizer, alpha=10.0, norm="nuclear")
    return {
        "SimCLR": (case(nt_xent, (n, d), (n, d), gradients=2), None),
        "MoCo v2": (case(compared.ours_infonce, (n, d), (n, d), (k, d)), products),
        "LORAC, 3 x 224 + 5 x 96": (
            case(_lorac, (8, n, d), (2, n, d), (k, d)),
            _lorac_products,
        ),
        "JCL, 5 keys": (case(compared.ours_jcl, (n, d), (5, n, d), (k, d)), products),
        "ARB": (case(arb, (n, wide), (n, wide), gradients=2), None),
        "CLLR's regulariser": (case(cllr, (n, wide), (wide, wide), gradients=2), None),
    }


def losses(scale: Scale, steps_of: dict[str, float]) -> None:
    print(
        "\nlosses, forward and backward: ms, two products' share, of the step in bf16 (goal: < 3%)"
    )
    for name, (case, products) in loss_cases(scale).items():
        inputs = tuple(x.to(scale.device) for x in case.inputs())
        timed = {"ours": partial(compared.run_once, case.ours, inputs, case.gradients)}
        if products is not None:
            timed["limit"] = partial(
                compared.run_once, products, inputs, case.gradients
            )
        found = scale.least(timed)
        share = f"{found['limit'] / found['ours']:8.0%}" if products else f"{'-':>8}"
        of_step = (
            f"{found['ours'] / steps_of[name]:8.1%}"
            if name in steps_of
            else f"{'-':>8}"
        )
        print(f"  {name:26}{1000 * found['ours']:9.2f}{share}{of_step}", flush=True)
