"""Recipes: bases, overrides, types; a mistake is one line: the file, the key, what is allowed."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from pydantic import Field

from backbench.errors import BadInput
from backbench.recipes import config


@dataclass(frozen=True, kw_only=True)
class Head:
    width: int = 8
    norm: bool = False


@dataclass(frozen=True, kw_only=True)
class Cat:
    name: str
    lives: int = 9


@dataclass(frozen=True, kw_only=True)
class Dog:
    name: str
    tricks: tuple[str, ...] = ()


def choose(data):
    kinds = {"cat": Cat, "dog": Dog}
    if data.get("name") not in kinds:
        raise ValueError(f"{data.get('name')!r} is no pet; allowed: cat, dog")
    return kinds[data["name"]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    lr: float = 0.1
    pet: Annotated[Cat | Dog, config.ChosenBy(choose)] = Cat(name="cat")
    heads: tuple[Head, ...] = (Head(),)
    # The same with bounds, and below None
    layers: Annotated[tuple[Head, ...], Field(min_length=1)] = (Head(),)
    named: Annotated[dict[str, Head] | None, "of heads"] = None
    pair: tuple[float, float] = (0.0, 1.0)
    limit: int | None = None
    mode: Literal["plain", "fancy"] = "plain"
    compile: bool | Literal["cuda"] = False
    table: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError(f"lr must not be negative, not {self.lr}")


def write(folder, name, text):
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def load(path, *overrides):
    return config.load(Recipe, path, overrides, kind="pretrain")


def test_bases_merge_from_low_to_high(tmp_path):
    text = "name: low\nlr: 1e-4\npet: {name: dog, tricks: [sit]}\ntable: {a: 1, b: 2}"
    write(tmp_path, "low", text)
    write(tmp_path, "side", "lr: 0.5\nheads: [{width: 1}, {norm: true}]")
    top = write(tmp_path, "top", "base: [low, side]\nname: top\ntable: {b: 3}")
    assert load(top) == Recipe(
        name="top",
        lr=0.5,
        pet=Dog(name="dog", tricks=("sit",)),
        heads=(Head(width=1), Head(norm=True)),
        table={"a": 1.0, "b": 3.0},
    )


def test_numbers_are_read_as_people_write_them(tmp_path):
    path = write(tmp_path, "r", "name: r\nlr: 1e-4")
    assert load(path).lr == 1e-4
    assert load(path, "lr=3").lr == 3.0
    assert load(path, "lr=2.5e3").lr == 2500.0
    assert load(path, "lr=inf").lr == math.inf
    assert load(path, "limit=4").limit == 4
    assert load(path, "limit=4", "limit=null").limit is None
    assert load(path, "pair=[1, 2e-3]").pair == (1.0, 0.002)


def test_overrides_reach_into_groups_and_the_last_one_wins(tmp_path):
    path = write(tmp_path, "r", "name: r\npet: {name: cat}")
    assert load(path, "pet.lives=7", "pet.lives=3").pet == Cat(name="cat", lives=3)
    found = load(path, "heads=[{width: 2}]", "table.x=1")
    assert found.heads == (Head(width=2),)
    assert found.table == {"x": 1.0}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("name: r\nlrr: 1", [], "unknown key 'lrr'; did you mean 'lr'"),
        ("lr: 1", [], "key 'name' is missing"),
        ("name: r\nlr: fast", [], "'lr' must be a number, not 'fast'"),
        ("name: r\nlr: true", [], "'lr' must be a number"),
        ("name: r\nlimit: 1.5", [], "'limit' must be"),
        ("name: r\nmode: plian", [], "did you mean 'plain'"),
        ("name: r\npair: [1]", [], "'pair' must be"),
        (
            "name: r\nheads: [{width: x}]",
            [],
            r"'heads\[0\].width' must be a whole number",
        ),
        ("name: r\npet: {name: cow}", [], "allowed: cat, dog"),
        (
            "name: r\npet: {name: dog, lives: 3}",
            [],
            "unknown key 'pet.lives'; allowed: name, tr",
        ),
        (
            "name: r\nheads: [{widht: 1}]",
            [],
            r"unknown key 'heads\[0\].widht'; did you mean 'width'",
        ),
        (
            "name: r\nlayers: [{qqqqq: 1}]",
            [],
            r"unknown key 'layers\[0\].qqqqq'; allowed: norm, width",
        ),
        (
            "name: r\nnamed: {a: {qqqqq: 1}}",
            [],
            "unknown key 'named.a.qqqqq'; allowed: norm, width",
        ),
        ("name: r\ncompile: 2", [], "'compile' must be true or false or 'cuda', not 2"),
        ("name: r\npair: [1, 2, 3]", [], "'pair' must be a shorter list"),
        (
            "name: r\nlimit: 2020-01-01",
            [],
            "'limit' must be a whole number, not '2020-01-01'",
        ),
        ("name: r\nname: s", [], "the key 'name' stands twice"),
        ("name: !!binary aGk=", [], "could not determine a constructor"),
        ("name: r\nlr: -1", [], "lr must not be negative"),
        ("name: r", ["lr"], "override 'lr': expected key=value"),
        ("name: r", ["pet.nmae=cat"], "allowed: cat, dog"),
        ("name: [r", [], "not readable as YAML"),
        ("- a\n- b", [], "expected `key: value` lines"),
        ("name: r\nbase: 7", [], "must be a name or a list"),
        ("name: r\nbase: nobody", [], "base 'nobody' is not there"),
        ("name: r\nbase: recipe", [], "goes in a circle"),
    ],
)
def test_every_mistake_is_one_line_with_the_file(tmp_path, text, overrides, message):
    path = write(tmp_path, "recipe", text)
    with pytest.raises(BadInput, match=message) as caught:
        load(path, *overrides)
    assert "\n" not in str(caught.value)
    assert overrides or "recipe.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "override 'lr': expected key=value, as in optim.lr=0.1"),
        ("=1", "override '=1': expected key=value, as in optim.lr=0.1"),
        ("a..b=1", "override 'a..b=1': expected key=value, as in optim.lr=0.1"),
        ("lr=[1", "override 'lr=[1': while parsing a flow sequence at line 1"),
        ("lr=\x1b", "override 'lr=\\x1b' holds the control character '\\x1b'"),
        (
            f"lr={'a' * 90}\x07",
            f"override 'lr={'a' * 76} holds the control character '\\x07'",
        ),
    ],
)
def test_a_change_that_cannot_be_read_is_named_as_it_was_written(text, said):
    with pytest.raises(BadInput) as refused:
        config.apply_overrides({}, ["epochs=2", text])
    assert str(refused.value).startswith(said)


FAMILY = """
base: low
lr: 0.5
variants:
  _dog:
    pet: {name: dog}
  rex:
    base: [side, _dog]
    name: rex
  old_rex:
    base: rex
    pet: {tricks: [sit]}
