"""How well clusters agree with classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import NDArray

METRICS = ("nmi", "ari", "cluster_acc")


def agreement(label: NDArray, cluster: NDArray) -> dict[str, float]:
    """Return METRICS of one clustering (N,) against the classes (N,), in percent."""
    from scipy.optimize import linear_sum_assignment
    from sklearn import metrics

    # Accuracy under the best matching of clusters to classes, one to one
    together = metrics.cluster.contingency_matrix(label, cluster)
    matched = together[linear_sum_assignment(together, maximize=True)].sum()
    return {
        "nmi": 100 * float(metrics.normalized_mutual_info_score(label, cluster)),
        "ari": 100 * float(metrics.adjusted_rand_score(label, cluster)),
        "cluster_acc": 100 * float(matched / len(label)),
    }
