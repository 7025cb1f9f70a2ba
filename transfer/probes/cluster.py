"""K-means clusters the test images' unit features, to be compared with their classes.

There are as many clusters as classes with test images; of several starts the one of least inertia
counts. `nmi` is the mutual information over the arithmetic mean of both entropies, `ari` the
adjusted Rand index, `cluster_acc` the accuracy with the best one-to-one match to classes.
"""

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.records.store import Result
from backbench.runs import seeding
from backbench.runs.state import StopFlag
from backbench.stats.partitions import METRICS, agreement
from backbench.transfer import scoring
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocols import KMeansClusters
from backbench.transfer.scoring import Assignment


def refuse(p: KMeansClusters, name: str, splits: Splits) -> None:
    """BadInput if all test images are of one class."""
    if len(set(splits.test.labels)) < 2:
        raise BadInput(f"{name}: its test images are of one class; clusters need two")


def clusterings(
    features: Tensor, clusters: int, p: KMeansClusters, seed: int, stop: StopFlag
) -> list[tuple[float, NDArray[np.int64]]]:
    """Inertia and clusters (N,) of the rows of features (N, d), for each start, the best first."""
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
    p, test = task.protocol, task.splits.test
    found = extractor(test, f"{task.dataset.name} test features")
    label = np.asarray(test.labels)
    rows = []
    for trunk, features in zip(extractor.trunks, found):
        trunk.verify()
        starts = clusterings(features, len(set(test.labels)), p, task.seed, stop)
        by_start = [agreement(label, cluster) for _, cluster in starts]
        values = {}
        for metric, best in by_start[0].items():
            values[metric] = best, {"starts": [one[metric] for one in by_start]}
        rows += scoring.write_plain(
            task, trunk.checkpoint, values, {"cluster": starts[0][1]}
        )
    return rows


PROBE = Probe(
    measure=measure,
    metrics=lambda *_: list(METRICS),
    refuse=refuse,
    words=lambda p: f"k-means, the best of {p.restarts} starts",
    work=lambda p, name, splits, count: {"image": len(splits.test)},
    only_test=True,
)
