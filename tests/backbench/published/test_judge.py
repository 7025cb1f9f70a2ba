"""The judge cannot be misled: another recipe, several seeds, unlike engines and lists."""

import dataclasses
import statistics

import pytest
from support.records import a_result, held

from backbench.board.board import collect
from backbench.cli.program import main
from backbench.pretrain.recipe import PretrainConfig
from backbench.published import printed_recipes, published
from backbench.published.judge import expected_keys, judge
from backbench.recipes import config, fast
from backbench.records import store


def whole(name, *overrides):
    """The recipe as a checkpoint holds it: with all defaults."""
    return config.to_dict(config.load(PretrainConfig, name, overrides, kind="pretrain"))


def trained(runs, recipe, value, *, name="mine", digest="a", **changes):
    """A row of a trunk that was pretrained by this recipe."""
    about = {
        "arch": recipe["arch"],
        "epochs": recipe["stop_after_epochs"] or recipe["epochs"],
    }
    row = {"name": name, "checkpoint": digest * 64, "value": value, **about, **changes}
    provenance = held(row.get("task", "linear"), row["dataset"], row["protocol"])
    provenance |= fast.of_trunk({"recipe": recipe})
    store.append(runs, [a_result(**row, provenance=provenance)])


LORAC = {"dataset": "cifar10", "protocol": "linear-lorac-v1"}  # printed: 91.8


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "within"),
        (
            ["seed=7", "name=x", "data.workers=1", "probe={}", "save_minutes=1"],
            "within",
        ),
        (["method.beta=2"], "changed: beta"),
        (["method.beta=2", "optim.lr=0.9"], "changed: beta, lr"),
        (
            ["batch_size=512", "data.dataset=imagenet100"],
            "changed: batch_size, dataset",
        ),
        (
            ["views.crops=[{count: 2, size: 192}]"],
            "changed: count, jitter, scale, size",
        ),
        (
            ["method.prior_from=0.25", "precision=bf16"],
            "changed: prior_from (precision=bf16)",
        ),
        (["optim.weight_decay=1e-4"], "changed: weight_decay"),  # back at the default
        (["stem=cifar"], "changed: stem"),
        (["epochs=100", "method.beta=2"], "another"),
        (["data.split=val", "seed=1"], "changed: split"),
    ],
)
def test_another_recipe_than_the_numbers_is_no_reproduction(
    tmp_path, capsys, overrides, said
):
    trained(tmp_path / "x", whole("lorac/lorac_imagenet", *overrides), 91.8, **LORAC)
    status = main(["leaderboard", str(tmp_path), "--check", "-q"])
    assert status == (said != "within")
    changed = "1 by a changed recipe" in capsys.readouterr().out
    assert changed == said.startswith("changed")
    assert main(["paper", "lorac:2", str(tmp_path)]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "(mine)" in x)
    assert line.startswith("  lorac:2:lorac:") and line.split("91.80 ")[1].startswith(
        f"{said} ("
    )


def test_another_method_is_named_alone(tmp_path, capsys):
    recipe = whole("lorac/moco_m_imagenet", 'expected=["lorac:2:lorac:resnet50:200"]')
    trained(tmp_path, recipe, 91.8, **LORAC)
    main(["paper", "lorac:2", str(tmp_path)])
    assert "91.80 changed: method (mine)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", [n for n in config.recipe_names("pretrain") if "/" in n]
)
def test_every_recipe_is_that_of_its_numbers_with_its_defaults_written_out(
    name, monkeypatch
):
    raw, full = printed_recipes.shipped(name), whole(name)
    assert printed_recipes.settings(raw) == printed_recipes.settings(full)
    assert printed_recipes.settings(config.flat(full)) == printed_recipes.settings(full)
    for key in full["expected"]:
        number = published.lookup(key)[0]
        assert key in printed_recipes._by_key(
            published.grid_name(number.paper, number.table)
        )
        assert printed_recipes.changes(full, key) == ()
    # Where several recipes reach a number, the nearest counts
    several = {
        key: [{"epochs": 0}, printed_recipes.settings(full)] for key in full["expected"]
    }
    monkeypatch.setattr(printed_recipes, "_by_key", lambda grid: several)
    other = {**full, "batch_size": full["batch_size"] + 1}
    assert all(
        printed_recipes.changes(other, key) == ("batch_size",)
        for key in full["expected"]
    )


@pytest.mark.parametrize("name", ["lorac/lorac_imagenet", "arb/simsiam_cifar10"])
def test_every_other_key_is_part_of_the_training(name):
    flat = config.flat(whole(name))
    free = {
        "name",
        "expected",
        "seed",
        "save_minutes",
        "log_every",
        "knn_every",
        "channels_last",
    }
    free |= {
        "compile",
        "data.workers",
        "data.skip_corrupt",
        "precision",
        "views.pipeline",
    }
    same = printed_recipes.settings(flat)
    for key in flat:
        changed = printed_recipes.settings({**flat, key: "another"}) != same
        assert changed == (key not in free and not key.startswith("probe")), key


