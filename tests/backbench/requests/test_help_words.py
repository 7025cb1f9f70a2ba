"""Help calls a kind of value by one word, and a command that says little means what the pages say."""

from pathlib import Path

import pytest

from backbench.cli.verbs import VERBS
from backbench.requests import parsing
from backbench.requests.options import spellings

# A new word is put here with some thought: help has one for each kind of value
WORDS = {
    *("N", "R", "S", "X", "C", "F", "URL", "TIME", "KEY", "KEY VALUE", "k=v", "a.b=c"),
    *("ROOT", "RUN", "RUNS", "DIR", "FOLDER", "FILE", "FILE.csv|RUNS", "X.safetensors"),
    *("ZIP", "YAML", "GRID", "LIST", "RECIPE", "RULE", "RULES", "COLUMN", "ORG"),
    *("NAME", "NAME,...", "NAME,...|all", "NAME.TAG", "MODEL|TASK", "PAPER:TABLE"),
    *("timm:NAME[,k=v]", "DATASET[:SPLIT]", "[LAB=]RUNS", "ROW=ORG/REPO"),
    *("DATASET=ORG/NAME:TASK", "cluster.a=b", "slurm|local|debug"),
}


def test_values_have_words_of_a_small_vocabulary():
    used = set()
    for request in VERBS:
        for spelling in spellings(request):
            # A switch and a choice have no value of the user's
            if spelling.option.metavar is not None:
                assert not spelling.switch
                used.add(spelling.option.metavar)
    assert used == WORDS


RUN = ("--data", "ROOT", "--out", "RUN")


@pytest.mark.parametrize(
    ("words", "means"),
    [
        (
            ("linear", "X", "--datasets", "dtd", *RUN),
            {"protocol": "lorac", "seed": 0, "seeds": 1, "devices": 1, "nodes": 1}
            | {"accelerator": "auto", "workers": None, "datasets": "dtd"},
        ),
        (
            ("semisup", "X", "--percent", "10", *RUN),
            {"protocol": "semisup", "percent": 10},
        ),
        (
            ("finetune", "X", "--dataset", "dtd", *RUN),
            {"protocol": "finetune", "seed": 0},
        ),
        (
            ("analyze", "X", "--dataset", "dtd", *RUN),
            {"recipe": "analyze", "augmentations": None},
        ),
        (("ood", "X", "--datasets", "all", *RUN), {"protocol": "ood", "heads": None}),
        (
            ("detect", "--checkpoint", "X", *RUN),
            {"engine": "auto", "num_gpus": 1, "num_machines": 1, "machine_rank": 0}
            | {
                "dist_url": "",
                "resume": False,
                "eval_only": False,
                "seed": None,
                "seeds": 1,
            },
        ),
        (
            ("pretrain", "lorac", *RUN),
            {
                "recipe": "lorac",
                "budget": "",
                "fast": False,
                "images": None,
                "name": "",
            },
        ),
        (
            ("launch", "run", "GRID"),
            {"out": Path("runs"), "cluster": "local", "dry_run": False, "watch": False}
            | {"interval": 30.0, "data_later": False},
        ),
        (("launch", "status"), {"out": Path("runs"), "once": False, "json": False}),
        (("launch", "cancel"), {"out": Path("runs"), "cluster": None, "names": ()}),
        (
            ("reproduce",),
            {"list": None, "files": Path("checkpoints"), "out": Path("runs/reproduce")}
            | {
                "cluster": "local",
                "lists": Path("lists"),
                "download": False,
                "dry_run": False,
            },
        ),
        (("demo",), {"size": "full", "out": Path("runs/demo"), "chain": ()}),
        (("data", "list"), {"data": Path("data")}),
        (("data", "fetch-splits"), {"out": Path("lists")}),
        (("doctor",), {"data": Path("data")}),
    ],
)
def test_what_a_short_command_means(words, means):
    request = parsing.parse(list(words))
    assert {key: getattr(request, key) for key in means} == means


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("semisup", " (default: semisup); "),
        ("finetune", " (default: finetune); "),
        ("ood", " (default: ood); "),
        (
            "linear",
            ", or several NAME,NAME, or `own`: each checkpoint's own probe (def",
        ),
    ],
)
def test_help_says_what_a_protocol_may_be(verb, says):
    (request,) = (request for request in VERBS if request.verb == verb)
    (found,) = (s for s in spellings(request) if s.field.name == "protocol")
    assert found.option.help.startswith("a recipe's name or file" + says)
