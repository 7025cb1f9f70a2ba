"""`calibrate` makes rows of every file of scores that fits its number, and says which do not."""

import dataclasses

import numpy as np
import pytest
from scipy.special import log_softmax
from support.records import a_result

from backbench.cli import calibrate
from backbench.errors import BadInput
from backbench.records import kept_scores, store
from backbench.requests.runs import CalibrateRequest

# Of three images: the scores of two classes, and the right one
LOGITS = np.array([[0.0, -1.0], [-1.0, 0.0], [0.0, -1.0]])
LABEL = np.array([0, 1, 1])


def scores(temperature=None):
    at = {"": LOGITS}
    if temperature is not None:
        at["_t"] = LOGITS / temperature
    arrays = {
        "logits": np.sort(LOGITS)[:, ::-1],
        "classes": np.argsort(-LOGITS).astype(np.uint8),
        "label": LABEL.astype(np.uint8),
        "label_logit": LOGITS[np.arange(3), LABEL],
    }
    for suffix, logits in at.items():
        logs = log_softmax(logits, axis=1)
        arrays[f"logsumexp{suffix}"] = logits.max(1) - logs.max(1)
        arrays[f"square{suffix}"] = (np.exp(logs) ** 2).sum(1)
    if temperature is not None:
        arrays["temperature"] = np.array(temperature)
    return arrays


def losses(temperature):
    """The negative log-likelihood of each image."""
    return -log_softmax(LOGITS / temperature, axis=1)[np.arange(3), LABEL]


def measured(run, stem, *, temperature=None, head="h", file=True, **changes):
    """A number of a head whose scores are kept."""
    of = {"checkpoint": "a" * 64, "head": head, "protocol": "mine-v1"}
    name = f"scores/{stem}.npz"
    if file:
        name = kept_scores.keep(run, stem, scores(temperature), manifest="m", **of)
    about = {"dataset": "mine", "protocol": "mine-v1", "ci95": None}
    told = {"scores": name, "head_sha256": "h", "pixels": {}}
    return a_result(**about | changes, provenance=told)


def test_each_file_of_scores_gives_its_rows_once(tmp_path, capsys, caplog):
    run = tmp_path / "runs" / "a"
    first = measured(run, "x", temperature=2.0, seed=1)
    first = dataclasses.replace(first, chosen={"converged": True, "l2": 0.1})
    second = measured(run, "y", seed=4, name="second")
    second = dataclasses.replace(second, chosen={"converged": False, "gradient": 0.5})
    # A row of the scores that stands before the number that they are of
    value, ci95 = kept_scores.value(kept_scores.load(run / "scores" / "y.npz"), "nll")
    about = {"task": "calibration", "metric": "nll", "value": value, "ci95": ci95}
    rows = [
        dataclasses.replace(second, chosen=None, **about),
        first,
        # Another metric of the same scores
        dataclasses.replace(first, metric="mean_per_class", chosen=None),
        measured(run, "gone", file=False, seed=2),
        measured(run, "other", head="g", seed=3),
        second,
        a_result(task="knn", dataset="mine", ci95=None, provenance={}),
    ]
    store.append(run, rows)
    request = CalibrateRequest(runs=(tmp_path / "runs",))
    found = calibrate.run(request).document
    # 1. One row for each metric, at the temperature where one was fitted
    at_t = [f"{name}_t" for name in kept_scores.METRICS]
    of_first = [*kept_scores.METRICS, *at_t]
    assert [(row.seed, row.metric) for row in found] == [
        *((1, metric) for metric in of_first),
        *((4, metric) for metric in kept_scores.METRICS),
    ]
    values = {(row.seed, row.metric): row.value for row in found}
    assert values[1, "nll"] == values[4, "nll"] == pytest.approx(losses(1.0).mean())
    assert values[1, "nll_t"] == pytest.approx(losses(2.0).mean())
    assert {row.task for row in found} == {"calibration"}
    # 2. What is true of the number alone is not said of them
    told = {"scores": "scores/x.npz", "head_sha256": "h", "pixels": {}}
    assert found[0].provenance == {**told, "fitted_temperature": 2.0}
    assert found[0].chosen == {"converged": True}
    assert "fitted_temperature" not in found[-1].provenance
    assert found[-1].chosen == second.chosen
    # 3. Who reads it is told the numbers, and which scores are of something else
    (nll,) = (row for row in found if (row.seed, row.metric) == (4, "nll"))
    low, high = nll.ci95
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found)
    line = f"second           {nll.column:<60}     0.647 [{low:.3f}, {high:.3f}]"
    assert line in lines
    ece = next(row for row in found if row.metric == "ece")
    assert lines[0] == f"x                {ece.column:<60} {ece.value:9.3f}"
    assert caplog.messages == [
        f"{run / 'scores' / 'other.npz'}: scores of another head; measure them again"
    ]
    # 4. The rows are kept, once
    kept = (run / "results.jsonl").read_text()
    assert kept.count('"calibration"') == len(found)
    assert calibrate.run(request).document == found
    assert (run / "results.jsonl").read_text() == kept


def test_predictions_are_of_the_number_and_not_of_its_calibration(tmp_path):
    row = measured(tmp_path, "x")
    more = {"predictions": "gone.npz", "confusion": "gone.npz", "val": "official"}
    row = dataclasses.replace(row, provenance={**row.provenance, **more})
    store.append(tmp_path, [row])
    first, *_ = calibrate.of_run(tmp_path / "results.jsonl")
    assert first.provenance.keys() == {"scores", "head_sha256", "pixels", "val"}


def test_runs_without_scores_are_all_named(tmp_path):
    folders = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        store.append(folder, [a_result(provenance={})])
    with pytest.raises(BadInput) as refused:
        calibrate.run(CalibrateRequest(runs=folders))
    assert str(refused.value) == (
        f"{folders[0]}, {folders[1]}: no run with scores below; `backbench linear` keeps"
        " them, by SGD and logreg"
    )
