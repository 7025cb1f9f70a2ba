"""Predictions -> numbers in percent; their errors are in backbench/stats/confidence.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def top1(prediction: NDArray[np.integer], label: NDArray[np.integer]) -> float:
    """Share of right predictions (N,), in percent."""
    return 100.0 * float((prediction == label).mean())


def per_class(
    prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(right, images) per class, each (classes,)."""
    import numpy as np

    total = np.bincount(label, minlength=classes)
    right = np.bincount(label[prediction == label], minlength=classes)
    return right.astype(np.int64), total.astype(np.int64)


def mean_per_class(
    prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> float:
    """Mean over the classes that have test images of their accuracy, in percent."""
    right, total = per_class(prediction, label, classes)
    there = total > 0
    return 100.0 * float((right[there] / total[there]).mean())


def score(
    metric: str, prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> float:
    """`top1` or `mean_per_class`."""
    if metric == "top1":
        return top1(prediction, label)
    return mean_per_class(prediction, label, classes)


def confusion(
    prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> NDArray[np.int64]:
    """(classes, classes) counts, true class by predicted class.
    Predictions outside the list (none) are left out."""
    import numpy as np

    inside = (prediction >= 0) & (prediction < classes)
    # The pair (true, predicted) as one number, so that one count over images fills the matrix.
    flat = np.bincount(label[inside] * classes + prediction[inside], minlength=classes * classes)
    return flat.reshape(classes, classes).astype(np.int64)


def confusion_picture(
    matrix: NDArray[np.int64], names: tuple[str, ...], title: str, path: Path
) -> None:
    """A picture of row-normalised confusion; class names are written where there are at most 60."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from backbench.runs import atomic

    shares = 100 * matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = min(12.0, 4.0 + 0.18 * len(matrix)) if len(matrix) <= 60 else 8.0
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(shares, cmap="viridis", vmin=0, vmax=100, interpolation="nearest")
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    if len(matrix) <= 60:
        ticks = range(len(matrix))
        axes.set_xticks(ticks, [n[:18] for n in names], rotation=90, fontsize=7)
        axes.set_yticks(ticks, [n[:18] for n in names], fontsize=7)
    if len(matrix) <= 20:
        for row, column in zip(*matrix.nonzero()):
            # viridis is bright where shares are high
            color = "black" if shares[row, column] > 60 else "white"
            count = str(matrix[row, column])
            axes.text(column, row, count, ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(shown, ax=axes, label="% of the true class", shrink=0.8)
    with atomic.atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_figure(
            temporary, format="png", dpi=110, metadata={"Software": None}
        )
