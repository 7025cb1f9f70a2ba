"""What the page draws of single readings: layers, the errors of detectors, label curves."""

import dataclasses
from collections.abc import Mapping

from backbench.board import metrics
from backbench.board.board import Board, Cell, Column, Measurement
from backbench.board.page_records import PageErrors, PageLabelCurve, PageLayers
from backbench.records import label_curve, layers, paired_rows
from backbench.records.paired_rows import KeptRow
from backbench.stats.ap_errors import ERRORS
from backbench.tasks import TASKS

LAYERS = "layers"  # the task


def _cells(board: Board, column: Column) -> list[tuple[int, Cell]]:
    """Return the measured cells of a column that have a value, each with the index of its row."""
    row_index = board.row_index()
    found = []
    for row, cell in board.measured(column):
        if cell.value is not None and cell.parts:
            found.append((row_index[row.checkpoint], cell))
    return found


# ---- layers


def layers_of(board: Board) -> list[PageLayers]:
    """Return the grid of every checkpoint whose layers were read, in the order of the columns."""
    found = []
    for index, column in enumerate(board.columns):
        if column.task != LAYERS or column.metric not in layers.METRICS:
            continue
        usual = dataclasses.replace(column, metric=column.metric + layers.USUAL)
        of_usual = {}
        if usual in board.columns:
            of_usual = dict(_cells(board, usual))
        for row, cell in _cells(board, column):
            part = cell.parts[0]
            beside = _beside(part, of_usual.get(row))
            one = _layers(part, beside, row=row, column=index)
            if one is not None:
                found.append(one)
    return found


def _beside(part: Measurement, usual: Cell | None) -> Measurement | None:
    """Return the usual reading that was measured by the same run with the same seed."""
    if usual is None:
        return None
    for other in usual.parts:
        if other.run == part.run and other.result.seed == part.result.seed:
            return other
    return None


def _layers(
    best: Measurement, usual: Measurement | None, *, row: int, column: int
) -> PageLayers | None:
    """Return the grid of one measurement; None where it does not say the scores of its layers."""
    chosen: Mapping[str, object] = best.result.chosen or {}
    scores = chosen.get("scores")
    if not isinstance(scores, Mapping):
        return None
    grid = layers.grid(scores)
    if not grid.layers:
        return None
    by_pooling: dict[str, list[float | None]] = {}
    for pooling in grid.poolings:
        of_layers = [grid.scores.get((layer, pooling)) for layer in grid.layers]
        by_pooling[pooling] = [_short(score) for score in of_layers]
    score_of = dict(grid.alone)
    for (layer, pooling), score in grid.scores.items():
        score_of[f"{layer} {pooling}"] = score
    reading = str(chosen.get(layers.READING))
    usual_reading = str(chosen.get(layers.USUAL_READING))
    difference = None
    if usual is not None and reading != usual_reading:
        difference = paired_rows.difference(KeptRow(*best), KeptRow(*usual))
    low, high = (None, None) if difference is None else difference.ci95
    return PageLayers(
        row=row,
        column=column,
        layers=list(grid.layers),
        scores=by_pooling,
        chosen=reading,
        chosen_score=_short(score_of.get(reading)),
        usual=usual_reading,
        usual_score=_short(score_of.get(usual_reading)),
        value=_short(best.result.value),
        usual_value=None if usual is None else _short(usual.result.value),
        gain=None if difference is None else _short(difference.value),
        low=_short(low),
        high=_short(high),
    )


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# ---- what errors cost detectors


def errors_of(board: Board) -> list[PageErrors]:
    """Return the columns of the costs of each detector and shape (boxes, masks) on each list of
    boxes."""
    place = {column: index for index, column in enumerate(board.columns)}
    groups: dict[Column, dict[str, int]] = {}  # the AP50 that is explained -> costs
    for column, index in place.items():
        detector = TASKS[column.task].explains
        error = column.metric.rpartition("_")[2]
        if detector is None or error not in ERRORS or not _cells(board, column):
            continue
        explained = f"{metrics.family(column.metric)}_AP50"
        ap50 = dataclasses.replace(column, task=detector, metric=explained)
        groups.setdefault(ap50, {})[error] = index
    found = []
    for ap50, costs in groups.items():
        in_order = {error: costs[error] for error in ERRORS if error in costs}
        found.append(PageErrors(ap=place.get(ap50), costs=in_order))
    return found


# ---- label curves


def label_curves_of(board: Board) -> list[PageLabelCurve]:
    """Return the points of every checkpoint's curve: two at least make a line."""
    curves: dict[tuple[Column, int], dict[float, int]] = {}
    for index, column in enumerate(board.columns):
        metric, is_point, _ = column.metric.partition("_labels")
        if column.task != label_curve.TASK or not is_point:
            continue
        whole = dataclasses.replace(column, metric=metric)
        for row, cell in _cells(board, column):
            labels = cell.parts[0].result.provenance.get(label_curve.LABELS)
            if isinstance(labels, int | float) and labels > 0:
                curves.setdefault((whole, row), {})[float(labels)] = index
    found = []
    for (_, row), points in curves.items():
        if len(points) < 2:
            continue
        labels = sorted(points)
        one = PageLabelCurve(
            row=row, columns=[points[count] for count in labels], labels=labels
        )
        found.append(one)
    return found
