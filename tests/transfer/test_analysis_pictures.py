"""The figures of `analyze`: training curves from metrics.jsonl, and what a panel says of a collapse."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from support import fake_verbs

from backbench import charts
from backbench.transfer.analysis import pictures
from backbench.transfer.analysis import statistics as stats
from backbench.weights import header


@pytest.fixture
def pretraining(tmp_path):
    """pretraining(name, rows): a checkpoint beside the metrics of its pretraining."""

    def make(name, rows):
        file = tmp_path / name / "backbone.safetensors"
        fake_verbs.write_checkpoint(file, name)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (file.parent / "metrics.jsonl").write_text(text)
        return file

    return make


def test_a_training_curve_is_the_means_of_neighbouring_steps(pretraining):
    rows = [{"loss": 99.0}]  # of no step
    for step in range(1, 601):
        row = {"step": step, "epoch": step // 60, "images_per_s": 9.0}
        row |= {"loss": step + 0.5, "what": "words are no term"}
        if step % 2:
            row["variance"] = 2.0
        if step > 2:
            row["rate"] = 0.25 if step <= 4 else 1e308
        rows.append(row)
    file = pretraining("a", rows)
    digest = header.digest(file)
    copy = file.with_name("copy.safetensors")
    copy.write_bytes(file.read_bytes())
    (curve,) = pictures.training_curves([file, copy], {digest: "A"})
    assert (curve["checkpoint"], curve["name"]) == (digest, "A")
    assert curve["step"] == list(range(2, 601, 2))
    assert set(curve["terms"]) == {"loss", "variance", "rate"}
    assert curve["terms"]["loss"] == [step + 1.0 for step in range(1, 601, 2)]
    assert curve["terms"]["variance"] == [2.0] * 300
    # None where no row has it, and where the mean is not finite
    assert curve["terms"]["rate"] == [None, 0.25] + [None] * 298


def test_what_has_no_curve_is_left_out(pretraining):
    one = pretraining("one", [{"step": 1, "loss": 2.0}])
    other = pretraining("other", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    names = {header.digest(one): "one"}
    assert pictures.training_curves([one, other], names) == []
    names = {header.digest(other): "other"}
    (curve,) = pictures.training_curves([one, other], names)
    assert (curve["step"], curve["terms"]) == ([1, 2], {"loss": [2.0, 1.0]})


def test_training_curves_have_the_colours_of_their_checkpoints(tmp_path, monkeypatch):
    figures = {}

    def save(figure, stem, legend=()):
        figures[stem.name] = figure.axes, legend
        return stem.with_suffix(".svg")

    monkeypatch.setattr(charts, "save", save)
    monkeypatch.setattr(pictures, "PANELS", {})
    monkeypatch.setattr(pictures, "_figure", lambda *_: Path("x.svg"))
    spaces = [{"checkpoint": name, "space": "trunk"} for name in "abc"]
    terms = {"zebra": [1.0, 2.0], "variance": [3.0, None], "loss": [5.0, 6.0]}
    training = [
        {"checkpoint": "c", "name": "C", "step": [10, 20], "terms": terms},
        {"checkpoint": "a", "name": "A", "step": [7], "terms": {"loss": [4.0]}},
    ]
    summary = {"spaces": spaces, "dataset": "digits", "images": 3, "augmentations": 4}
    files = pictures.draw(summary | {"training": training}, tmp_path)
    assert files[-1] == tmp_path / "training.svg"
    axes, legend = figures["training"]
    shown = [ax for ax in axes if ax.get_visible() and ax.get_title()]
    # What the papers draw comes first
    assert [ax.get_title() for ax in shown] == ["loss", "variance", "zebra"]
    colors = charts.colors(3)
    assert legend == [("C", colors[2]), ("A", colors[0])]
    lines = [(line.get_color(), list(line.get_xdata())) for line in shown[0].lines]
    assert lines == [(colors[2], [10, 20]), (colors[0], [7])]
    (gap,) = shown[1].lines
    assert np.isnan(gap.get_ydata()).tolist() == [False, True]
    # Without any curve there is no such figure
    figures.clear()
    pictures.draw(summary | {"training": []}, tmp_path)
    assert "training" not in figures


def test_the_rank_says_which_features_have_collapsed():
    _, (ax,) = charts.grid(1, columns=1)
    numbers = [
        {"rankme": 9.0, "collapse": 0},
        {"rankme": 2.0, "collapse": 1},
        {"rankme": None, "collapse": 2},
    ]
    spaces = [{"numbers": each} for each in numbers]
    pictures._rank(ax, spaces, charts.colors(3))
    said = {round(text.get_position()[0]): text.get_text() for text in ax.texts}
    assert (said[1], said[2]) == ("few live\ndirections", "collapsed")
    assert [bar.get_height() for bar in ax.patches] == [9.0, 2.0]


def test_bars_of_the_probes_stand_in_two_groups_beside_one_another():
    _, (ax,) = charts.grid(1, columns=1)
    numbers = [{"knn": 30.0, "fewshot": 20.0}, {"knn": 40.0}]
    spaces = [{"numbers": each} for each in numbers]
    pictures._probes(ax, spaces, charts.colors(2))
    found = []
    for bar in ax.patches:
        found.append((bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()))
    (a, b, of_knn), (c, d, of_few), (e, f, of_second) = found
    assert (of_knn, of_few, of_second) == (30.0, 20.0, 40.0)
    assert math.isclose(b, e, abs_tol=1e-9)  # beside one another
    assert math.isclose(a + f, 0.0, abs_tol=1e-9)  # about 0
    assert math.isclose(c - a, 1.0) and math.isclose(d - b, 1.0)
    colors = [bar.get_facecolor()[:3] for bar in ax.patches]
    assert colors[0] == colors[1] != colors[2]


def test_alignment_needs_both_of_its_numbers():
    _, (ax,) = charts.grid(1, columns=1)
    numbers = [
        {"alignment": 0.5, "uniformity": -2.0},
        {"alignment": 0.7, "uniformity": None},
        {"uniformity": -1.0},
    ]
    spaces = [{"numbers": each} for each in numbers]
    pictures._alignment(ax, spaces, charts.colors(3))
    points = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
    assert points == [([0.5], [-2.0])]
    assert ax.get_xlabel().startswith("alignment")


def test_a_histogram_has_an_area_of_one_and_few_bars():
    _, (ax,) = charts.grid(1, columns=1)
    pictures._histogram(ax, {"counts": [0, 0], "low": 0.0, "width": 1.0}, "#0072B2")
    assert not ax.patches
    some = {"counts": [1] * 100 + [3] * 100, "low": 5.0, "width": 0.01}
    pictures._histogram(ax, some, "#0072B2")
    pictures._histogram(ax, some, "#D55E00", line="dashed")
    solid, _, dashed = ax.patches
    assert [patch.get_fill() for patch in ax.patches] == [False, True, False]
    assert [solid.get_linestyle(), dashed.get_linestyle()] == ["solid", "dashed"]
    heights, edges, _ = solid.get_data()
    assert len(heights) == 40
    assert np.allclose([edges[0], edges[-1]], [5.0, 7.0])
    assert math.isclose((heights * np.diff(edges)).sum(), 1.0)
    assert math.isclose(heights[-1], 3 * heights[0])


@pytest.mark.parametrize(
    ("numbers", "at"),
    [({"x": 5.5}, [5.5]), ({"x": None, "x_e4": 60000.0}, [6.0]), ({}, [])],
)
def test_a_panel_has_a_line_at_the_mean(numbers, at):
    """A small statistic is listed in units of 1e-4."""
    _, (ax,) = charts.grid(1, columns=1)
    histogram = {"counts": [1, 2], "low": 5.0, "width": 0.5}
    space = {"histograms": {"x": histogram}, "numbers": numbers}
    pictures._per_image("x", "Title", "unit")(ax, [space], charts.colors(1))
    lines = [line.get_xdata()[0] for line in ax.lines]
    assert lines == pytest.approx(at)
    assert (ax.get_title(), ax.get_xlabel()) == ("Title", "unit")
    assert ax.get_ylim()[0] == 0


def test_what_is_undefined_or_zero_is_no_point_of_a_logarithmic_axis():
    _, (ax, other) = charts.grid(2, columns=2)
    curve = {"dims": [1, 2, 4, 8], "contrast": [0.0, 3.0, None, 2.0]}
    nothing = {"dims": [1], "contrast": [None]}
    space = {"min_max": curve, "min_max_gaussian": nothing}
    pictures._min_max(ax, [space], charts.colors(1))
    solid, dotted = ax.lines
    assert (list(solid.get_xdata()), list(solid.get_ydata())) == ([2, 8], [3.0, 2.0])
    assert list(dotted.get_xdata()) == []
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    spaces = [{"spectrum": [0.75, 0.25, 0.0, None]}, {"spectrum": [1.0]}]
    pictures._spectrum(other, spaces, charts.colors(2))
    first, _ = other.lines
    assert list(first.get_xdata()) == [1, 2, 3, 4]
    assert np.isnan(first.get_ydata()).tolist() == [False, False, True, True]
    assert (other.get_xscale(), other.get_yscale()) == ("log", "log")
    assert 0 < other.get_ylim()[0] < 0.25


def a_space(name, space, dim, scale):
    """A space whose histograms lie between 0 and `scale`."""
    histogram = {"counts": [1, 2, 1], "low": 0.0, "width": scale / 3}
    curve = {"dims": [2, 4], "contrast": [2.0 * scale, scale]}
    return {
        "name": name,
        "checkpoint": name,
        "space": space,
        "dim": dim,
        "numbers": {"nuclear_norm": scale / 2},
        "histograms": dict.fromkeys(stats.PER_IMAGE, histogram),
        "within": histogram,
        "between": {**histogram, "low": scale},
        "spectrum": [0.75, 0.25],
        "min_max": curve,
        "min_max_gaussian": {**curve, "contrast": [3.0 * scale, 3.0]},
    }


def test_every_figure_has_its_panels_its_title_and_the_names_of_its_spaces(
    tmp_path, monkeypatch
):
    figures = {}

    def save(figure, stem, legend=()):
        assert stem.parent == tmp_path
        figures[stem.name] = figure, legend
        return stem.with_suffix(".svg")

    monkeypatch.setattr(charts, "save", save)
    spaces = [
        a_space("one", "trunk", 512, 1.0),
        a_space("one", "projector", 16, 2.0),
        a_space("two", "trunk", 8, 3.0),
    ]
    summary = {"spaces": spaces, "dataset": "digits", "images": 30, "augmentations": 4}
    files = pictures.draw(summary, tmp_path)
    names = ["kept-overview", "trunk-overview"]
    names += [f"kept-{panel}" for panel in pictures.PANELS]
    assert files == [tmp_path / f"{name}.svg" for name in names]
    # 1. The overviews have all panels, and say of what they are
    blue, orange = charts.colors(2)
    for name, words, legend in (
        (
            "kept-overview",
            "(projector, where the loss works)",
            [("one (projector, 16-d)", blue)],
        ),
        (
            "trunk-overview",
            "(trunk)",
            [("one (trunk, 512-d)", blue), ("two (trunk, 8-d)", orange)],
        ),
    ):
        figure, shown = figures[name]
        title = f"Features of digits, 30 images, 4 views each {words}"
        assert figure.get_suptitle() == title
        assert shown == legend
        panels = [
            (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes
        ]
        assert panels == PANELS
        # Each in a third of the width
        assert len({round(ax.get_position().x0, 3) for ax in figure.axes}) == 3
    # 2. A panel alone has no title above it
    alone, _ = figures["kept-rank"]
    assert (len(alone.axes), alone.get_suptitle()) == (1, "")
    # 3. Without a projector, the trunk's panels stand alone
    figures.clear()
    pictures.draw({**summary, "spaces": spaces[2:]}, tmp_path)
    alone = {f"trunk-{panel}" for panel in pictures.PANELS}
    assert set(figures) == {"trunk-overview"} | alone


DENSITY = "density over images"
PANELS = [
    ("Nuclear norm of an image's views", "nuclear norm", DENSITY),
    ("Similarity of an image's views", "mean cosine of all pairs", DENSITY),
    (
        "Variance over an image's views",
        "mean diagonal of the covariance",
        DENSITY,
    ),
    (
        "Distances within (solid), between classes",
        "distance of unit features",
        "density over pairs",
    ),
    (
        "Contrast of distances, CLLR Theorem 1",
        "dimensions kept (dotted: Gaussian)",
        "(max - min) / min",
    ),
    ("Spectrum of the covariance", "direction", "share of the variance"),
    (
        "Alignment and uniformity",
        "alignment (lower: closer views)",
        "uniformity (lower: wider spread)",
    ),
    ("RankMe", "", "effective dimensions"),
    ("Probes on the sample", "", "top-1, percent"),
]


def test_distances_within_classes_are_solid_and_those_between_dashed():
    _, (ax,) = charts.grid(1, columns=1)
    spaces = [a_space("one", "trunk", 8, 1.0), a_space("two", "trunk", 8, 2.0)]
    pictures._distances(ax, spaces, charts.colors(2))
    outlines = [patch for patch in ax.patches if not patch.get_fill()]
    drawn = []
    for patch in outlines:
        _, edges, _ = patch.get_data()
        drawn.append((patch.get_linestyle(), float(edges[0]), float(edges[-1])))
    assert drawn == [
        ("solid", 0.0, 1.0),
        ("dashed", 1.0, pytest.approx(2.0)),
        ("solid", 0.0, pytest.approx(2.0)),
        ("dashed", 2.0, pytest.approx(4.0)),
    ]
    first, second = charts.colors(2)
    colors = [to_hex(patch.get_edgecolor()).upper() for patch in outlines]
    assert colors == [first, first, second, second]
    assert ax.get_ylim()[0] == 0


def test_each_space_has_its_lines_in_every_panel():
    _, axes = charts.grid(3, columns=3)
    spaces = [a_space("one", "trunk", 8, 1.0), a_space("two", "trunk", 8, 2.0)]
    colors = charts.colors(2)
    pictures._min_max(axes[0], spaces, colors)
    lines = [(line.get_color(), list(line.get_ydata())) for line in axes[0].lines]
    assert lines == [
        (colors[0], [2.0, 1.0]),
        (colors[0], [3.0, 3.0]),
        (colors[1], [4.0, 2.0]),
        (colors[1], [6.0, 3.0]),
    ]
    assert [line.get_linestyle() for line in axes[0].lines] == ["-", ":", "-", ":"]
    pictures._spectrum(axes[1], spaces, colors)
    assert [line.get_color() for line in axes[1].lines] == colors
    assert axes[1].get_ylim()[0] == pytest.approx(0.125)
    pictures._per_image("nuclear_norm", "", "")(axes[2], spaces, colors)
    assert [line.get_xdata()[0] for line in axes[2].lines] == [0.5, 1.0]
    assert [line.get_color() for line in axes[2].lines] == colors


def test_bars_have_their_numbers_above_them_and_their_names_below():
    _, (rank, probes) = charts.grid(2, columns=2)
    spaces = [
        {"numbers": {"rankme": 9.04, "knn": 61.7}},
        {"numbers": {"rankme": 12.345, "fewshot": 20.2}},
    ]
    colors = charts.colors(2)
    pictures._rank(rank, spaces, colors)
    assert [text.get_text() for text in rank.texts] == ["9.04", "12.3"]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in rank.patches] == [0, 1]
    assert len(rank.get_xticks()) == 0
    pictures._probes(probes, spaces, colors)
    assert [text.get_text() for text in probes.texts] == ["62", "20"]
    assert [label.get_text() for label in probes.get_xticklabels()] == [
        "kNN",
        "few labels",
    ]
    # Both have room above for these
    for ax, highest in ((rank, 12.345), (probes, 61.7)):
        assert ax.get_ylim()[1] == pytest.approx(1.15 * highest)


def test_a_flat_spectrum_has_a_plain_axis_and_a_steep_one_ends_at_a_trillionth():
    _, (flat, steep) = charts.grid(2, columns=2)
    pictures._spectrum(flat, [{"spectrum": [1.0, 0.0]}], charts.colors(1))
    assert (flat.get_xscale(), flat.get_yscale()) == ("log", "linear")
    pictures._spectrum(steep, [{"spectrum": [1.0, 1e-15]}], charts.colors(1))
    assert steep.get_ylim()[0] == pytest.approx(1e-12)


def test_a_training_of_many_checkpoints_keeps_each_ones_curve(pretraining):
    first = pretraining("a", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    short = pretraining("b", [{"step": 1, "loss": 3.0}])
    last = pretraining("c", [{"step": 5, "loss": 4.0}, {"step": 6, "loss": 5.0}])
    lost = first.with_name("lost.safetensors")
    names = {header.digest(file): file.parent.name for file in (first, short, last)}
    found = pictures.training_curves([lost, first, short, last], names)
    assert [(curve["name"], curve["step"]) for curve in found] == [
        ("a", [1, 2]),
        ("c", [5, 6]),
    ]
