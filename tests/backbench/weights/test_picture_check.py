"""Which network the pictures of known classes show: its chances, its labels, and what is refused."""

import pytest
import torch
from scipy import stats

from backbench.errors import BadInput
from backbench.weights.families import lookalikes, picture_check
from backbench.weights.families.picture_check import PictureCheck, Score


def score(name, right, wrong):
    """A network that names the first pictures right and the others wrong."""
    return Score(name, (True,) * right + (False,) * wrong)


def decided(scores, own="", classes=10):
    """The refusal of these scores, the best first; empty where they choose."""
    checked = PictureCheck(f"timm:{own or scores[0].name}", None, scores)
    try:
        picture_check._refuse_unless_shown(checked, own, classes)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("count", [1, 7, 12])
@pytest.mark.parametrize("chance", [0.1, 0.5])
def test_a_chance_is_that_of_so_many_or_more(count, chance):
    for right in range(count + 1):
        exact = stats.binomtest(right, count, chance, alternative="greater").pvalue
        assert picture_check._tail(count, right, chance) == pytest.approx(exact)


def test_one_network_is_better_where_the_sign_test_is_sure():
    """Eight to none has p = 2 / 256, and seven to none 2 / 128."""
    assert picture_check._better(score("a", 8, 4), score("b", 0, 12))
    assert not picture_check._better(score("a", 7, 4), score("b", 0, 11))
    assert not picture_check._better(score("b", 0, 12), score("a", 8, 4))
    # Pictures that both name right, or wrong, count for neither
    assert picture_check._better(score("a", 48, 4), score("b", 40, 12))
    assert not picture_check._better(score("a", 47, 4), score("b", 40, 11))
    # Ten to two: p = 0.039
    won = Score("a", (True,) * 10 + (False,) * 2)
    lost = Score("b", (False,) * 10 + (True,) * 2)
    assert not picture_check._better(won, lost)


def test_a_line_for_each_network():
    checked = PictureCheck("timm:a", None, [score("a", 2, 1), score("b", 1, 2)])
    assert checked.told() == [
        "timm:a: 66.7% of 3 pictures",
        "timm:b: 33.3% of 3 pictures",
    ]


def test_a_network_must_be_better_than_chance():
    """Of ten classes, three of five right by chance has p = 0.009, and two of five 0.08."""
    assert decided([score("a", 3, 2)]) == ""
    assert decided([score("a", 2, 3)]) == (
        "--check: no network is better than chance (timm:a: 40.0% of 5 pictures): other classes, or"
        " another order of classes, than the folder's names say"
    )
    assert "better than chance" in decided([score("a", 3, 2)], classes=5)


def test_a_users_own_network_must_not_be_worse_than_another():
    best, near, far = score("a", 20, 0), score("b", 15, 5), score("c", 10, 10)
    assert decided([best, near, far], own="a") == ""
    assert decided([best, near, far], own="b") == ""
    assert decided([best, near, far], own="c") == (
        "--check: timm:c is not the network of this file (timm:a: 100.0% of 20 pictures; timm:b: 75.0%"
        " of 20 pictures; timm:c: 50.0% of 20 pictures); take --arch timm:a"
    )


def test_of_networks_that_nobody_has_named_one_must_be_best():
    best, near, far = score("a", 20, 0), score("b", 15, 5), score("c", 10, 10)
    assert decided([best, far]) == ""
    assert decided([best, far, near]) == (
        "--check: the pictures do not tell a from b (timm:a: 100.0% of 20 pictures; timm:c: 50.0% of 20"
        " pictures; timm:b: 75.0% of 20 pictures); give more pictures, or choose one with --arch"
        " timm:NAME"
    )
    assert "tell a from b, d (" in decided([best, near, far, score("d", 14, 6)])


# The pictures


