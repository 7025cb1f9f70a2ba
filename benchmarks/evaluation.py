"""Neighbours, logistic regression and the evaluation loader: rows 17 to 19 of the performance goals,
each beside what the field runs, in one process.

    OMP_NUM_THREADS=1 python benchmarks/evaluation.py [--quick] | tee benchmarks/evaluation.txt

Timed as in probe.py: in turn, the least CPU time of each counts. Answers are compared, too. What is
timed is what `backbench linear` runs: knn_scores, transfer.logreg.fit, the loader of
transfer.batches with `normalise`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from machine import describe, least
from sklearn.linear_model import LogisticRegression
from torchvision import datasets, transforms
from views import write_photographs

from backbench.images.image_list import scan_folder
from backbench.images.preprocess import Pixels, normalise
from backbench.knn import knn_scores
from transfer import logreg
from transfer.batches import Pictures, equal_shares, loader
from transfer.devices import Machine
from transfer.protocols import Geometry

BATCH, REPEATS = 32, 3
TEMPERATURE = 0.07
STRENGTHS = (1e2, 1e1, 1e0, 1e-1)  # l2, from the strongest


def clusters(count: int, dim: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (count, dim) around the centres of their classes, and labels."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(classes, (count,), generator=generator)
    return centres[labels] + 4 * torch.randn(count, dim, generator=generator), labels


# Neighbours


def chunked_knn(
    train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor, classes: int, k: int
) -> torch.Tensor:
    """Votes as DINO's evaluation counts them: test images in a hundred chunks, one-hot labels of the
    neighbours times their weights; everything again for another k."""
    train, test = F.normalize(train, dim=1), F.normalize(test, dim=1)
    votes = []
    for chunk in test.chunk(100):
        near, index = (chunk @ train.T).topk(k)
        one_hot = F.one_hot(labels[index], classes).float()
        votes.append((one_hot * (near / TEMPERATURE).exp().unsqueeze(2)).sum(1))
    return torch.cat(votes)


def row_17(quick: bool) -> None:
    classes, sizes = 100, (4000, 800) if quick else (50_000, 5_000)
    bank, labels = clusters(sizes[0], 384, classes, seed=1)
    test, _ = clusters(sizes[1], 384, classes, seed=2)

    def ours(k: tuple[int, ...]) -> dict[int, torch.Tensor]:
        return knn_scores(test, bank, labels, classes=classes, k=k, temperature=TEMPERATURE)

    def theirs(k: tuple[int, ...]) -> dict[int, torch.Tensor]:
        return {each: chunked_knn(bank, labels, test, classes, each) for each in k}

    mine, other = ours((20,))[20].argmax(1), theirs((20,))[20].argmax(1)
    for k in ((20,), (10, 20, 100)):
        t = least({"ours": partial(ours, k), "theirs": partial(theirs, k)}, REPEATS)
        print(
            f"17 neighbours, {sizes[1]} images by {sizes[0]}, k = {', '.join(map(str, k))}:"
            f" {t['theirs'] / t['ours']:.2f}x of DINO's way",
            flush=True,
        )
    print(f"   the same answer on {100 * (mine == other).float().mean():.2f}% of the images")


# Logistic regression


def row_18(quick: bool) -> None:
    classes, count, dim = (5, 400, 64) if quick else (50, 5000, 512)
    x, y = clusters(count, dim, classes, seed=1)
    arrays = x.numpy(), y.numpy()

    def ours(tolerance: float) -> list[logreg.Fit]:
        found: list[logreg.Fit] = []
        for l2 in STRENGTHS:
            start = found[-1] if found else None
            settings = {"classes": classes, "l2": l2, "start": start, "tolerance": tolerance}
            found.append(logreg.fit([(x, y)], **settings))
        return found

    def theirs(tolerance: float) -> list[np.ndarray]:
        model = LogisticRegression(warm_start=True, max_iter=1000, tol=tolerance)
        found = []
        for l2 in STRENGTHS:
            found.append(model.set_params(C=1 / l2).fit(*arrays).coef_.copy())
        return found

    for tolerance, what in ((1e-5, "equal tolerance"), (1e-4, "scikit-learn's default tolerance")):
        ways = {"ours": partial(ours, tolerance), "theirs": partial(theirs, tolerance)}
        t = least(ways, REPEATS)
        print(
            f"18 logistic regression, {count} x {dim}, {classes} classes, {len(STRENGTHS)} strengths,"
            f" {what} ({tolerance:g}): {t['theirs'] / t['ours']:.2f}x of scikit-learn, warm",
            flush=True,
        )
    pairs = zip(ours(1e-5), theirs(1e-5))
    apart = max(float(np.abs(a.weight.numpy() - b).max() / np.abs(b).max()) for a, b in pairs)
    print(f"   largest relative difference of the weights {apart:.1e}")


# The loader


def row_19(quick: bool) -> None:
    count = 32 if quick else 128
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), count, distinct=16)
        images = scan_folder(folder)
        geometry = Geometry().transform()
        machine = Machine(torch.device("cpu"), rank=0, world=1, workers=0)
        cropped = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
        steps = [*cropped, transforms.Normalize(Pixels().mean, Pixels().std)]
        found = datasets.ImageFolder(folder, transforms.Compose(steps))
        plain = torch.utils.data.DataLoader(found, batch_size=BATCH)

        def ours() -> list[torch.Tensor]:
            shares = equal_shares(0, count, BATCH, rank=0, world=1)
            pictures = Pictures[None](images, lambda picture, _: geometry(picture))
            batches = loader(pictures, shares, machine=machine)
            return [normalise(pixels, Pixels()) for pixels, _ in batches]

        def theirs() -> list[torch.Tensor]:
            return [pixels for pixels, _ in plain]

        t = least({"ours": ours, "theirs": theirs}, REPEATS)
        apart = max(float((a - b).abs().max()) for a, b in zip(ours(), theirs()))
    print(
        f"19 loader, {count} JPEGs of 500 x 375, decoded, resized, cropped and normalised:"
        f" {t['theirs'] / t['ours']:.2f}x of torchvision's transforms"
    )
    print(f"   largest difference {apart:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small: the figures mean little")
    quick = parser.parse_args().quick
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(describe())
    for row in (row_17, row_18, row_19):
        row(quick)


if __name__ == "__main__":
    main()
