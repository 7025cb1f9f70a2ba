"""K-means clusters the test images' unit features, and the clusters are compared with the classes.

There are as many clusters as classes with test images. Of several starts the one with the least
inertia counts. `nmi` is the mutual information over the arithmetic mean of both entropies, `ari` the
adjusted Rand index, `cluster_acc` the accuracy with the best one-to-one match to classes.
"""

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.records.store import Result
from backbench.requests.bounds import Count, NotNegative, Repeats
from backbench.runs import seeding
from backbench.runs.state import StopFlag
from backbench.stats.partitions import METRICS, agreement
from backbench.transfer import keeping
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class KMeansClusters(Protocol):
    """k-means on test features of unit length, compared with the classes."""

    restarts: Repeats = 10  # the one with the least inertia counts
    iterations: Count = 300
    tolerance: NotNegative = 1e-4  # scikit-learn's, on the movement of the centres


def refuse(p: KMeansClusters, name: str, splits: Splits) -> None:
    """Raise BadInput if all test images are of one class."""
    if len(set(splits.test.labels)) < 2:
        raise BadInput(f"{name}: its test images are of one class; clusters need two")


def clusterings(
    features: Tensor, clusters: int, p: KMeansClusters, seed: int, stop: StopFlag
) -> list[tuple[float, NDArray[np.int64]]]:
    """Cluster features (N, d) from each start; return its inertia and clusters (N,), the start with
    the least inertia first."""
    from sklearn.cluster import KMeans

    unit = F.normalize(features.float(), dim=1).cpu().numpy()
    found = []
    for start in range(p.restarts):
        stop.end_here("between two starts of k-means")
        drawn = seeding.seed_of(seed, "k-means", start) % 2**32
        k_means = KMeans(
            clusters,
            n_init=1,
            max_iter=p.iterations,
            tol=p.tolerance,
            random_state=drawn,
        )
        k_means.fit(unit)
        found.append((float(k_means.inertia_), k_means.labels_.astype(np.int64)))
    return sorted(found, key=lambda one: one[0])


def measure(
    task: Assignment[KMeansClusters],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    p = task.protocol
    test = task.splits.test
    found = extractor(test, f"{task.dataset.name} test features")
    label = np.asarray(test.labels)
    rows = []
    for trunk, features in zip(extractor.trunks, found):
        trunk.verify()
        starts = clusterings(features, len(set(test.labels)), p, task.seed, stop)
        by_start = [agreement(label, cluster) for _, cluster in starts]
        values = {}
        for metric, best in by_start[0].items():
            of_starts = [one[metric] for one in by_start]
            values[metric] = (best, {"starts": of_starts})
        _, clusters = starts[0]
        rows += keeping.write_plain(
            task, trunk.checkpoint, values, {"cluster": clusters}
        )
    return rows


PROBE = Probe(
    protocol=KMeansClusters,
    measure=measure,
    metrics=lambda *_: list(METRICS),
    refuse=refuse,
    words=lambda p: f"k-means, the best of {p.restarts} starts",
    work=lambda p, name, splits, count: {"image": len(splits.test)},
    only_test=True,
)
