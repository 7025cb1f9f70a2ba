"""Simulate how often the interval of the labels that a trunk needs holds the true number.

python benchmarks/labels_needed.py [--repeats R]; `benchmarks/labels_needed.txt` has its last figures.

Two trunks see the same images, each with noise of its own, and a class is the nearest mean of its
drawn features: a linear model that is fitted in no time. The labelled images stay, and each repeat
takes other draws of labels and other test images. The true number is that of many draws and of many
test images.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from backbench.stats import confidence, labels_needed
from backbench.stats.labels_needed import BEYOND

LABELS = (1, 2, 5, 10, 20, 50, 100)
POOL = 200  # labelled images of a class
TRUE_DRAWS = 4000  # each on test images of its own
TRUE_TEST = 2000
# (classes, dimensions, the second trunk's own noise, draws, test images, means of class means)
WORLDS = (
    (10, 20, 0.5, 10, 1000, False),
    (10, 20, 0.5, 10, 1000, True),
    (10, 20, 1.0, 10, 500, False),
    (5, 10, 0.6, 5, 300, False),
    (5, 10, 0.6, 20, 2000, False),
    (2, 10, 0.6, 10, 200, False),
    (10, 20, 0.5, 3, 1000, False),
)


class World:
    """Images of classes, as two trunks see them."""

    def __init__(self, seed: int, classes: int, dim: int, noise: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.classes = classes
        self.noise = np.array([0.3, noise])[:, None, None]
        self.means = 0.55 * self.rng.normal(size=(classes, dim))
        self.labels = np.repeat(np.arange(classes), POOL)
        self.pool = self.seen(self.labels).reshape(2, classes, POOL, dim)

    def seen(self, label: np.ndarray) -> np.ndarray:
        """The features (2, N, d) of new images with these labels by either trunk."""
        shape = (len(label), self.means.shape[1])
        shared = self.means[label] + self.rng.normal(size=shape)
        return shared + self.noise * self.rng.normal(size=(2, *shape))

    def curves(self, draws: int, images: int) -> tuple[np.ndarray, np.ndarray]:
        """The hits (2, P, D, N) of both trunks on new test images, and the labels of these."""
        label = self.rng.integers(0, self.classes, images)
        test = self.seen(label)
        hits = np.empty((2, len(LABELS) + 1, draws, images), dtype=bool)
        for draw in range(draws):
            shuffled = self.rng.random((self.classes, POOL)).argsort(1)
            in_order = np.take_along_axis(self.pool, shuffled[None, :, :, None], 2)
            for point, labels in enumerate(LABELS):
                means = in_order[:, :, :labels].mean(2)
                hits[:, point, draw] = nearest(means, test) == label
        hits[:, -1] = (nearest(self.pool.mean(2), test) == label)[:, None]
        return hits, label

    def true_curves(self, by_class: bool) -> np.ndarray:
        """The accuracies (2, P) of both trunks, in the mean over many draws and images."""
        total = np.zeros((2, len(LABELS) + 1))
        for _ in range(TRUE_DRAWS):
            hits, label = self.curves(1, TRUE_TEST)
            weight = confidence.weights(TRUE_TEST, label if by_class else None)
            total += hits[:, :, 0] @ weight
        return total / TRUE_DRAWS


def nearest(means: np.ndarray, features: np.ndarray) -> np.ndarray:
    """The class (2, N) of the nearest mean (2, C, d) of each feature (2, N, d)."""
    closeness = features @ means.transpose(0, 2, 1)
    closeness -= 0.5 * (means**2).sum(-1)[:, None]
    return closeness.argmax(-1)


def true_number(target: float, curve: np.ndarray, labels: np.ndarray) -> float:
    """Where a curve that rises reaches the target, on a line over the logarithm of labels."""
    if curve[-1] < target:
        return BEYOND
    return float(np.exp(np.interp(target, curve, np.log(labels))))


def simulate(number: int, repeats: int) -> list[str]:
    """Say how often the interval at each point of the first curve held the true number."""
    classes, dim, noise, draws, images, by_class = WORLDS[number]
    world = World(number, classes, dim, noise)
    labels = np.array([*LABELS, POOL], dtype=float)
    first, second = world.true_curves(by_class)
    true = [true_number(target, second, labels) for target in first]
    held = np.zeros(len(labels))
    for _ in range(repeats):
        hits, label = world.curves(draws, images)
        for point, target in enumerate(hits[0]):
            if true[point] == BEYOND:
                continue
            need = labels_needed.compare(
                target, hits[1], labels, label if by_class else None
            )
            assert need.ci95 is not None
            low, high = need.ci95
            held[point] += low <= true[point] <= high
    inside = [n for n, value in enumerate(true) if value < BEYOND]
    metric = "class means" if by_class else "top-1"
    lines = [f"{classes} classes, {draws} draws, {images} test images, {metric}:"]
    for point in inside:
        lines.append(
            f"  {labels[point]:g} labels need {true[point]:.1f}: covers"
            f" {100 * held[point] / repeats:.1f}%"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--worlds", type=int, nargs="*", default=range(len(WORLDS)))
    given = parser.parse_args(arguments)
    for number in given.worlds:
        print("\n".join(simulate(number, given.repeats)), flush=True)


if __name__ == "__main__":
    main()
