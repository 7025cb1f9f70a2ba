"""`pretrain --fast`: nothing but four keys of the recipe, which the run's own recipe then says."""

import json
import signal

import pytest
from support import tiny_pretraining
from support.tiny_pretraining import refused

from backbench.cli import program
from backbench.errors import EXIT_PREEMPTED
from backbench.pretrain import train
from backbench.pretrain.recipe import PretrainConfig, check, overrides_of
from backbench.recipes import config, fast
from backbench.requests import parsing
from backbench.runs.folder import CHECKPOINT_FILE, RECIPE_FILE
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk

# 32 px: torch's bf16 convolution on a CPU can leave its gradient unset behind a 1 x 1 map
VIEWS = tiny_pretraining.crops(32) | {"pipeline": "reference"}
TINY = tiny_pretraining.recipe(views=VIEWS, epochs=1)


def arguments(*words):
    return parsing.parse(["pretrain", *words, "--data", ".", "--out", "x"])


def flat(value, key=""):
    if not isinstance(value, dict):
        return {key: value}
    out = {}
    for name, inner in value.items():
        out |= flat(inner, f"{key}.{name}".lstrip("."))
    return out


def recipe_of(*words):
    args = arguments(*words)
    check(args)
    recipe = config.load(
        PretrainConfig, args.recipe, overrides_of(args), kind="pretrain"
    )
    return flat(config.to_dict(recipe))


@pytest.mark.parametrize(
    "name", ["lorac/lorac_imagenet", "cllr/cllr_nuclear_imagenet100_512"]
)
def test_the_switch_sets_four_keys_and_no_other(name):
    letter = recipe_of(name)
    quick = recipe_of(name, "--fast")
    assert {key: quick[key] for key in fast.KEYS} == {
        "views.pipeline": "fast",
        "precision": "bf16",
        "compile": "cuda",
        "channels_last": True,
    }
    changed = {key for key in letter if letter[key] != quick[key]}
    # The layout is every recipe's
    assert changed == {"views.pipeline", "precision", "compile"}
    assert letter.keys() == quick.keys()


@pytest.mark.parametrize(
    ("by_hand", "key", "value"),
    [
        ("precision=fp32", "precision", "fp32"),
        ("views={pipeline: reference}", "views.pipeline", "reference"),
        ("compile=false", "compile", False),
    ],
)
def test_what_is_given_by_hand_wins(by_hand, key, value):
    both = recipe_of("demo_simclr", by_hand, "--fast")
    assert {k: both[k] for k in fast.KEYS} == {**fast.KEYS, key: value}


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (("--fast",), {"cuda"}),
        (("compile=true",), {"cuda", "cpu"}),
        (("compile=false", "--fast"), set()),
        ((), set()),
    ],
)
def test_the_devices_that_a_recipe_compiles_on(words, devices):
    args = arguments("demo_simclr", *words)
    recipe = config.load(
        PretrainConfig, args.recipe, overrides_of(args), kind="pretrain"
    )
    assert {
        device for device in ("cuda", "cpu") if recipe.compiles_on(device)
    } == devices


@pytest.fixture
def pretrain(shapes, capsys, caplog):
    """pretrain(recipe, out, *words) -> (exit status, what it said)."""
    root = shapes()

    def run(recipe, out, *words):
        caplog.clear()
        command = [
            "pretrain",
            str(recipe),
            *words,
            "--data",
            str(root),
            "--out",
            str(out),
        ]
        status = program.main(command)
        return status, capsys.readouterr().err + caplog.text

    return run


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16"])
def test_a_recipe_that_demands_a_precision_is_refused(pretrain, tmp_path, precision):
    recipe = tmp_path / "exact.yaml"
    recipe.write_text(json.dumps(json.loads(TINY) | {"precision": precision}))
    parts = (f"demands precision {precision}", "leave --fast out", str(recipe))
    said = refused(pretrain(recipe, tmp_path / "run", "--fast"), *parts)
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
    both = recipe_of(str(recipe), f"precision={precision}", "--fast")
    assert (both["precision"], both["views.pipeline"]) == (precision, "fast")
    assert fast.word(fast.of_trunk({"recipe": {"precision": precision}})) != fast.WORD


def test_a_run_goes_on_only_as_it_began(pretrain, kill_at_step, tmp_path, monkeypatch):
    # Pictures of curves of one epoch take longer than it
    monkeypatch.setattr(train.monitor, "plot_curves", lambda *_: None)
    # `compile: cuda` compiles on no CPU
    monkeypatch.setattr(Trunk, "compile", lambda trunk: pytest.fail("compiled"))
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY)
    out = tmp_path / "fast"
    letter = tmp_path / "letter"
    # 1. Both are stopped in the middle, and the other way is another run
    kill_at_step(1, signal.SIGTERM)
    assert pretrain(recipe, out, "--fast")[0] == EXIT_PREEMPTED
    kill_at_step(1, signal.SIGTERM)
    assert pretrain(recipe, letter)[0] == EXIT_PREEMPTED
    parts = ("holds another run's state", "recipe.compile (False there, cuda now)")
    refused(pretrain(recipe, letter, "--fast"), *parts)
    parts = ("recipe.compile (cuda there, False now)", "with its own recipe")
    refused(pretrain(recipe, out), *parts)
    # 2. The run's own recipe says the keys, so it continues without the switch, or with it
    own = out / RECIPE_FILE
    saved = flat(config.read_yaml(own))
    assert {key: saved[key] for key in fast.KEYS} == fast.KEYS
    assert pretrain(own, out, "--workers", "0")[0] == 0
    assert "already finished" in pretrain(own, out, "--fast")[1]
    assert "already finished" in pretrain(recipe, out, "--fast")[1]
    # 3. So does the checkpoint, and whatever measures it takes them from there
    provenance = Checkpoint.load(out / CHECKPOINT_FILE).provenance
    assert fast.of_trunk(provenance)["pretraining"].items() >= fast.KEYS.items()
    assert fast.word(fast.of_trunk(provenance)) == "fast"


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        (
            {"views": {"pipeline": "fast"}, "precision": "bf16", "compile": "cuda"},
            "fast",
        ),
        (
            {"views": {"pipeline": "reference"}, "precision": "fp32", "compile": True},
            "",
        ),
        ({"views": {"pipeline": "reference"}, "precision": "bf16"}, "precision=bf16"),
        ({"views": {"pipeline": "fast"}, "precision": "fp32"}, "views.pipeline=fast"),
        ({"views": ["<script>"], "precision": "<script>"}, ""),
        ("<script>", ""),
    ],
)
def test_the_word_beside_a_verdict(recipe, word):
    # As a row holds it
    kept = json.loads(json.dumps(fast.of_trunk({"recipe": recipe})))
    assert fast.word(kept) == word
    assert fast.word({"pretraining": recipe}) == "" or isinstance(recipe, dict)
