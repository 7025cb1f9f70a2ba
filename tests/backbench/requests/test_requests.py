"""A request and its words are two spellings of one thing."""

import dataclasses
import math
import random
from pathlib import Path

import pytest

from backbench.cli import verbs
from backbench.cli.program import main
from backbench.errors import BadInput
from backbench.requests.every import REQUESTS
from backbench.requests.options import spellings
from backbench.requests.parsing import invocation, parse
from backbench.requests.probe import LinearRequest

DRAWS = 30
WORDS = ("x", "a/b.pth", "two words", "-1", "k", "timm:vit", "ünder", "0")


def drawn(spelling, draw):
    """A value of the field's type that is not its default, as far as there is one."""
    if spelling.switch:
        return True
    if spelling.many:
        count = draw.randint(1, 3)
        return tuple(drawn_word(spelling, draw) for _ in range(count))
    return drawn_word(spelling, draw)


def drawn_word(spelling, draw):
    if spelling.choices is not None:
        return draw.choice(spelling.choices)
    if spelling.word in (int, float):
        option = spelling.option
        least = -5 if option.least is None else math.ceil(option.least)
        most = 10**6 if option.most is None else math.floor(option.most)
        return spelling.word(draw.randint(least, most))
    word = draw.choice(WORDS)
    if spelling.option.several == "loose":
        return f"k={word}"
    if spelling.flag is None or spelling.many:
        word = word.lstrip("-")  # a word of its own that begins with - is an option
    if spelling.field.name == "overrides":
        return f"a.b={word}"
    return spelling.word(word)


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda r: r.verb)
def test_argv_and_parse_are_inverse(request_type):
    draw = random.Random(request_type.verb)
    for _ in range(DRAWS):
        values = {}
        for spelling in spellings(request_type):
            if spelling.required or draw.random() < 0.5:
                values[spelling.field.name] = drawn(spelling, draw)
        # A word without a flag fills the first such field: a later one needs those before it
        bare = [s for s in spellings(request_type) if s.flag is None]
        bare = [s for s in bare if s.option.several not in ("rest", "loose")]
        given = [s for s in bare if s.field.name in values]
        for spelling in bare[: bare.index(given[-1]) if given else 0]:
            values.setdefault(spelling.field.name, drawn(spelling, draw))
        request = request_type(**values)
        assert parse(request.argv()) == request, request.argv()


def test_every_field_is_an_option():
    for request_type in REQUESTS:
        names = {spelling.field.name for spelling in spellings(request_type)}
        assert names == {field.name for field in dataclasses.fields(request_type)}


def test_help_names_the_value_and_then_says_what_it_is():
    """A place for a value is no sentence, and what is said of an option is more than a name."""
    for request_type in REQUESTS:
        for spelling in spellings(request_type):
            option = spelling.option
            if option.metavar is not None and not option.hidden:
                where = (request_type.verb, spelling.field.name)
                assert len(option.metavar.split()) <= 2, where
                assert not option.help.isupper(), where


NUMBERS = []
for each in REQUESTS:
    for found in spellings(each):
        if found.word in (int, float) and found.choices is None and not found.many:
            NUMBERS.append(pytest.param(each, found, id=f"{each.verb} {found.flag}"))


