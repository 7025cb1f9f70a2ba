"""Trunks that are found in a file: by votes for their prefixes, in a format's places, whole or not."""

from types import SimpleNamespace

import pytest
import torch

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import assembling, choosing, formats, leftovers, wholeness
from backbench.weights.family import (
    NATIVE,
    Format,
    TrunkInFile,
    TrunkMetadata,
    find_by_votes,
)
from backbench.weights.file_contents import SAY_WHAT_IT_IS, FileContents
from backbench.weights.weight_file import Opened


class PlacedTrunk(TrunkInFile):
    """A trunk of three tensors and a counter, wherever it stands."""

    if_misshaped = "; take another"

    def shapes(self):
        return {
            "a.weight": (2, 3),
            "n.running_mean": (2,),
            "n.running_var": (2,),
            "n.num_batches_tracked": (),
        }

    def pixels(self):
        return None


def placed(prefix="", table="", keys=(), **more):
    local = {key: prefix + key for key in keys}
    return PlacedTrunk(
        table=table, prefix=prefix, dialect="ours", keys=local, arch="small", **more
    )


WHOLE = ("a.weight", "n.running_mean", "n.running_var")


# Where they stand


def test_what_is_told_first_counts_and_options_are_joined():
    told = TrunkMetadata(arch="x", options={"eps": "1"}, names_model=True)
    beside = TrunkMetadata(
        arch="y",
        reading="cls",
        pixels=Pixels(),
        options={"eps": "2", "depth": "3"},
        activation="gelu",
        licence="MIT",
        source="config.json",
        method="dino",
    )
    assert told.over(beside) == TrunkMetadata(
        arch="x",
        reading="cls",
        pixels=Pixels(),
        options={"eps": "1", "depth": "3"},
        activation="gelu",
        licence="MIT",
        source="config.json",
        names_model=True,
        method="dino",
    )


def test_a_trunk_is_named_by_its_table_and_prefix():
    inside = placed("module.net.", table="model", keys=WHOLE[:2])
    assert (inside.place, inside.label) == ("model:net.", "model: module.net.")
    assert (placed().place, placed().label) == (":", "(no prefix)")
    assert inside.missing == ["n.running_var"], "a counter is never missed"
    assert inside.stem() == NATIVE
    for wanted in ("", "conv3"):
        with pytest.raises(
            BadInput, match=r"^small has no choice of stem; leave out --stem$"
        ):
            inside.stem(wanted)


def voted(tables, scores, *, fewest=2, most=9):
    """The trunks as (table, prefix, naming), and what was tried; each key votes for both namings
    of its first part."""
    tried = []

    def candidates(key):
        prefix = key.split(".")[0] + "."
        return [(prefix, "first"), (prefix, "second")]

    def fit(table, prefix, naming):
        tried.append((table, prefix, naming))
        keys = [key for key in reversed(tables[table]) if key.startswith(prefix)]
        named = {key: key for key in keys}
        trunk = PlacedTrunk(table=table, prefix=prefix, dialect=naming, keys=named)
        return scores.get((prefix, naming), 0), trunk

    found = find_by_votes(tables, candidates, fit, fewest=fewest, most=most)
    return [(trunk.table, trunk.prefix, trunk.dialect) for trunk in found], tried


def test_the_naming_with_the_largest_score_counts_in_the_files_order():
    tables = {
        "t": dict.fromkeys(["a.1", "b.1", "b.2", "b.3", "a.2", "c.1", "d.1", "d.2"]),
        "u": dict.fromkeys(["b.1", "b.2", "a.1"]),
    }
    scores = {
        ("a.", "first"): 1,
        ("a.", "second"): 2,
        ("b.", "first"): 3,
        ("b.", "second"): 3,
        ("c.", "first"): 9,
    }
    found, tried = voted(tables, scores)
    assert found == [
        ("t", "a.", "second"),
        ("t", "b.", "first"),
        ("u", "b.", "first"),
    ]
    # c has one vote for each naming, and d no score
    assert ("t", "c.", "first") not in tried and ("t", "d.", "second") in tried
    found, tried = voted(tables, scores, fewest=3)
    assert found == [("t", "b.", "first")] and len(tried) == 2
    # Only so many are tried in a table, those with the most votes first
    found, tried = voted(tables, scores, most=3)
    assert (
        tried
        == [
            ("t", "b.", "first"),
            ("t", "b.", "second"),
            ("t", "a.", "first"),
            ("u", "b.", "first"),
            ("u", "b.", "second"),
            ("u", "a.", "first"),
        ][: len(tried)]
    )
    assert found == [("t", "a.", "first"), ("t", "b.", "first"), ("u", "b.", "first")]


