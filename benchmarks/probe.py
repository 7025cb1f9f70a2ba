"""The probes: what `backbench linear` runs, against the customary ways. Three checkpoints together are
about two processes at once, so they are in wall time."""

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from machine import least, print_ratios
from sklearn.linear_model import LogisticRegression
from torch import nn
from torchvision import datasets, transforms
from views import write_photographs

from backbench.__main__ import keep_freed_memory
from backbench.images.image_list import scan_folder
from backbench.images.preprocess import Pixels, normalise
from backbench.knn import knn_scores
from backbench.parallel import precision
from backbench.transfer import logreg
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import (
    Pictures,
    equal_shares,
    global_batches,
    loader,
    training_pictures,
)
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.heads import LinearHeads
from backbench.transfer.protocol import CropAugment, Geometry
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
spawning = multiprocessing.get_context("spawn")
RATES = torch.tensor([0.1, 0.316, 1.0, 3.16, 10.0, 31.6, 100.0])
TEMPERATURE = 0.07
STRENGTHS = (1e2, 1e1, 1e0, 1e-1)  # l2, from the strongest


def checkpoint(arch: str, seed: int = 0) -> Checkpoint:
    torch.manual_seed(seed)
    return Checkpoint(
        arch=arch, method="random", state_dict=build_trunk(arch).state_dict()
    )


class Separate:
    """The peers' way: a head of its own per rate, traced cross-entropy, torch.optim.SGD."""

    def __init__(
        self, classes: int, dim: int, decay: float, rates: torch.Tensor
    ) -> None:
        self.heads = [nn.Linear(dim, classes) for _ in rates]
        self.optimizers = [
            torch.optim.SGD(
                h.parameters(), lr=float(lr), momentum=0.9, weight_decay=decay
            )
            for h, lr in zip(self.heads, rates)
        ]

    def step(self, index: int, features: torch.Tensor, labels: torch.Tensor) -> None:
        loss = F.cross_entropy(self.heads[index](features), labels)
        self.optimizers[index].zero_grad()
        loss.backward()
        self.optimizers[index].step()


def seven_rates(batch: int, repeats: int) -> None:
    """Seven rates, ResNet-50, 224 px: seven runs with a pass each, against one pass."""
    trunk = FrozenTrunk.build(checkpoint("resnet50"), device=CPU)
    images, labels = torch.randn(batch, 3, 224, 224), torch.arange(batch) % 100
    separate = Separate(100, 2048, 0.0, RATES)
    together = LinearHeads(7, 100, 2048, std=0.01, seed=0, device=CPU)

    def seven() -> None:
        for i in range(7):
            separate.step(i, trunk(images), labels)

    def one() -> None:
        together.step(
            trunk(images), labels, RATES, momentum=0.9, decay=0.0, batch=batch
        )

    ways = {
        "seven runs": seven,
        "one pass": one,
        "limit: a forward alone": lambda: trunk(images),
    }
    title = "seven rates, ResNet-50"
    print_ratios(title, least(ways, repeats), batch)