def made(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def labels(folder, classes):
    images = picture_check.pictures(folder, classes)
    return dict(zip(images.paths, images.labels))


def test_of_many_pictures_some_are_spread_over_the_folder(tmp_path):
    """500 of 1250: 0, 2, 5, 7, 10, ..."""
    names = [f"{n // 1000}/{n:04}.png" for n in range(1250)]
    found = labels(made(tmp_path, *names), 2)
    assert list(found) == [names[5 * i // 2] for i in range(500)]
    assert list(found.values()) == [0] * 400 + [1] * 100


def test_places_are_numbers_below_the_classifiers_classes(tmp_path):
    folder = made(tmp_path, "0/a.png", "19/a.png")
    assert labels(folder, 20) == {"0/a.png": 0, "19/a.png": 19}
    with pytest.raises(BadInput) as error:
        labels(folder, 19)
    assert str(error.value) == (
        f"--check {folder}: nothing tells which of the classifier's 19 classes its 2 folders are ('0');"
        " name them by ImageNet's ids or by their places, 0 to 18"
    )
    # As many names as classes stand in their order
    assert labels(made(tmp_path / "x", "b/1.png", "20/1.png"), 2) == {
        "20/1.png": 0,
        "b/1.png": 1,
    }


def test_imagenets_ids_are_places_of_its_thousand_classes_alone(tmp_path):
    ids = made(tmp_path / "ids", "n01440764/a.png", "n15075141/a.png")
    assert list(labels(ids, 1000).values()) == [0, 999]
    assert list(labels(ids, 2).values()) == [0, 1]
    unknown = made(tmp_path / "other", "n01440764/a.png", "n00000001/a.png")
    with pytest.raises(BadInput, match="'n00000001'"):
        labels(unknown, 1000)
    longer = made(tmp_path / "longer", "n01440764/a.png", "n150751411/a.png")
    with pytest.raises(BadInput, match="its 2 folders"):
        labels(longer, 1000)


def test_names_of_files_tell_a_class_where_all_begin_with_one(tmp_path):
    flat = made(tmp_path / "flat", "n15075141_b.png", "n01440764_a.png", "read.me")
    assert labels(flat, 1000) == {"n01440764_a.png": 0, "n15075141_b.png": 999}
    expected = (
        f"--check {flat}: expected {flat}/<class>/<picture>, or pictures whose names begin with"
        " ImageNet's ids (n01440764_1.JPEG)"
    )
    for name in ("n0144076_c.png", "x_n01440764.png"):
        made(flat, name)
        with pytest.raises(BadInput) as error:
            labels(flat, 1000)
        assert str(error.value) == expected
        (flat / name).unlink()
    with pytest.raises(BadInput, match=r"expected .*/empty/<class>/<picture>"):
        labels(made(tmp_path / "empty", "read.me"), 1000)
    with pytest.raises(BadInput, match=f"--check {tmp_path / 'no'}: .*class folders"):
        labels(tmp_path / "no", 1000)


# The file


def table(model, classes):
    shapes = lookalikes.shapes_of(model, classes)
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("tensors", "arch", "says"),
    [
        ({}, "", "--check: the file holds the tensors of none of timm's networks"),
        (
            table("test_convnext", 0),
            "",
            "--check: the file has no classifier that could name a picture; leave out --check",
        ),
        (
            table("test_convnext", 0)
            | {"loss.temperature": torch.empty((), device="meta")},
            "",
            "--check: the file has no classifier that could name a picture; leave out --check",
        ),
        (
            table("test_convnext", 2),
            "timm:resnet18,width=2",
            "--check: the file does not hold the tensors of timm:resnet18,width=2, but those of"
            " test_convnext",
        ),
    ],
)
def test_a_file_that_pictures_cannot_tell_is_refused(tensors, arch, says, tmp_path):
    folder = made(tmp_path, "a/1.png", "b/1.png")
    with pytest.raises(BadInput) as error:
        picture_check.check({"model": tensors}, folder, arch)
    assert str(error.value) == says


def test_a_users_own_network_that_is_not_scored_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_check, "MOST_NETWORKS", 1)
    tensors = table("mobilenetv3_small_075", 2)
    names = lookalikes.find({"model": tensors}).names
    scored, *others = lookalikes.groups(names)
    own = f"timm:{others[-1].names[0]}"
    folder = made(tmp_path, "a/1.png", "b/1.png")
    with pytest.raises(BadInput) as error:
        picture_check.check({"model": tensors}, folder, own)
    assert str(error.value) == (
        f"--check: {own} is none of the 1 networks that are scored ({scored.names[0]}); leave out"
        " --arch or --check"
    )
