"""How results print: as lines on a terminal, and as a table in a notebook."""

from support.records import a_result

from backbench.evaluation.api import Results


def results():
    about = {"checkpoint": "a" * 64, "name": "x<y", "task": "knn", "dataset": "cifar10"}
    return Results(
        [
            a_result(**about, metric="top1", value=81.236, ci95=(80.1, 82.349)),
            a_result(**about, metric="top5", value=None),
        ]
    )


def test_results_print_a_line_each():
    first, second = repr(results()).splitlines()
    assert first.split()[0] == "x<y"
    assert results()[0].column in first
    assert first.endswith("81.24  [80.10, 82.35]")
    assert second.endswith("undefined")
    assert repr(Results()) == "no results"


def test_a_notebook_shows_a_table():
    shown = results()._repr_html_()
    assert shown.startswith("<table>") and shown.endswith("</table>")
    assert "x&lt;y" in shown and "x<y" not in shown
    assert "81.2 ± 1.1" in shown
    assert shown.count("<tr>") == 1 + len(results().board.columns)