"""


def test_a_family_holds_several_recipes(tmp_path):
    """A variant lies over its bases, they over what the family shares, that over the file's base."""
    write(tmp_path, "low", "lr: 0.1\nlimit: 3\ntable: {a: 1}")
    write(tmp_path, "side", "lr: 0.7\nmode: fancy")
    family = write(tmp_path, "_family", FAMILY)
    other = write(tmp_path, "other", "base: old_rex\nname: other")
    rex = Recipe(
        name="rex", lr=0.7, pet=Dog(name="dog"), limit=3, mode="fancy", table={"a": 1.0}
    )
    assert load(family / "rex") == rex
    assert load(tmp_path / "rex.yaml") == rex, "as if it stood in a file of its own"
    old = dataclasses.replace(rex, pet=Dog(name="dog", tricks=("sit",)))
    assert load(family / "old_rex") == old
    assert load(other) == dataclasses.replace(old, name="other")


@pytest.mark.parametrize(
    ("text", "variant", "message"),
    [
        (
            "variants:\n  rex: {name: r}",
            "rx",
            "family.yaml: no variant 'rx'; did you mean 'rex'",
        ),
        (
            "a: 1\nvariants: [rex]",
            "rex",
            "family.yaml: `variants:` must map each name to its keys",
        ),
        (
            "variants:\n  rex: {base: rex}",
            "rex",
            "family.yaml/rex: `base:` goes in a circle",
        ),
        (
            "variants:\n  rex: {name: r, lr: x}",
            "rex",
            "family.yaml/rex: 'lr' must be a number",
        ),
    ],
)
def test_a_mistake_in_a_family_names_the_variant(tmp_path, text, variant, message):
    family = write(tmp_path, "family", f"name: all\n{text}")
    with pytest.raises(BadInput, match=message):
        load(family / variant)


