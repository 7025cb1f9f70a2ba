"""Rules that rename a file's tensors, and where in a file a network is looked for."""

from types import SimpleNamespace

import pytest
import torch

from backbench.errors import BadInput
from backbench.weights.families import lookalikes, renaming
from backbench.weights.families.renaming import renamed

WANTED = ["a.weight", "a.bias", "b.weight"]


def table(*keys):
    return {key: torch.full((1,), float(n)) for n, key in enumerate(keys)}


@pytest.fixture
def rules(tmp_path):
    """rules(text): a file of them"""

    def write(text):
        file = tmp_path / "rules.txt"
        file.write_text(text)
        return str(file)

    return write


def test_the_first_rule_that_fits_a_name_counts(rules):
    file = rules("# a comment\n\nx\\.(\\w+)$ -> a.\\1\n^x -> never\n y\\. ->  b. \n")
    tables = {
        "model": table("x.weight", "x.bias", "y.weight", "z", "xq"),
        "optimizer": table("exp_avg"),
        "ema": table("net.x.bias", "x.others"),
    }
    out, names = renamed(tables, "net", WANTED, file)
    assert {name: list(tensors) for name, tensors in out.items()} == {
        "model": ["a.weight", "a.bias", "b.weight", "z", "neverq"],
        "ema": ["net.a.bias", "a.others"],
    }
    assert names == {
        "x.weight": "a.weight",
        "x.bias": "a.bias",
        "y.weight": "b.weight",
        "z": "z",
        "xq": "neverq",
        "net.x.bias": "net.a.bias",
        "x.others": "a.others",
    }
    assert out["model"]["b.weight"] is tables["model"]["y.weight"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x -> a\n^y$ -> a", None),
        ("x. -> q.", "x.bias and another tensor both become q.; write a rule for each"),
        (
            "x -> a\ny -> b\nnothing -> c",
            ":3: 'nothing' fits none of the file's names that the rules before it leave"
            " (x.weight, x.bias, y.weight); write it anew, or leave it out",
        ),
        (
            "x -> a",
            ": 1 of net's tensors get none of the file's: b.weight (no rule fits y.weight); add"
            " rules for them",
        ),
        ("x\ny -> b", ":1: no arrow ->; expected REGEX -> NAME"),
        (
            "x -> a\n( -> b",
            ":2: missing ), unterminated subpattern at position 0; expected",
        ),
        ("x -> a\ny(.) -> b\\2", ":2: invalid group reference 2"),
    ],
)
def test_rules_that_do_not_name_every_tensor_are_refused(rules, text, says):
    tables = {"": table("x.weight", "x.bias", "y.weight")}
    if text.startswith("x."):
        tables = {"": table("xz", "xy", "y")}
        says = "xy and another tensor both become q.; write a rule for each"
    if says is None:
        with pytest.raises(BadInput, match="'\\^y\\$' fits none of the file's names"):
            renamed(tables, "net", WANTED, rules(text))
        return
    file = rules(text)
    with pytest.raises(BadInput) as refused:
        renamed(tables, "net", WANTED, file)
    assert str(refused.value).startswith(file)
    assert says in str(refused.value)


def test_a_file_of_rules_is_text(tmp_path):
    with pytest.raises(BadInput) as refused:
        renamed({}, "net", WANTED, str(tmp_path / "none"))
    assert str(refused.value) == (
        f"--rename {tmp_path / 'none'}: no such file of rules, a line each: REGEX -> NAME; or"
        " by-order"
    )
    (tmp_path / "rules").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="is no text; write rules, a line each"):
        renamed({}, "net", WANTED, str(tmp_path / "rules"))


def test_missing_names_are_those_below_the_prefix_with_the_most():
    tables = {
        "one": table("p.a.weight", "p.a.bias", "q.a.weight"),
        "two": table("b.weight", "other"),
    }
    assert renaming._missing(tables, WANTED) == ["b.weight"]
    assert renaming._missing({"": table("x")}, WANTED) == WANTED
    # Seven parts may stand before a name of one
    deep = ".".join("pqrstuv")
    assert renaming._missing({"": table(f"{deep}.w")}, ["w"]) == []
    assert renaming._missing({"": table(f"o.{deep}.w")}, ["w"]) == ["w"]