def test_a_point_of_a_grid_is_its_own_number(tmp_path, capsys):
    change = ["method.alpha=10", "method.weight=5"]
    for digest, weight, said in (("a", "5", "within"), ("b", "0.1", "changed: weight")):
        key = f"cllr:0.1:cllr:resnet50:100:lambda-{weight}-alpha-10"
        value = published.lookup(key)[0].value
        keys = [*change, f'expected=["{key}"]', f"name={digest}"]
        recipe = whole("cllr/cllr_nuclear_stl10_256_100ep", *keys)
        protocol = "linear-cllr-stl10-v1-lphi"
        about = {
            "name": digest,
            "digest": digest,
            "dataset": "stl10",
            "protocol": protocol,
        }
        trained(tmp_path, recipe, value, **about)
        assert main(["paper", "cllr:0.1", str(tmp_path)]) == 0
        assert f"{value:.2f} {said} ({digest})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("middle", "said"), [(56.5, "within"), (60.5, "within"), (61.5, "outside")]
)
def test_seeds_are_one_verdict_on_their_mean(tmp_path, capsys, middle, said):
    """CLLR prints 56.5 +- 2.5 of five seeds: seeds three points off are no verdict each."""
    key = "cllr:1:cllr-alpha=0-512-d:resnet50:100:stl10"
    number, spread = (
        n.value for n in published.lookup(key) if n.metric.startswith("top1")
    )
    values = [middle + off for off in (-3.0, -1.5, 0.0, 1.5, 3.0)]
    for seed, value in enumerate(values):
        recipe = whole("cllr/cllr_alpha0_stl10_512_100ep", f"seed={seed}")
        protocol = "linear-cllr-stl10-v1-lphi"
        row = {"dataset": "stl10", "protocol": protocol, "digest": "abcde"[seed]}
        trained(tmp_path / str(seed), recipe, value, **row)
    assert main(["paper", "cllr:1", str(tmp_path)]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "(mine" in x)
    assert f"{statistics.mean(values):.2f} {said} (mine, 5 pretrainings)" in line
    words = [
        "leaderboard",
        str(tmp_path),
        "--check",
        "-q",
        "--markdown",
        str(tmp_path / "md"),
    ]
    assert main(words) == (said == "outside")
    assert "1 published numbers judged" in capsys.readouterr().out
    # t(4) 2.776 * s / sqrt(5), of the five values
    page = (tmp_path / "md" / "reproduction.md").read_text()
    assert f"| {middle - 2.94:.2f} to {middle + 2.94:.2f} |" in page
    # t(4) 2.776 * s * sqrt(1/5 + 1/5)
    assert abs(middle - number) <= 2.776 * spread * (2 / 5) ** 0.5 or said == "outside"


def test_what_is_no_seed_of_the_same_training_stands_alone(tmp_path, capsys):
    changed = whole("lorac/lorac_imagenet", "method.beta=2")
    for digest, recipe, value in (
        ("a", whole("lorac/lorac_imagenet"), 91.8),
        ("b", whole("lorac/lorac_imagenet", "seed=1"), 92.4),
        ("c", changed, 99.0),
        (
            "d",
            whole("lorac/lorac_imagenet", "precision=bf16", "views.pipeline=fast"),
            60.0,
        ),
    ):
        trained(tmp_path, recipe, value, digest=digest, name=digest, **LORAC)
    other = {"arch": "resnet18", "name": "g", "digest": "0", **LORAC}
    trained(tmp_path, whole("lorac/lorac_imagenet"), 70.0, **other)
    # Without recipes nobody knows that two trunks are two seeds
    for digest in "ef":
        row = {"checkpoint": digest * 64, "name": digest, "value": 80.0}
        row |= {"arch": "resnet50", "epochs": 200}
        provenance = {
            **held("linear", *LORAC.values()),
            "expected": ["lorac:2:lorac:resnet50:200"],
        }
        store.append(tmp_path, [a_result(**row, **LORAC, provenance=provenance)])
    assert main(["paper", "lorac:2", str(tmp_path)]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "(a, 2" in x)
    for said in (
        "92.10 within (a, 2 pretrainings)",
        "99.00 changed: beta (c)",
        "70.00 another (g)",
        "60.00 outside (fast) (d)",
        "80.00 outside (e)",
        "80.00 outside (f)",
    ):
        assert said in line


def test_engines_are_columns_apart(tmp_path, capsys):
    recipe = whole("lorac/lorac_imagenet")
    (number,) = (
        n
        for n in published.lookup("lorac:4:lorac:resnet50:200")
        if (n.task, n.metric) == ("mask_rcnn", "segm_AP")
    )
    detected = {
        "task": "mask_rcnn",
        "dataset": "coco2017",
        "metric": "segm_AP",
        "split": "val",
        "protocol": "detection-1x-v1",
    }
    trained(
        tmp_path,
        recipe,
        number.value,
        digest="a",
        name="tv",
        engine="torchvision",
        **detected,
    )
    assert main(["paper", "lorac:4", str(tmp_path)]) == 0
    assert "(tv)" not in capsys.readouterr().out
    trained(
        tmp_path,
        recipe,
        number.value,
        digest="a",
        name="d2",
        engine="detectron2",
        **detected,
    )
    assert main(["paper", "lorac:4", str(tmp_path)]) == 0
    assert f"{number.value:.2f} within (" in capsys.readouterr().out


def test_the_page_names_the_changed_keys(tmp_path):
    trained(tmp_path, whole("lorac/lorac_imagenet", "method.beta=2"), 91.8, **LORAC)
    board = collect([tmp_path])
    (one,) = judge(board, expected_keys(board, [tmp_path]))
    assert one.on_page()["said"] == "changed: beta" and one.on_page()["others"] == ()
    unknown = dataclasses.replace(one, changed=(), by_recipe=False)
    assert unknown.on_page()["others"] == ("its pretraining recipe is not known",)