def three_checkpoints(count: int, repeats: int) -> None:
    """Three ResNet-18 at 64 px on 500x375 JPEG: the loop against decoding and against forwards."""
    trunks = [
        FrozenTrunk.build(checkpoint("resnet18", seed), device=CPU) for seed in range(3)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), count, distinct=64)
        images = scan_folder(folder)
        augment, batch = CropAugment(size=64), 32
        labels = torch.zeros(batch, dtype=torch.int64)
        heads = [LinearHeads(7, 10, 512, std=0.01, seed=0, device=CPU) for _ in trunks]
        pixels = torch.zeros(batch, 3, 64, 64, dtype=torch.uint8)

        def batches() -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
            stream = global_batches(0, count, batch, 0, count // batch)
            machine = Machine(CPU, rank=0, world=1, workers=1)
            return training_pictures(images, augment, stream, seed=0, machine=machine)

        def decode() -> None:
            for _ in batches():
                pass

        def forwards() -> None:
            for _ in range(count // batch):
                forward_all(trunks, pixels)

        def train(which: list[int]) -> None:
            for got, _ in batches():
                for i, features in zip(
                    which, forward_all([trunks[i] for i in which], got)
                ):
                    heads[i].step(
                        features, labels, RATES, momentum=0.9, decay=0.0, batch=batch
                    )

        def apart() -> None:
            for i in range(3):
                train([i])

        ways = {
            "one after the other": apart,
            "together": lambda: train([0, 1, 2]),
            "limit: decoding alone": decode,
            "limit: three forwards alone": forwards,
        }
        seconds = least(ways, repeats, wall=True)
    title = "three checkpoints, ResNet-18"
    print_ratios(title, seconds, count)


def heads_on_features(
    classes: int, decay: float, repeats: int, *, confident: bool = False
) -> None:
    """Seven heads on ready features, batch 256, 2048-d: of low rates at their start, or of the
    probe's rates after 40 steps, when most probabilities are below 1e-38."""
    features, labels = torch.randn(256, 2048), torch.arange(256) % classes
    rates = RATES if confident else RATES * 1e-3
    separate = Separate(classes, 2048, decay, rates)
    together = LinearHeads(7, classes, 2048, std=0.01, seed=0, device=CPU)
    weight, momentum = torch.randn(7 * classes, 2048), torch.zeros(7 * classes, 2048)
    gradient = torch.randn(256, 7 * classes)

    def loop() -> None:
        for i in range(7):
            separate.step(i, features, labels)

    def batched() -> None:
        together.step(features, labels, rates, momentum=0.9, decay=decay, batch=256)

    for _ in range(40 * confident):
        loop()
        batched()

    def products() -> None:
        features @ weight.T
        torch.mm(gradient.T, features, out=momentum)

    # What SGD goes through in memory besides, however it is written
    def passes() -> None:
        if decay:
            momentum.add_(weight, alpha=decay)
        weight.add_(momentum, alpha=-1e-9)

    ways = {
        "torch.optim.SGD": loop,
        "one product": batched,
        "limit: two products alone": products,
        "limit: SGD's passes over memory": passes,
    }
    about = f"{classes} classes, decay {decay:g}{', confident' * confident}"
    print_ratios(f"seven heads, {about}", least(ways, repeats))


def frozen_resnet(batch: int, repeats: int) -> None:
    """The frozen ResNet-50 forward at 224 px."""
    point = checkpoint("resnet50")
    plain = point.backbone().eval()
    last = point.backbone().eval().to(memory_format=torch.channels_last)
    folded = FrozenTrunk.build(point, device=CPU, precision="fp32")
    rough = FrozenTrunk.build(point, device=CPU, precision="bf16")
    images = torch.randn(batch, 3, 224, 224)
    strided = images.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = plain(images)
        errors = [
            float((f(images) - expected).norm() / expected.norm())
            for f in (folded, rough)
        ]
        ways = {
            "fp32 NCHW": lambda: plain(images),
            "channels last": lambda: last(strided),
            "channels last, batch norm folded": lambda: folded(images),
        }
        if precision.bf16_is_quick("cpu"):
            ways["the same in bf16"] = lambda: rough(images)
        seconds = least(ways, repeats)
    note = f"relative error folded {errors[0]:.1e}, in bf16 {errors[1]:.1e}"
    print_ratios("frozen ResNet-50", seconds, batch, note)


def fresh_processes(arch: str, batch: int, repeats: int) -> None:
    """A frozen trunk's forward at 224 px in processes that differ in what becomes of freed memory:
    the kernel's, as by default, or kept, as the command `backbench` has it."""
    ways = {
        "fp32 NCHW": ForwardProcess(arch, batch, plain=True, keeps=False),
        "folded": ForwardProcess(arch, batch, plain=False, keeps=False),
        "folded, memory kept": ForwardProcess(arch, batch, plain=False, keeps=True),
    }
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, process in ways.items():
            seconds[name] = min(seconds[name], process.forward_seconds())
    for process in ways.values():
        process.end()
    title = f"frozen {arch.rpartition(':')[2]}, a process each"
    print_ratios(title, seconds, batch)


class ForwardProcess:
    """A process with a trunk and a batch, which tells the CPU seconds of a forward pass on demand."""

    def __init__(self, arch: str, batch: int, *, plain: bool, keeps: bool) -> None:
        self.pipe, theirs = spawning.Pipe()
        args = (theirs, arch, batch, plain, keeps)
        self.process = spawning.Process(target=time_forward, args=args)
        self.process.start()
        self.pipe.recv()

    def forward_seconds(self) -> float:
        self.pipe.send(True)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(False)
        self.process.join()


def time_forward(
    pipe: Connection, arch: str, batch: int, plain: bool, keeps: bool
) -> None:
    """Answer each request by the CPU seconds of a forward pass on one thread."""
    torch.set_num_threads(1)
    if keeps:
        keep_freed_memory()
    point = checkpoint(arch)
    if plain:
        trunk = point.backbone().eval()
    else:
        trunk = FrozenTrunk.build(point, device=CPU, precision="fp32")
    images = torch.randn(batch, 3, 224, 224)
    with torch.inference_mode():
        trunk(images)  # the first pass, which does not count
        pipe.send(True)
        while pipe.recv():
            began = time.process_time()
            trunk(images)
            pipe.send(time.process_time() - began)


def clusters(
    count: int, dim: int, classes: int, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (count, dim) around the centres of their classes, and labels."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(classes, (count,), generator=generator)
    return centres[labels] + 4 * torch.randn(count, dim, generator=generator), labels


def neighbours(images: int, test_images: int, repeats: int) -> None:
    """Neighbours. DINO's evaluation: test images in a hundred chunks, one-hot labels of the
    neighbours times their weights; everything again for another k."""
    bank, labels = clusters(images, 384, 100)
    test, _ = clusters(test_images, 384, 100, seed=2)

    def theirs(k: tuple[int, ...]) -> list[torch.Tensor]:
        train, tested = F.normalize(bank, dim=1), F.normalize(test, dim=1)
        votes = []
        for each in k:
            for chunk in tested.chunk(100):
                near, index = (chunk @ train.T).topk(each)
                one_hot = F.one_hot(labels[index], 100).float()
                votes.append((one_hot * (near / TEMPERATURE).exp().unsqueeze(2)).sum(1))
        return votes

    def ours(k: tuple[int, ...]) -> dict[int, torch.Tensor]:
        return knn_scores(test, bank, labels, classes=100, k=k, temperature=TEMPERATURE)

    same = (
        (ours((20,))[20].argmax(1) == torch.cat(theirs((20,))).argmax(1)).float().mean()
    )
    for k in ((20,), (10, 20, 100)):
        seconds = least(
            {"DINO's way": partial(theirs, k), "ours": partial(ours, k)}, repeats
        )
        title = f"neighbours, k = {', '.join(map(str, k))}"
        note = f"the same answer on {100 * same:.2f}% of the images"
        print_ratios(title, seconds, test_images, note)


def logistic_regression(
    count: int, dim: int, classes: int, *, alike: bool, repeats: int
) -> None:
    """Logistic regression, one strength after the other, each from the solution before."""
    x, y = clusters(count, dim, classes)
    if not alike:  # scales from 0.1 to 10, as a transformer's features have them
        x = x * torch.logspace(-1, 1, dim)

    def ours(tolerance: float) -> list[logreg.Fit]:
        fits: list[logreg.Fit] = []
        moments = logreg.second_moments([(x, y)], CPU, 65536)
        for l2 in STRENGTHS:
            start = fits[-1] if fits else None
            settings = {
                "classes": classes,
                "l2": l2,
                "start": start,
                "tolerance": tolerance,
            }
            settings["moments"] = moments
            fits.append(logreg.fit([(x, y)], **settings))
        return fits

    def theirs(tolerance: float) -> list[tuple[np.ndarray, np.ndarray]]:
        model, found = (
            LogisticRegression(warm_start=True, max_iter=1000, tol=tolerance),
            [],
        )
        for l2 in STRENGTHS:
            model.set_params(C=1 / l2).fit(x.numpy(), y.numpy())
            found.append((model.coef_.copy(), model.intercept_.copy()))
        return found

    # The loss at the strongest penalty
    def objective(weight: torch.Tensor, bias: torch.Tensor) -> float:
        loss = F.cross_entropy(x @ weight.T + bias, y, reduction="sum")
        return float(loss + STRENGTHS[0] / 2 * weight.square().sum())

    for tolerance in (1e-5, 1e-4):  # the latter is scikit-learn's default
        ways = {
            "scikit-learn, warm": partial(theirs, tolerance),
            "ours": partial(ours, tolerance),
        }
        scales = "" if alike else " unlike scales,"
        title = f"logistic regression,{scales} to {tolerance:g}"
        first, other = ours(tolerance)[0], map(torch.from_numpy, theirs(tolerance)[0])
        ratio = objective(first.weight, first.bias) / objective(*other)
        print_ratios(
            title, least(ways, repeats), note=f"our objective {ratio:.5f} of theirs"
        )


def evaluation_loader(count: int, repeats: int) -> None:
    """JPEGs of 500 x 375, decoded, resized, cropped and normalised."""
    batch = 32
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), count, distinct=16)
        images = scan_folder(folder)
        geometry = Geometry().transform()
        machine = Machine(CPU, rank=0, world=1, workers=0)
        cropped = [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
        ]
        steps = [*cropped, transforms.Normalize(Pixels().mean, Pixels().std)]
        folder_images = datasets.ImageFolder(folder, transforms.Compose(steps))
        plain = torch.utils.data.DataLoader(folder_images, batch_size=batch)

        def ours() -> list[torch.Tensor]:
            shares = equal_shares(0, count, batch, rank=0, world=1)
            pictures = Pictures(images, lambda picture, _: geometry(picture))
            batches = loader(pictures, shares, machine=machine)
            return [normalise(pixels, Pixels()) for pixels, _ in batches]

        def theirs() -> list[torch.Tensor]:
            return [pixels for pixels, _ in plain]

        apart = max(float((a - b).abs().max()) for a, b in zip(ours(), theirs()))
        seconds = least({"torchvision's transforms": theirs, "ours": ours}, repeats)
    title = "evaluation's loader"
    print_ratios(title, seconds, count, f"largest difference {apart:.1e}")


def run(quick: bool) -> None:
    seven_rates(8 if quick else 32, 2 if quick else 4)
    for classes, repeats in (100, 10 if quick else 40), (1000, 3 if quick else 12):
        for decay in 0.0, 1e-4:
            heads_on_features(classes, decay, repeats)
    heads_on_features(100, 1e-4, 5 if quick else 20, confident=True)
    # Below 16 images torch gives one thread's 1 x 1 convolutions to its own product, whatever the
    # layout; an evaluation has 256
    frozen_resnet(16, 3 if quick else 6)
    for arch in "resnet50", "timm:tf_efficientnet_lite0":
        fresh_processes(arch, 32, 3 if quick else 6)
    three_checkpoints(96 if quick else 512, 2 if quick else 4)
    warnings.filterwarnings("ignore", category=FutureWarning)  # scikit-learn's
    neighbours(*((4000, 800) if quick else (50_000, 5_000)), repeats=3)
    for alike in True, False:
        logistic_regression(
            *((400, 64, 5) if quick else (5000, 512, 50)), alike=alike, repeats=3
        )
    evaluation_loader(32 if quick else 128, repeats=3)