def test_every_name_is_found_once():
    for kind in ("pretrain", "transfer", "grids", "clusters", "reproduce"):
        names = config.recipe_names(kind)
        assert len(names) == len(set(names)) > 0
        for name in names:
            found = config.find_recipe(name, kind)
            assert found.stem == name.rpartition("/")[2]


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(BadInput, match="lorac"):
        config.find_recipe("lorak/lorac_imagenet_r50_200ep", "pretrain")


def test_a_recipe_written_out_reads_back_as_itself(tmp_path):
    recipe = Recipe(
        name="r", lr=math.inf, pet=Dog(name="dog", tricks=("roll",)), limit=3
    )
    assert load(write(tmp_path, "again", config.to_yaml(recipe))) == recipe


def test_fingerprints_are_equal_exactly_when_the_values_are():
    found = config.fingerprint(Recipe(name="r"))
    assert found == config.fingerprint(Recipe(name="r", pair=(0.0, 1.0)))
    assert found != config.fingerprint(Recipe(name="r", lr=0.2))
    assert config.fingerprint({"x": 1, "y": 2}) == config.fingerprint({"y": 2, "x": 1})


def test_a_variant_of_two_families_is_refused(tmp_path):
    text = "name: all\nvariants:\n  rex: {name: r}"
    write(tmp_path, "one", text)
    assert (
        config.find_recipe(tmp_path / "rex.yaml", "pretrain")
        == tmp_path / "one.yaml" / "rex"
    )
    write(tmp_path, "two", text)
    says = f"two families have a variant 'rex': {tmp_path / 'one.yaml'}, {tmp_path / 'two.yaml'}"
    with pytest.raises(BadInput, match=says):
        config.find_recipe(tmp_path / "rex.yaml", "pretrain")
    # A file of its own wins
    file = write(tmp_path, "rex", "name: r")
    assert config.find_recipe(tmp_path / "rex.yaml", "pretrain") == file


def test_a_recipe_is_a_file_that_ends_so(tmp_path):
    other = tmp_path / "a.yml"
    other.write_text("name: r")
    assert config.find_recipe(other, "pretrain") == other
    text = tmp_path / "a.txt"
    text.touch()
    with pytest.raises(
        BadInput, match=r"a\.txt: recipes are \.yaml files; give one, or a name"
    ):
        config.find_recipe(text, "pretrain")


def test_the_sentence_above_a_recipe_says_what_it_is(tmp_path):
    file = write(
        tmp_path,
        "a",
        "# What all share. And more of it\n# in two lines.\nname: all\nvariants:\n"
        "  # Of the first one; with a\n  # comment.\n  rex:\n    name: r\n  # Others.\n"
        "  lassie: {name: l}\n  none:\n    name: n\n",
    )
    assert config.first_sentence(file) == "What all share"
    assert config.first_sentence(file / "rex") == "Of the first one"
    assert config.first_sentence(file / "none") == ""
    assert config.first_sentence(write(tmp_path, "b", "name: r\n# late")) == ""