@pytest.mark.parametrize(("request_type", "spelling"), NUMBERS)
def test_a_number_beyond_its_bounds_is_refused_in_one_line(
    request_type, spelling, capsys
):
    required = {s.field.name: "1" for s in spellings(request_type) if s.required}
    option = spelling.option
    words = request_type(**required).argv()
    for number in (10**20, -(10**20), option.most + 1, option.least - 1):
        assert main([*words, f"{spelling.flag}={number}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"backbench: {spelling.flag} {spelling.word(number)}"[:40]
        )
        assert f"from {option.least} to {option.most}" in said
        assert said.count("\n") == 1


def test_a_number_beyond_its_bounds_is_refused_from_python(tmp_path):
    words = {"checkpoints": (), "datasets": "x", "data": tmp_path, "out": tmp_path}
    with pytest.raises(BadInput, match="--seed 9223372036854775808: from"):
        LinearRequest(**words, seed=2**63)


def test_all_seeds_are_looked_at_before_the_first_one_trains(tmp_path):
    last = LinearRequest(
        checkpoints=(),
        datasets="x",
        data=tmp_path,
        out=tmp_path,
        seed=2**63 - 1,
        seeds=2,
    )
    with pytest.raises(BadInput, match="--seed 9223372036854775808"):
        next(verbs.each_seed(last))


def test_every_request_is_done_by_a_verb():
    assert set(verbs.VERBS) == set(REQUESTS)


def test_changes_stand_anywhere():
    """k=5 behind the protocol, and a checkpoint behind that."""
    line = "linear --protocol knn k=5,20 x.pth --datasets digits --data d --out o"
    request = parse([*line.split(), "temperature=0.1"])
    assert isinstance(request, LinearRequest)
    assert request.checkpoints == (Path("x.pth"),)
    assert request.overrides == ("k=5,20", "temperature=0.1")


def test_each_seed_has_a_folder_of_its_own():
    line = "linear x.pth --datasets d --data d --out o --seed 4 --seeds 3"
    seeds = list(verbs.each_seed(parse(line.split())))
    assert [one.seed for one in seeds] == [4, 5, 6]
    assert [one.out for one in seeds] == [Path("o/s4"), Path("o/s5"), Path("o/s6")]


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_words_that_may_be_left_out_are_not_asked_for(capsys):
    said = refusal(capsys, "pretrain")
    assert "arguments are required: RECIPE, --out;" in said


def test_words_that_a_verb_does_not_know_are_named(capsys):
    line = ("linear", "x.pth", "--datasets", "d", "--data", "r", "--out", "o")
    see = "; see backbench linear --help\n"
    said = refusal(capsys, *line, "k=5", "--k", "5")
    key = "--k is a key here: k=VALUE"
    assert said == f"backbench linear: unrecognized arguments: k=5 --k 5; {key}{see}"
    # A change is key=value, all of them
    said = refusal(capsys, *line, "y", "k=5", "z")
    assert said == f"backbench linear: unrecognized arguments: y k=5 z{see}"
    place = ("--dataset", "d", "--data", "r", "--out", "o")
    said = refusal(capsys, "finetune", "x.pth", "y.pth", *place)
    assert "arguments: y.pth (`backbench finetune` takes one checkpoint; give" in said
    said = refusal(capsys, "finetune", "x.pth", *place, "--pace", "y.pth")
    assert "takes one checkpoint" not in said
    said = refusal(capsys, "rank", "x.csv", "y.csv")
    assert said == (
        "backbench rank: unrecognized arguments: y.csv; see backbench rank --help\n"
    )
    said = refusal(capsys, "linear", "--protocol", "knn", "k=5", *line[2:])
    assert said == (
        f"backbench linear: k=5 is no checkpoint; name one before --protocol{see}"
    )
    said = refusal(capsys, "linear", "x.pth", "--data", "r", "--out", "o")
    assert said == (
        "backbench linear: the following arguments are required: --datasets;"
        " see backbench linear --help\n"
    )


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("evaluate x --data d --output o", "--output is --out here"),
        ("evaluate x --data d --out o --device cuda", "--device is --accelerator here"),
        ("evaluate x --data d --out o --gpu", "--gpu is --accelerator cuda here"),
        ("evaluate x --data d --out o --num_workers=4", "--num_workers is --workers"),
        ("evaluate x --data d --out o -j 4", "-j is --workers here"),
        ("evaluate x --data d --out o --Seed 1", "--Seed: did you mean --seed?"),
        (
            "evaluate --checkpoint x --data d --out o",
            "a MODEL stands without --checkpoint before it",
        ),
        (
            "evaluate x --data d --out o --batch-size 64",
            "`backbench linear MODEL --protocol NAME batch_size=VALUE`",
        ),
        ("linear x --datasets d --data r --out o --lr=0.1", "a key here: lr=0.1"),
        (
            "linear x --dataset d --data r --out o",
            "--dataset: did you mean --datasets?",
        ),
        ("finetune x --datasets d --data r --out o", "did you mean --dataset?"),
        ("data check d --root r", "--root is --data here"),
    ],
)
def test_another_programs_option_is_told_by_its_name_here(capsys, line, hint):
    said = refusal(capsys, *line.split())
    assert hint in said and len(said.splitlines()) == 1
    assert said.startswith(f"backbench {line.split()[0]}")
    assert said.endswith(" --help\n")


def test_nothing_is_guessed_for_an_option_that_is_near_to_none(capsys):
    said = refusal(capsys, "leaderboard", "runs", "--model", "x", "--seed=-1")
    assert said == (
        "backbench leaderboard: unrecognized arguments: --model x --seed=-1;"
        " see backbench leaderboard --help\n"
    )
    # The value of an option is none
    said = refusal(capsys, "evaluate", "x", "--data", "d", "--seed", "-1")
    assert said == (
        "backbench evaluate: the following arguments are required: --out;"
        " see backbench evaluate --help\n"
    )


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("knn", "it is a task: `backbench evaluate MODEL knn --data FOLDER"),
        ("logreg", "it is a task: `backbench evaluate MODEL logreg --data FOLDER"),
        ("convert", "did you mean `backbench import` or `backbench export`?"),
        ("Evaluate", "did you mean `backbench evaluate`?"),
        ("lienar", "did you mean `backbench linear`?"),
        ("xyzzy", "invalid choice: 'xyzzy' (choose from 'demo', "),
    ],
)
def test_a_word_that_is_no_verb_is_told_what_it_is(capsys, word, hint):
    said = refusal(capsys, word, "x.pth")
    assert hint in said and len(said.splitlines()) == 1


def test_a_file_may_be_called_like_a_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("k=5").write_text("")
    line = "linear k=5 k=7 A=1 --datasets d --data d --out o"
    request = parse(line.split())
    assert request.checkpoints == (Path("k=5"), Path("A=1"))
    assert request.overrides == ("k=7",)


def test_what_is_told_is_asked_for_before_the_verb_or_behind_it():
    words = ["rank", "x.csv"]
    plain = invocation(words)
    assert (plain.verbosity, plain.debug) == (0, False)
    for line in (["-v", "-v", *words], [*words, "-v", "-v"]):
        assert invocation(line).verbosity == 2
    for line in (["-q", "--debug", *words], [*words, "-q", "--debug"]):
        assert (invocation(line).verbosity, invocation(line).debug) == (-1, True)
    # Quiet is the last word
    assert invocation(["-q", *words, "-v"]).verbosity == -1


def test_a_negative_value_is_written_with_its_flag_and_defaults_are_left_out():
    line = [
        "linear",
        "x.pth",
        "--datasets",
        "d",
        "--data",
        "r",
        "--out",
        "o",
        "--seed=-1",
    ]
    request = parse(line)
    assert set(request.argv()) == set(line) and len(request.argv()) == len(line)
    ranked = parse(["rank", "x.csv", "--lower", "a", "--lower", "b"])
    assert ranked.argv() == ("rank", "x.csv", "--lower=a", "--lower=b")