# Where a network may stand


def test_a_network_may_stand_below_four_parts():
    keys = [f"a.b.c.d.e.{n}" for n in range(10)] + [f"x.{n}" for n in range(9)]
    assert lookalikes._prefixes(table(*keys)) == [
        "",
        "a.",
        "a.b.",
        "a.b.c.",
        "a.b.c.d.",
    ]
    assert lookalikes._prefixes(table(*keys[:9])) == []
    many = [f"p{n:02}.{i}" for n in range(20) for i in range(10 + n)]
    found = lookalikes._prefixes(table(*many))
    assert found == ["", *(f"p{n:02}." for n in range(19, 4, -1))]
    long = [f"{'x' * 298}.{n}" for n in range(10)]
    assert lookalikes._prefixes(table(*long)) == ["", f"{'x' * 298}."]
    longer = [f"{'x' * 299}.{n}" for n in range(10)]
    assert lookalikes._prefixes(table(*longer)) == [""]


def test_a_classifier_is_taken_off_in_several_ways():
    trunk = [f"layer.{n}.weight" for n in range(10)]
    keys = [*trunk, "layer.bn.num_batches_tracked", "head.fc.weight", "head.fc.bias"]
    keys += ["aux.classifier.2.weight", "aux.classifier.2.bias"]
    below = [f"net.{key}" for key in keys]
    found = list(lookalikes._bodies(table(*below, "elsewhere.fc.weight"), "net."))
    trunk = [f"net.{key}" for key in trunk]
    heads = [f"net.{key}" for key in keys[11:]]
    both = (tuple(trunk), tuple(heads))
    last = (tuple(trunk + heads[:2]), tuple(heads[2:]))
    assert found == [
        (tuple(trunk + heads), ()),
        both,
        last,
        last,
        (tuple(trunk + heads[:3]), tuple(heads[3:])),
        both,
    ]
    few = table(*(f"layer.{n}.weight" for n in range(9)), "fc.weight")
    assert list(lookalikes._bodies(few, "")) == [(tuple(few), ())]


def test_many_names_of_one_network_are_cut():
    assert lookalikes._listed(list("abcdefgh")) == "a, b, c, d, e, f, g, h"
    assert lookalikes._listed(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"
    group = SimpleNamespace(names=("plain",))
    assert lookalikes._names(group) == "plain"
    group = SimpleNamespace(names=("plain", "b", "c"))
    assert lookalikes._names(group) == "plain (the same: b, c)"


def test_only_attributes_that_tell_networks_apart_are_told():
    built = {
        "one": {"a.eps": 1e-5, "b.eps": 1e-5, "c.eps": 1e-6, "a.stride": 2, "a.x": 1},
        "two": {"a.eps": 1e-6, "b.eps": 1e-6, "c.eps": 1e-5, "a.stride": 2, "a.x": 2},
    }
    differing = ["a.eps", "a.x", "b.eps", "c.eps"]
    assert lookalikes._values(built, differing, ("eps", "stride", "x")) == {
        "eps": {"one": "1e-05", "two": "1e-06"},  # the most frequent of each
        "x": {"one": "1", "two": "2"},
    }
    alone = {"one": {"a.eps": 1}, "two": {}}
    assert lookalikes._values(alone, ["a.eps"], ("eps",)) == {}


def test_very_large_tables_are_not_searched(monkeypatch):
    monkeypatch.setattr(lookalikes, "MOST_TENSORS", 12)
    searched = []
    monkeypatch.setattr(
        lookalikes, "_prefixes", lambda t: searched.append(len(t)) or []
    )
    tables = {
        name: table(*map(str, range(count))) for name, count in (("a", 13), ("b", 12))
    }
    assert lookalikes.find(tables) is None
    assert searched == [12]
