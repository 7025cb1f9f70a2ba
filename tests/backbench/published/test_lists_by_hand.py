"""A reproduction list by hand: what its files may say, what it costs, and which file is the printed one."""

import re
from pathlib import Path

import pytest

from backbench.published import public_files, reproduction_lists, timm_scores
from backbench.published.public_files import FoundFile
from backbench.published.reproduction_lists import (
    ListPart,
    PublicFile,
    ReproductionList,
)

ABOUT = {"page": "https://x.org", "file": "a.pth", "url": "https://x.org/a.pth"}


def public(**changes):
    whole = {**ABOUT, **changes}
    return PublicFile(**{key: each for key, each in whole.items() if each is not None})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"file": "x/a.pth"}, "file 'x/a.pth' must be a file's name, without a folder"),
        (
            {"sha256": "1234567"},
            "sha256 '1234567' must be eight or more of 0-9 and a-f",
        ),
        ({"md5": "1234567G"}, "md5 '1234567G' must be eight or more of 0-9 and a-f"),
        ({"md5": "12345678"}, "md5: say by `digest_page` where it is printed"),
        (
            {"url": "ftp://x.org/a"},
            "must be https://HOST/PATH, in ASCII without spaces",
        ),
        ({"url": "https://x.org/a b"}, "must be https://HOST/PATH"),
        ({"url": None}, "give its `url`, or say by `by_hand` how one comes by it"),
        ({"timm": "a/b"}, "timm 'a/b' must be NAME.TAG, as in timm.list_pretrained()"),
        ({"testbed": "resnet5"}, "testbed 'resnet5': did you mean 'resnet50'?"),
    ],
)
def test_a_file_that_says_too_little_is_refused(changes, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        public(**changes)


def test_a_file_is_the_printed_one_by_the_digits_that_are_printed():
    both = public(sha256="1234567890", md5="abcdef01", digest_page="a page")
    assert both.printed == {"sha256": "1234567890", "md5": "abcdef01"}
    sha256, md5 = "1234567890" + "0" * 54, "abcdef01" + "0" * 24
    assert public_files.unlike(both, sha256, md5) is None
    assert public_files.unlike(both, "12345678ff" + sha256[10:], md5) == (
        "its sha256 begins 12345678ff, printed is 1234567890 (a page)"
    )
    assert public_files.unlike(both, sha256, "0" * 32) == (
        "its md5 begins 00000000, printed is abcdef01 (a page)"
    )
    assert public_files.unlike(public(), "", "") is None
    found = FoundFile(Path("a"), both, 9, sha256, md5)
    assert found.checked_by == "sha256 1234567890"
    of_md5 = public(md5="abcdef01", digest_page="a page", url=None, by_hand="ask")
    assert FoundFile(Path("a"), of_md5, 9, sha256, md5).checked_by == "md5 abcdef01"
    assert FoundFile(Path("a"), public(), 9, "", "").checked_by == "no printed digest"


def test_a_list_costs_its_parts_for_the_checkpoints_that_they_measure():
    listed = ReproductionList(
        name="mine",
        title="t",
        estimate="none",
        checkpoints={"a": ABOUT, "b": ABOUT, "c": ABOUT},
        parts=(
            ListPart(title="all", evaluate=(), gpu_hours=0.5),
            ListPart(title="some", evaluate=(), gpu_hours=2.0, only=("a", "c")),
        ),
    )
    whole, some = listed.parts
    assert listed.of_part(whole, ["c", "b"]) == ["c", "b"]
    assert listed.of_part(some, ["c", "b"]) == ["c"]
    assert listed.gpu_hours(["a", "b", "c"]) == 3 * 0.5 + 2 * 2.0
    assert listed.gpu_hours(["b"]) == 0.5
    assert listed.files["b"] == public()
    for changes, says in (
        ({"checkpoints": {}}, "checkpoints: none; name one at least"),
        (
            {"checkpoints": {"a b": ABOUT}},
            "checkpoint 'a b': letters, digits and . _ + -",
        ),
        (
            {"parts": (ListPart(title="x", evaluate=(), gpu_hours=1, only=("d",)),)},
            "only 'd': allowed: a, b, c",
        ),
    ):
        about = {"checkpoints": listed.checkpoints, **changes}
        with pytest.raises(ValueError, match=re.escape(says)):
            ReproductionList(name="x", title="t", estimate="e", **about)


def test_a_part_is_a_grid_of_its_checkpoints(tmp_path):
    listed = ReproductionList(
        name="mine",
        title="t",
        estimate="none",
        checkpoints={"a": ABOUT},
        parts=(
            ListPart(title="x", evaluate=({"verb": "ood"},), gpu_hours=1),
            ListPart(
                title="y", evaluate=({"verb": "linear"}, {"verb": "x"}), gpu_hours=1
            ),
        ),
    )
    grid = reproduction_lists.part_grid(listed, 1, tmp_path / "none", [Path("a.pth")])
    assert grid == {
        "name": "mine-1",
        "evaluate": [{"verb": "linear"}, {"verb": "x"}],
        "checkpoints": [str(Path("a.pth").resolve())],
    }
    assert reproduction_lists.part_grid(listed, 0, tmp_path) == {
        "name": "mine-0",
        "evaluate": [{"verb": "ood"}],
        "checkpoints": [],
        "lists": str(tmp_path.resolve()),
    }


def test_timms_models_are_asked_for_by_name_and_cost_their_images():
    twice = ["resnet50.a1_in1k", "resnet18.tv_in1k", "resnet50.a1_in1k"]
    listed = reproduction_lists.timm_list("timm-a", twice)
    assert list(listed.checkpoints) == ["resnet18.tv_in1k", "resnet50.a1_in1k"]
    assert listed.title == "timm's own classifiers on imagenet-a"
    images = timm_scores.SETS["imagenet-a"].images
    hours = images / 1200 / 3600
    # The one with counts at two sizes is measured twice
    assert listed.gpu_hours(list(listed.checkpoints)) == pytest.approx(3 * hours)
    assert listed.parts[1].evaluate == (
        {
            "verb": "ood",
            "protocol": "ood_own_train_size",
            "datasets": ["imagenet-a"],
            "pack": 8,
        },
    )
    model = listed.files["resnet18.tv_in1k"]
    assert (model.page, model.file, model.by_hand) == (
        "https://huggingface.co/timm/resnet18.tv_in1k",
        "model.safetensors",
        "`timm.create_model('resnet18.tv_in1k', pretrained=True)` fetches it",
    )