# Formats


def form(name="one", encoders=None, **more):
    how = {"source": "", "method": "", "dialects": ("ours",), **more}
    return Format(name=name, encoders=encoders or {"trunk": ("",)}, **how)


def test_each_trunk_has_a_place_in_its_format():
    two = form(encoders={"teacher": ("t:", "net."), "student": ("s:", "t:")})
    for table in ("", "state_dict", "model", "model_state_dict", "net"):
        trunk = placed("net.", table=table)
        assert formats.encoders_in(two, [trunk]) == {"teacher": [trunk]}
    teacher, copy, student = placed(table="t"), placed("module.net."), placed(table="s")
    found = formats.encoders_in(two, [teacher, student, copy])
    assert found == {"teacher": [teacher, copy], "student": [student]}
    assert formats.encoders_in(two, [teacher, placed(table="x")]) is None
    assert formats.encoders_in(two, [placed("net.", table="t")]) is None
    other = form(encoders=two.encoders, dialects=("theirs",))
    assert formats.encoders_in(other, [teacher]) is None


def test_a_format_gives_way_to_those_that_refine_it(monkeypatch):
    rows = [
        form("plain"),
        form("marked", needs=("queue*", "@epoch"), refines=("plain",)),
        form("tested", test=lambda tables, trunks: "" in tables, refines=("plain",)),
        form("elsewhere", encoders={"trunk": ("there.",)}),
    ]
    monkeypatch.setattr(formats, "all_formats", lambda: {row.name: row for row in rows})

    def known(tables, tree):
        found = formats.recognise([placed()], tables, tree)
        return None if found is None else found.name

    assert known({"model": {}}, {}) == "plain"
    assert known({"": {}}, {}) == "tested"
    tables = {"a": {"x": 0}, "model": {"module.queue_ptr": 0}}
    assert known(tables, {"epoch": 1}) == "marked"
    assert known(tables, {"step": 1}) == known(tables, []) == "plain"
    assert known({"model": {"x": 0}}, {"epoch": 1}) == "plain"
    with pytest.raises(BadInput) as error:
        known({**tables, "": {}}, {"epoch": 1})
    assert str(error.value) == (
        "it fits the formats 'marked' and 'tested' alike; convert it with a tool of one of them"
    )
    assert formats.recognise([placed(table="x")], {}, {}) is None


def test_the_nearest_format_is_named_by_its_first_words(monkeypatch):
    first = form("first", encoders={"trunk": ("", "model:abcde.net.", "abcdx.")})
    second = form("second", encoders={"trunk": ("abcdx.",), "other": ("vwxyz.",)})
    families = [SimpleNamespace(formats=(first, second))]
    monkeypatch.setattr(formats, "FAMILIES", families)

    def nearest(*keys):
        found = formats.nearest_format({"t": {}, "u": dict.fromkeys(keys)})
        return None if found is None else found.name

    assert nearest("a.b", "module.vwxyy.weight") == "second"
    assert nearest("abcdx.weight") == "first", "of equals the first"
    # Two of five letters differ: a ratio of 0.6
    assert nearest("vwxab.weight") is None
    assert nearest("weight", "") is None
    # A hundred first words are looked at
    many = [f"{n}.weight" for n in range(99)]
    assert nearest(*many, *many, "vwxyz.weight") == "second"
    assert nearest(*many, "99.weight", "vwxyz.weight") is None


# Whole or not


