"""Charts: their colours, their places, and files whose bytes are the same each time."""

import numpy as np
from matplotlib.text import Text
from PIL import Image

from backbench import charts


def test_colours_are_of_the_palette_or_all_different():
    assert charts.colors(8) == list(charts.PALETTE)
    assert charts.colors(3) == list(charts.PALETTE[:3])
    nine = charts.colors(9)
    assert len(set(nine)) == 9 and not set(nine) & set(charts.PALETTE)
    # Ends of the colour map are half a step from its ends
    assert nine[0] != charts.colors(10)[0] and nine[4] == charts.colors(11)[5]


def test_a_figures_axes_stand_in_rows():
    figure, axes = charts.grid(5, columns=2, width=2.0, height=1.5)
    assert len(axes) == 5
    assert tuple(figure.get_size_inches()) == (4.0, 3 * 1.5 + 0.4)
    places = [ax.get_subplotspec() for ax in axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
    ]
    figure, (ax,) = charts.grid(1, columns=4)
    assert tuple(figure.get_size_inches()) == (4.2, 3.4)
    assert not ax.spines["top"].get_visible() and ax.spines["left"].get_visible()


def test_a_chart_is_saved_twice_with_the_same_bytes(tmp_path):
    written = []
    for _ in range(2):
        figure, (ax,) = charts.grid(1, width=8.0, height=1.0)
        ax.plot([1, 2], [1, 3])
        ax.set_title("a $5 and $6 trunk")
        names = [(f"line {n}", color) for n, color in enumerate(charts.colors(3))]
        svg = charts.save(figure, tmp_path / "deep" / "figure", names)
        png = tmp_path / "deep" / "figure.png"
        assert svg == tmp_path / "deep" / "figure.svg"
        written.append((svg.read_bytes(), png.read_bytes()))
    assert written[0] == written[1]
    assert not any(word in written[0][0] for word in (b"dc:date", b"Matplotlib"))
    with Image.open(png) as image:
        assert image.size == (8 * 130, round(1.4 * 130))
        assert np.asarray(image.convert("L")).min() < 128
    # A dollar is a dollar, and a legend has as many columns as fit
    titles = [text for text in figure.findobj(Text) if "$5" in text.get_text()]
    assert titles and not any(text.get_parse_math() for text in titles)
    (legend,) = figure.legends
    assert legend._ncols == 2
    assert [text.get_text() for text in legend.get_texts()] == [n for n, _ in names]
