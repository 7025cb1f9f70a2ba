"""timm's printed counts of right images, and verdicts on measured ones."""

import pytest

from backbench.papers import timm_scores

MODEL = ("resnet50.a1_in1k", 288, "imagenet-v2-matched")
SAME = {"images": 10_000, "crop_pct": 1.0, "interpolation": "bicubic"}


def test_the_counts_are_the_printed_percents():
    scores = timm_scores.scores()
    assert len(scores) == 6 * 1556
    assert (
        len({model for model, _, _ in scores}) == 1266 + 1
    )  # and one that stands in A's csv alone
    assert len([1 for _, _, name in scores if name != "imagenet-val"]) == 7780
    for score in scores.values():
        assert 0 <= score.right <= score.printed.images
    # As results/*.csv print them
    for key, printed in (
        (MODEL, "69.690"),
        (("resnet18.tv_in1k", 224, "imagenet-v2-matched"), "57.350"),
        (("resnet50.tv_in1k", 224, "imagenet-real"), "82.969"),
        (("resnet50.tv_in1k", 224, "imagenet-sketch"), "24.064"),
        (("resnet50.tv_in1k", 224, "imagenet-r"), "36.157"),
    ):
        assert f"{scores[key].top1:.3f}" == printed
    assert (
        "resnet50.tv_in1k",
        224,
        "imagenet-a",
    ) not in scores  # timm's csv has another in its place


@pytest.mark.parametrize(
    ("changed", "off", "word"),
    [
        ({}, 0, "within"),
        ({}, 60, "within"),
        ({}, -61, "outside"),
        ({"crop_pct": 0.95}, 0, "unlike"),
        ({"interpolation": "bilinear"}, 0, "unlike"),
        ({"images": 9_999}, 0, "unlike"),
    ],
)
def test_a_count_is_judged_within_the_sets_tolerance(changed, off, word):
    score = timm_scores.scores()[MODEL]
    found, why = timm_scores.verdict(score, right=score.right + off, **{**SAME, **changed})
    assert found == word and bool(why) == (word == "unlike")