def contents_of(tree, tmp_path, name="x.pth"):
    opened = Opened(tmp_path / name, "pickle", "0" * 64, 0, tree, {})
    return FileContents(opened)


def of_trunk(**changes):
    table = {
        "a.weight": torch.ones(2, 3),
        "n.running_mean": torch.zeros(2),
        "n.running_var": torch.ones(2),
        "n.num_batches_tracked": torch.tensor(3),
    }
    return table | changes


def told(table, trunk, tmp_path, allow=False):
    """What refuses a trunk of the file's one table; empty where it is whole."""
    found = contents_of({"model": table, "other": {"a.wight": torch.ones(1)}}, tmp_path)
    found.trunks = [trunk]
    try:
        wholeness.refuse_unless_whole(found, trunk, allow)
    except BadInput as error:
        return str(error)
    return ""


def test_all_that_keeps_a_trunk_from_being_whole_is_said(tmp_path):
    keys = (*WHOLE, "n.num_batches_tracked")
    assert told(of_trunk(), placed(table="model", keys=keys), tmp_path) == ""
    damaged = of_trunk(
        **{
            "a.weight": torch.ones(3, 2),
            "n.running_mean": torch.tensor([1.0, torch.inf]),
            "n.running_var": torch.ones(2, dtype=torch.int32),
            "n.num_batches_tracked": torch.tensor(3).to_sparse(),
        }
    )
    more = placed(table="model", keys=keys, extra=("n.gate", "n.bias"))
    assert told(damaged, more, tmp_path) == (
        "'model: (no prefix)' is not a whole small (no known format):"
        " 2 extra inside the trunk: n.gate, n.bias;"
        " 1 of the wrong shape: a.weight (3, 2) instead of (2, 3);"
        " 3 not usable: n.running_mean (not finite), n.running_var (int32),"
        " n.num_batches_tracked (its elements are not all in the file); take another"
    )
    some = placed(table="model", keys=WHOLE[1:])
    table = of_trunk()
    del table["a.weight"]
    assert told(table, some, tmp_path) == (
        "'model: (no prefix)' is not a whole small (no known format):"
        " 1 missing: a.weight (is 'a.wight' meant?);"
        " give the whole file, as its training wrote it"
    )


def test_a_lack_of_all_statistics_is_refused_or_allowed_as_a_whole(tmp_path):
    none = placed(table="model", keys=("a.weight",))
    assert wholeness.missing_statistics(none) == "all"
    assert told(of_trunk(), none, tmp_path, allow=True) == ""
    assert told(of_trunk(), none, tmp_path).startswith(
        "'model: (no prefix)' has no batch-norm statistics (running_mean, running_var), so"
    )
    some = placed(table="model", keys=WHOLE[:2])
    assert wholeness.missing_statistics(some) == "some"
    for allow in (False, True):
        said = told(of_trunk(), some, tmp_path, allow)
        assert "1 missing: n.running_var" in said
    assert wholeness.missing_statistics(placed(keys=WHOLE)) == "none"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"missing": ["a"], "extra": ["b"]}, "give the whole file, as its training"),
        ({"extra": ["b"], "unusable": ["c (not finite)"]}, "it is another network: "),
        ({"shape": ["b"]}, "it is another network: "),
        ({"unusable": ["a (int8)", "c (not finite)"]}, "the training has diverged: "),
        ({"unusable": ["a (int8)"]}, "give the file as its training wrote it, in fl"),
    ],
)
def test_the_next_step_follows_from_what_is_wrong(found, says):
    problems = {
        "missing": found.get("missing", []),
        "extra inside the trunk": found.get("extra", []),
        "of the wrong shape": found.get("shape", []),
        "not usable": found.get("unusable", []),
    }
    assert wholeness._next_step(problems).startswith(says)


# What is no trunk


def refusal(tree, tmp_path, encoder=None):
    with pytest.raises(BadInput) as error:
        choosing.choose(contents_of(tree, tmp_path), encoder)
    return str(error.value).removeprefix(f"{tmp_path / 'x.pth'}: ")


