"""Calibration and selective prediction against independent scorers, and what intervals cover."""

import statistics

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from backbench.records import kept_scores
from backbench.stats import calibration
from backbench.stats.calibration import BINS
from backbench.transfer import head_scores


def random_case(seed):
    """Logits (N, C), labels, and a temperature; every third case has many equal confidences."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 60))
    classes = int(draw.integers(2, 14))
    # Not too far apart: scikit-learn's log_loss clips probabilities at 2e-16
    logits = draw.normal(0, draw.choice([0.1, 1, 2]), (n, classes))
    if seed % 3 == 0:
        logits = np.round(logits)
    return logits, draw.integers(0, classes, n), float(draw.uniform(0.6, 3))


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def record(logits, label, t, manifest="m"):
    """A file of scores in float64, written down independently of `head_scores.compact`."""
    # A stable sort puts the smaller one of equal classes first
    order = np.argsort(-logits, axis=1, kind="stable")[:, :10]
    z = logits - logits.max(1, keepdims=True)
    out = {
        "classes": order,
        "label": label,
        "manifest": manifest,
        "temperature": np.asarray(t),
        "logits": np.take_along_axis(z, order, 1),
        "label_logit": z[np.arange(len(z)), label],
    }
    for suffix, scaled in (("", z), ("_t", z / t)):
        out[f"logsumexp{suffix}"] = np.log(np.exp(scaled).sum(1))
        out[f"square{suffix}"] = (softmax(scaled) ** 2).sum(1)
    return out


def loop_ece(conf, right):
    total = 0.0
    edges = np.linspace(0, 1, BINS + 1).tolist()
    pairs = list(zip(conf.tolist(), right.tolist()))
    for b in range(BINS):
        lo, hi = edges[b : b + 2]
        inside = [(c, r) for c, r in pairs if lo < c <= hi or (b == 0 and c == 0)]
        # The bin's size times the gap of its means
        total += abs(sum(r for _, r in inside) - sum(c for c, _ in inside))
    return total / len(conf)


def loop_aece(conf, right):
    order = sorted(range(len(conf)), key=lambda i: (conf[i], i))
    size, more = divmod(len(order), BINS)
    total = 0.0
    begin = 0
    for b in range(BINS):
        # The first `more` bins hold one image more
        end = begin + size + (1 if b < more else 0)
        total += abs(sum(float(right[i]) - conf[i] for i in order[begin:end]))
        begin = end
    return total / len(conf)


def loop_aurc(conf, right):
    wrong_at = {}
    for own, is_right in zip(conf.tolist(), right.tolist()):
        wrong_at.setdefault(own, []).append(not is_right)
    errors = [sum(wrong_at[own]) / len(wrong_at[own]) for own in conf.tolist()]
    ordered = [error for _, error in sorted(zip(-conf, errors))]
    return np.mean([sum(ordered[:i]) / i for i in range(1, len(ordered) + 1)])


def loop_best(conf, right):
    """Return the area that the same errors would have if all came last."""
    wrong = int((~right).sum())
    best = [max(0, i - (len(right) - wrong)) / i for i in range(1, len(right) + 1)]
    return np.mean(best)


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_every_metric_is_an_independent_scorers(first, monkeypatch):
    monkeypatch.setattr(calibration, "RESAMPLES", 20)
    loops = {"ece": loop_ece, "aece": loop_aece, "aurc": loop_aurc}
    for seed in range(first, first + 30):
        logits, label, t = random_case(seed)
        x = record(logits, label, t)
        onehot = np.arange(logits.shape[1])
        right = x["classes"][:, 0] == label
        for suffix, p in (("", softmax(logits)), ("_t", softmax(logits / t))):
            conf = np.exp(-x[f"logsumexp{suffix}"])
            expected = {name: 100 * loop(conf, right) for name, loop in loops.items()}
            expected["eaurc"] = expected["aurc"] - 100 * loop_best(conf, right)
            expected["nll"] = -np.log(p[np.arange(len(p)), label]).mean()
            expected["brier"] = (
                100 * ((p - (label[:, None] == onehot)) ** 2).sum(1).mean()
            )
            if seed % 10 == 0:
                # scikit-learn checks its input for longer than all of the above takes
                nll = log_loss(label, p, labels=onehot)
                assert expected["nll"] == pytest.approx(nll, abs=1e-9)
                # It halves the other where it is asked to: ours is from 0 to 2
                brier = brier_score_loss(label, p, labels=onehot, scale_by_half=False)
                assert expected["brier"] == pytest.approx(100 * brier, abs=1e-9)
            assert expected.keys() == set(kept_scores.METRICS)
            for name, value in expected.items():
                found, ends = kept_scores.value(x, name + suffix)
                assert found == pytest.approx(value, abs=1e-9), (seed, name + suffix)
                assert ends is None or ends[0] <= found <= ends[1]
        # What is kept in float32 gives the same to 1e-6
        logits32 = torch.tensor(logits, dtype=torch.float64).split(7)
        kept = head_scores.compact(logits32, label.tolist(), t)
        for name, array in kept.items():
            np.testing.assert_allclose(
                array, x[name], atol=1e-6, rtol=1e-6, err_msg=name
            )


def test_ece_is_torchmetrics_where_no_confidence_is_on_an_edge():
    draw = np.random.default_rng(0)
    p = softmax(draw.normal(0, 2, (500, 6)))
    label = draw.integers(0, 6, 500)
    mine, truth = torch.tensor(p), torch.tensor(label)
    theirs = multiclass_calibration_error(mine, truth, num_classes=6, n_bins=BINS)
    ours = calibration.ece(p.max(1), p.argmax(1) == label)
    assert ours == pytest.approx(float(theirs), abs=1e-6)  # theirs is float32


def test_edges_belong_to_the_bin_below_and_the_most_confident_bin_counts():
    right = np.array([True, False])
    assert calibration.ece(np.array([0.2, 0.2]), right) == pytest.approx(0.3)
    # 3/15 is of bin (2/15, 3/15], 3/15 + tiny of the next one: two bins, two gaps
    apart = calibration.ece(np.array([0.2, np.nextafter(0.2, 1)]), right)
    assert apart == pytest.approx((0.8 + 0.2) / 2)
    # A confidence of 1 is not left out
    assert calibration.ece(np.ones(4), np.zeros(4, dtype=bool)) == 1
    assert calibration.ece(np.zeros(1), np.ones(1, dtype=bool)) == 1


def test_the_order_of_tied_images_does_not_matter():
    conf = np.array([0.9, 0.9, 0.9, 0.5])
    right = np.array([True, False, True, False])
    other = [1, 3, 2, 0]
    turned = calibration.aurc(conf[other], right[other])
    assert turned == calibration.aurc(conf, right)


def test_the_interval_of_a_mean_loss_is_the_normal_one():
    losses = [0.25, 1.5, 2.0, 4.25]
    half = 1.959964 * statistics.stdev(losses) / 2
    found = calibration.of_mean(np.array(losses))
    assert found == pytest.approx((2 - half, 2 + half))
    half = 1.959964 * (0.5**0.5 / 2**0.5)
    assert calibration.of_mean(np.array([1.0, 2.0])) == pytest.approx(
        (1.5 - half, 1.5 + half)
    )
    assert calibration.of_mean(np.array([3.0])) is None


def test_the_interval_of_aurc_is_that_of_images_drawn_again(monkeypatch):
    """Images are written out for each resample, which is then scored as any other list."""
    draw = np.random.default_rng(3)
    conf = draw.permutation(np.linspace(0.2, 0.9, 30))
    right = draw.random(30) < 0.7
    by_confidence = np.argsort(-conf)
    estimate = calibration.aurc(conf, right)
    widened = [0, 0]
    for resamples in (2, 40):
        monkeypatch.setattr(calibration, "RESAMPLES", resamples)
        for seed in range(8):
            drawn = np.random.default_rng(seed)
            areas = []
            for _ in range(resamples):
                images = by_confidence[drawn.integers(0, 30, 30)]
                ordered = images[np.argsort(-conf[images], kind="stable")]
                wrong = np.cumsum(~right[ordered])
                areas.append(np.mean(wrong / np.arange(1, 31)))
            low, high = np.quantile(areas, [0.025, 0.975])
            # Two resamples may both lie above the estimate, or both below
            widened[0] += estimate < low
            widened[1] += high < estimate
            wanted = (min(low, estimate), max(high, estimate))
            assert calibration.of_aurc(conf, right, seed) == pytest.approx(wanted)
    assert min(widened) > 0


def test_a_temperature_follows_the_scale_of_the_logits():
    draw = torch.Generator().manual_seed(0)
    label = torch.randint(0, 5, (400,), generator=draw)
    z = torch.randn(400, 5, generator=draw) + 2 * torch.nn.functional.one_hot(label, 5)
    fitted = head_scores.fit_temperature(z.split(64), label.tolist())
    scaled = head_scores.fit_temperature((3 * z).split(64), label.tolist())
    assert scaled == pytest.approx(3 * fitted, rel=1e-5)
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [log_t], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-15
    )

    def closure():
        solver.zero_grad()
        loss = torch.nn.functional.cross_entropy(z.double() / log_t.exp(), label)
        loss.backward()
        return loss

    solver.step(closure)
    assert fitted == pytest.approx(float(log_t.detach().exp()), rel=1e-6)
    assert head_scores.fit_temperature([torch.full((2, 3), torch.nan)], [0, 1]) is None
    assert head_scores.compact([torch.full((2, 3), torch.nan)], [0, 1], None) is None


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["nll", "brier", "aurc"])
def test_intervals_cover(metric):
    """600 samples of 1,000 images of a population whose value is known from 400,000."""

    def sample(n, seed):
        draw = np.random.default_rng(seed)
        logits = draw.normal(0, 1.5, (n, 5))
        p = softmax(0.7 * logits)  # overconfident: the truth is flatter
        label = (p.cumsum(1) > draw.random((n, 1))).argmax(1)
        return record(logits, label, 1.0, f"{seed}")

    truth, _ = kept_scores.value(sample(400_000, 10**6), metric)
    held = 0
    for seed in range(600):
        _, (low, high) = kept_scores.value(sample(1000, seed), metric)
        held += low <= truth <= high
    assert 0.93 <= held / 600 <= 0.97, held