def test_a_head_alone_is_told_from_an_unknown_network(tmp_path):
    def of(*names):
        return {name: torch.ones(1) for name in names}

    names = [f"projector.{n}.weight" for n in range(18)]
    few = of(*names, "fc.bias", "net.classifier.weight")
    assert refusal(few, tmp_path) == (
        "no trunk in it; it holds a head alone, 20 tensors: projector.0.weight, projector.1.weight,"
        " projector.2.weight and 17 more; give the file of the whole model"
    )
    for other in ("head.bias", "trunk.weight"):
        said = refusal(of(*names[: 20 - 1], "fc.bias", "linear.bias", other), tmp_path)
        assert said.startswith(
            "no trunk in it; it holds 21 tensors: projector.0.weight"
        )
        assert said.endswith(f"; {SAY_WHAT_IT_IS}")
    assert "it holds 2 tensors: " in refusal(of("fc.bias", "headless.bias"), tmp_path)
    assert refusal({"lr": 3}, tmp_path).startswith(
        "no trunk in it; it holds no tensors: save model.state_dict() where"
    )


@pytest.mark.parametrize(
    ("tree", "epochs"),
    [
        ({"state": {"epoch": 0}}, 1),
        ({"state": {"epoch": 99_998}}, 99_999),
        ({"state": {"epoch": 99_999}}, None),
        ({"state": {"epoch": -1}}, None),
        ({"state": {"epoch": True}}, None),
        ({"state": {"epoch": 3.0}}, None),
        ({"state": 3}, None),
        ({"epoch": 3}, None),
        ([], None),
    ],
)
def test_finished_epochs_are_counted_where_the_format_has_them(tree, epochs):
    known = form(epoch=("state.epoch", 1))
    contents = SimpleNamespace(form=known, tree=tree)
    assert assembling._epochs(contents) == epochs
    assert assembling._epochs(SimpleNamespace(form=None, tree=tree)) is None


# What stays behind


@pytest.mark.parametrize(
    ("table", "key", "purpose"),
    [
        ("optimizer.state.0", "queue", "optimiser"),
        ("lr_Schedulers", "x", "optimiser"),
        ("model", "module.Queue_ptr", "queue"),
        ("model", "predictor.proj.weight", "predictor"),
        ("model", "head.last_layer.weight", "prototypes"),
        ("model", "linear_head.weight", "classifier"),
        ("model", "neck.fc.weight", "projector"),
        ("model", "module.fc.weight", "classifier or projector"),
        ("model", "head.bias", "classifier or projector"),
        ("model", "blocks.3.attn.proj.weight", "another network"),
        ("model", "patch_embed.proj.weight", "another network"),
        ("model", "rpn.head.conv.0.0.weight", "detector"),
        ("model", "roi_heads.box_predictor.cls_score.bias", "detector"),
        ("model", "bn.weight", "projector"),
        ("model", "decoder.weight", "other"),
    ],
)
def test_the_purpose_of_what_stays_behind_is_guessed_by_its_name(table, key, purpose):
    assert leftovers._purpose(table, key) == purpose


def test_what_stays_behind_is_counted_by_purpose(tmp_path):
    tree = {
        "model": of_trunk(queue=torch.ones(2, 5), stem=torch.ones(3)),
        "ema": {"blur": torch.ones(4), "memory_bank": torch.ones(7)},
    }
    found = contents_of(tree, tmp_path)
    found.dropped = {"sgd": {"beta": torch.ones(6)}}
    found.trunks = [placed(table="model", keys=(*WHOLE, "n.num_batches_tracked"))]
    assert leftovers.leftovers(found) == [
        {"group": "other", "tensors": 3, "elements": 13, "example": "model: stem"},
        {"group": "queue", "tensors": 2, "elements": 17, "example": "model: queue"},
    ]
    trunk = found.trunks[0]
    found.encoders = {"key": [placed("k.")], "query": [placed(), trunk]}
    assert leftovers.left_behind(found, trunk) == [
        "the encoder key",
        "other: 3 (model: stem)",
        "queue: 2 (model: queue)",
    ]
