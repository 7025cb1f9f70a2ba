"""Every printed number has a grid and a recipe that must reach it, or one word for why not."""

import json
import re
from pathlib import Path

import pytest
from support import records
from support.records import a_result, held

from backbench.cli.paper import number_states
from backbench.cli.program import main
from backbench.datasets import catalog
from backbench.published import catalogue, grid_recipes, judging_rules, published
from backbench.recipes import config, own_probe
from backbench.records import store
from backbench.tasks import TASKS

ROOT = Path(__file__).parents[3]
RECIPES = [name for name in config.recipe_names("pretrain") if "/" in name]
# Counts of six models on six sets, printed for another crop than timm's own
FASTERNETS = 6 * 6


def test_how_many_of_the_numbers_are_judgeable():
    """The tables print 692 scores and spreads of images; CLLR's print 30 on text, 36 on control with
    as many spreads, 16 spreads (Table 0.6) and 24 hours (Table 0.3)."""
    assert catalogue.coverage() == {
        None: 530,
        judging_rules.SPREAD: 44 + 16 + 36,
        judging_rules.IMAGELESS: 30 + 36,
        judging_rules.QUOTED: 37 + 26 + 5 + 18,
        judging_rules.HOURS: 24,
        judging_rules.UNBUILT: 24,
        judging_rules.UNIDENTIFIED: 8,
    }
    assert len(published.rows()) == 692 + 30 + 2 * 36 + 16 + 24


def test_quoted_follows_one_rule():
    """In Table 1, LORAC and JCL mark their own measurements of other methods with §."""
    own = {
        "lorac:1": {
            ("moco-v1", 83.1),
            ("moco-v2", 67.5),
            ("moco-v2", 88.0),
            ("moco-v2+", 72.2),
            ("swav", 72.7),
            ("swav", 91.5),
            ("swav", 72.3),
            ("swav", 91.1),
            ("moco-m", 72.5),
            ("moco-m", 91.3),
            ("lorac", 73.2),
            ("lorac", 91.6),
        },
        "jcl:1": {
            ("moco-v1", 60.6),
            ("moco-v1", 83.1),
            ("moco-v2", 67.6),
            ("moco-v2", 88.0),
            ("jcl", 68.7),
            ("jcl", 89.0),
        },
    }
    for prints, numbers in own.items():
        found = [n for n in catalogue.find(prints).numbers if not n.quoted]
        assert {(n.key.split(":")[2], n.value) for n in found} == numbers


# solo-learn's README at f25dc1f: (top-1, top-5) of its ResNet-18, by a linear classifier that is
# trained along, on ImageNet-100 also by one that is trained afterwards
SOLO_LEARN = {
    "cifar10": {
        "barlow-twins": [(92.10, 99.73)],
        "byol": [(92.58, 99.79)],
        "dino": [(89.52, 99.71)],
        "moco-v2": [(92.94, 99.79)],
        "ressl": [(90.63, 99.62)],
        "simclr": [(90.74, 99.75)],
        "simsiam": [(90.51, 99.72)],
        "swav": [(89.17, 99.68)],
        "vicreg": [(92.07, 99.74)],
        "w-mse": [(88.67, 99.68)],
    },
    "cifar100": {
        "barlow-twins": [(70.90, 91.91)],
        "byol": [(70.46, 91.96)],
        "dino": [(66.76, 90.34)],
        "moco-v2": [(69.89, 91.65)],
        "ressl": [(65.92, 89.73)],
        "simclr": [(65.78, 89.04)],
        "simsiam": [(66.04, 89.62)],
        "swav": [(64.88, 88.78)],
        "vicreg": [(68.54, 90.83)],
        "w-mse": [(61.33, 87.26)],
    },
    "imagenet100": {
        "barlow-twins": [(80.38, 95.28), (80.16, 95.14)],
        "byol": [(80.16, 95.02), (80.32, 94.94)],
        "dino": [(74.84, 92.92), (74.92, 92.78)],
        "moco-v2": [(78.20, 95.50), (79.28, 95.18)],
        "ressl": [(76.92, 94.20), (78.48, 94.24)],
        # July 2021 to February 2022; 77.64 and 94.06 afterwards
        "simclr": [(77.04, 94.02), (77.48, 93.42)],
        "simsiam": [(74.54, 93.16), (78.72, 94.78)],
        "swav": [(74.04, 92.70), (74.28, 92.84)],
        "vicreg": [(79.22, 95.06), (79.40, 95.02)],
        "w-mse": [(67.60, 90.94), (69.06, 91.22)],
    },
}


def test_arbs_baselines_with_the_digits_of_solo_learns_readme_are_quoted():
    """A pair of accuracies counts, whatever method the README has it of: ARB prints SimCLR's pair as
    SimSiam's. One accuracy alone may be equal by chance."""
    pairs = {}
    quoted = {}
    for number in catalogue.find("arb:1").numbers:
        row = (number.key.split(":")[2], number.dataset)
        pairs.setdefault((number.key, row), {})[number.metric] = number.value
        quoted.setdefault((number.key, row), set()).add(number.quoted)
    copies = set()
    for (key, row), pair in pairs.items():
        in_readme = [each for rows in SOLO_LEARN[row[1]].values() for each in rows]
        is_copy = (pair["top1"], pair["top5"]) in in_readme
        assert quoted[key, row] == {is_copy}, row
        if is_copy:
            copies.add(row)
    assert len(copies) == 13
    assert ("simsiam", "imagenet100") in copies
    assert not {method for method, _ in copies} & {"arb", "byol", "barlow-twins"}


def test_rows_that_lorac_and_jcl_both_print_say_so():
    """Of JCL's Table 2 four rows stand in LORAC's Table 4, and its own does not."""
    values = {}
    for prints in ("lorac:4", "jcl:2"):
        for number in catalogue.find(prints).numbers:
            row = values.setdefault(number.key.split(":")[2], {}).setdefault(prints, {})
            row[number.task, number.metric] = number.value
    for prints in ("lorac:4", "jcl:2"):
        noted = set()
        for number in catalogue.find(prints).numbers:
            if number.note.startswith("same value as "):
                noted.add((number.key.split(":")[2], number.task, number.metric))
        expected = set()
        for model, papers in values.items():
            if papers.get("lorac:4") == papers.get("jcl:2"):
                expected |= {(model, *column) for column in papers[prints]}
        assert noted == expected
        assert len(expected) == 36


# Mask R-CNN with R50-FPN, 1x: MoCo-v1's AP by facebookresearch/moco's issue 39; the supervised row
# by the COCO table of "Multi-Label Self-Supervised Learning with Scene Images"; the random row by the
# README of SoCo, where it stands above that supervised row
MASKS_OF_OTHERS = {
    "moco-v1": {35.1},
    "supervised": {35.4, 56.5, 38.1},
    "random": {28.5, 46.8, 30.4},
}


def test_masks_with_the_digits_of_other_papers_are_quoted():
    for prints in ("lorac:4", "jcl:2"):
        quoted = {}
        for number in catalogue.find(prints).numbers:
            if number.quoted:
                row = number.key.split(":")[2]
                quoted.setdefault(row, {})[number.task, number.metric] = number.value
        assert quoted.keys() == MASKS_OF_OTHERS.keys()
        for row, masks in quoted.items():
            names = ("segm_AP", "segm_AP50", "segm_AP75")
            assert masks.keys() == {("mask_rcnn", name) for name in names}
            assert set(masks.values()) >= MASKS_OF_OTHERS[row]


def test_arbs_table_3_is_placed_by_the_digits_of_its_second_row():
    def linear(key):
        found = [n for n in published.lookup(key) if n.task == "linear"]
        return {(n.dataset, n.metric): n.value for n in found}

    one = linear("arb:1:arb:resnet18:1000:projector-dim-256:cifar100")
    assert linear("arb:3:arb:resnet18:1000") == one
    for number in catalogue.find("arb:3").numbers:
        assert number.dataset == "cifar100"
        assert "dataset and dimension not printed" in number.note


CHOICES = ROOT / "docs" / "choices.md"


def method_of(recipe):
    """The method, or the one within it."""
    return recipe["method"].get("inner", recipe["method"])


def shuffles(recipe):
    method = method_of(recipe)
    with_keys = method.get("name") in ("moco", "moco_m", "lorac", "jcl", "co2")
    return with_keys and method.get("shuffle", True)


def has_groups(recipe):
    return method_of(recipe).get("name") in ("moco_m", "lorac", "jcl", "co2")


def on_host(recipe):
    """Whether the optimiser and the views are those of another paper's method."""
    return (
        recipe["data"]["dataset"] == "imagenet100"
        and method_of(recipe)["name"] != "simclr"
    )


# A choice -> which recipes of a printed table rest on it
RESTS_ON = {
    "LARS": lambda r: r["optim"]["name"] == "lars",
    "ShuffleBN": shuffles,
    "batch norm groups": has_groups,
    "ImageNet-100: classes": lambda r: r["data"]["dataset"] == "imagenet100",
    "LORAC: rows of Q": lambda r: r["method"]["name"] == "lorac",
    "LORAC: released loss": lambda r: r["method"]["name"] == "lorac",
    "LORAC: other priors": lambda r: (
        r["method"].get("prior") in ("gaussian", "margin", "batch")
    ),
    "MoCo-M: released pairs": lambda r: r["method"]["name"] == "moco_m",
    "JCL: lambda's ramp": lambda r: r["method"]["name"] == "jcl",
    "MIO: two variants": lambda r: r["method"]["name"] == "mio",
    "MIO: heads": lambda r: "mio" in str(r.get("probe")),
    "MIO Table 4: other methods": lambda r: (
        "mio" in str(r.get("probe")) and r["method"]["name"] != "mio"
    ),
    "ARB: `groups`": lambda r: r["method"]["name"] == "arb",
    "ARB: hidden width": lambda r: r["method"]["name"] == "arb",
    "ARB: which images make a base": lambda r: (
        r["method"]["name"] == "arb" and "imagenet" in r["data"]["dataset"]
    ),
    "ARB: views on CIFAR": lambda r: (
        r["method"]["name"] == "arb" and "cifar" in r["data"]["dataset"]
    ),
    "ARB: probe on CIFAR": lambda r: "arb_cifar" in str(r.get("probe")),
    "ARB: released commands": lambda r: r["method"]["name"] == "arb",
    "ARB: probe on ImageNet": lambda r: "imagenet_arb" in str(r.get("probe")),
    "Barlow Twins: over GPUs": lambda r: (
        r["method"]["name"] == "barlow_twins" and "imagenet" in r["data"]["dataset"]
    ),
    "stem of small images": lambda r: r.get("stem") in ("conv3", "conv3_p2"),
    "solo-learn: W-MSE": lambda r: r["method"]["name"] == "w_mse",
    "CLLR: probe": lambda r: "cllr" in str(r.get("probe")),
    "CLLR: batch norm": lambda r: (
        "cllr" in str(r.get("probe"))
        and method_of(r)["name"] in ("simclr", "cmc", "dcl", "hcl")
    ),
    "CLLR: images and views": lambda r: (
        "cllr" in str(r.get("probe")) and not on_host(r)
    ),
    "CLLR's hosts": lambda r: "cllr" in str(r.get("probe")) and on_host(r),
    "CLLR: start of L": lambda r: r["method"]["name"] == "cllr",
    "CLLR: alpha 10": lambda r: r["method"].get("alpha") == 10.0,
    "CLLR: lambda from 0.1 on": lambda r: (
        r["method"]["name"] == "cllr"
        and r["method"].get("weight", 0.1) >= 0.1
        and r["optim"]["lr"] == 0.005
    ),
    "CLLR: optimiser": lambda r: r["optim"]["lr"] == 0.005,
    "trunks trained here": lambda r: r["method"]["name"] == "supervised",
}


def test_every_choice_stands_at_the_tables_that_rest_on_it():
    general, of_papers = CHOICES.read_text().split("\n## Several papers\n")
    row = r"^- \*\*(.+?)\*\*: .+ \*Here\*: "
    everywhere = set(re.findall(row, general, re.MULTILINE))
    some = set(re.findall(row, of_papers, re.MULTILINE))
    named = {choice for item in catalogue.items() for choice in item.grid.choices}
    assert named - everywhere == some, "each names a row, and each row is named"
    assert RESTS_ON.keys() <= some
    for item in catalogue.items():
        if item.grid.name == "cllr_fig2":  # no probe is trained
            continue
        for sweep in grid_recipes.sweeps(item.grid):
            recipe = config.apply_overrides(
                grid_recipes.shipped(sweep.recipe), sweep.overrides
            )
            for choice, rests in RESTS_ON.items():
                if rests(recipe):
                    assert choice in item.grid.choices, (item.prints, choice)


def test_every_grid_of_a_table_covers_that_tables_own_rows():
    for item in catalogue.items():
        own = {n.key for n in item.numbers if judging_rules.reason(n) is None}
        assert own <= item.keys, item.prints
        assert not any("fig." in key for key in item.keys - own), item.prints
    without = {(n.paper, n.table) for n in catalogue.without_grid()}
    assert without == {("CLLR", "2"), ("CLLR", "4")}


@pytest.mark.parametrize("item", catalogue.items(), ids=lambda item: item.prints)
def test_what_is_expected_is_measured_by_the_grid(item):
    entries = [entry for entry in item.grid.evaluate if isinstance(entry, dict)]
    explicit = set()
    for entry in entries:
        if entry["verb"] == "linear":
            explicit |= {(entry["protocol"], name) for name in entry["datasets"]}
    whole = {entry for entry in item.grid.evaluate if isinstance(entry, str)}
    for sweep in grid_recipes.sweeps(item.grid):
        recipe = config.read_recipe(config.find_recipe(sweep.recipe, "pretrain"))
        recipe = config.apply_overrides(recipe, sweep.overrides)
        for point in sweep.points():
            for key in grid_recipes.expected_by(sweep, point):
                for number in published.lookup(key):
                    if number in item.numbers:
                        check_measured(number, recipe, explicit, whole)


def check_measured(number, recipe, explicit, whole):
    """Assert that a number of this recipe is measured by the protocol that scores it.

    `explicit` has the (protocol, dataset) of the grid's linear evaluations, `whole` the names of
    evaluations that stand for several.
    """
    if judging_rules.reason(number) is not None:
        return
    assert number.trained_on in (recipe["data"]["dataset"], None), number.key
    task = TASKS[number.task]
    if (task.detects or task.percent or number.table == "2") and number.paper != "ARB":
        assert whole & {"table2", "table3", "table4"}, number.key
    if task.kind not in ("sgd", "knn") or whole:
        return
    wanted = judging_rules.recipe(number)
    ways = set()
    for protocol, dataset in explicit:
        on = recipe["data"]["dataset"] if dataset == own_probe.OWN else dataset
        if on == number.dataset and protocol == own_probe.OWN:
            ways.add(own_probe.of_recipe(recipe, on))
        elif on == number.dataset:
            ways.add(protocol)
    assert wanted in ways, (number.key, number.dataset, ways)
    shipped = config.read_recipe(config.find_recipe(wanted, "transfer"))
    assert task.kind == shipped.get("kind"), wanted
    metrics = {*catalog.find(number.dataset).metrics, "train_top1"}
    assert judging_rules.as_measured(number).metric.removesuffix("_k5") in metrics


def test_every_expected_key_maps_to_a_protocol_that_ships():
    expected = 0
    allowed = (None, judging_rules.QUOTED, judging_rules.SPREAD)
    for recipe in map(grid_recipes.shipped, RECIPES):
        for key in recipe.get("expected") or ():
            for number in published.lookup(key):
                assert judging_rules.reason(number) in allowed
                assert judging_rules.column_of(number)
                expected += 1
        for dataset, protocol in (recipe.get("probe") or {}).items():
            assert config.find_recipe(protocol, "transfer")
            assert catalog.row(dataset) is not None
    assert expected > 400


def test_the_page_is_current():
    """Otherwise: backbench paper --markdown docs/papers.md"""
    records = ROOT / "docs" / "records"
    page = catalogue.markdown([records] if records.is_dir() else [])
    assert (ROOT / "docs" / "papers.md").read_text() == page


STL10 = ("mio:4:mio-a:resnet50:250:stl10", "linear-mio-stl10-v2")


def measure(runs, key, protocol, **changes):
    """A row of a checkpoint that answers for `key`."""
    row = {
        "name": "mine",
        "arch": "resnet50",
        "epochs": 250,
        "protocol": protocol,
        **changes,
    }
    provenance = {**held("linear", row["dataset"], protocol), "expected": [key]}
    store.append(runs / "probe", [a_result(**row, provenance=provenance)])


def test_errors_on_train_and_test_are_judged_as_accuracies(tmp_path):
    key = "cllr:0.6:cllr:resnet50:400:optimiser-adam"
    protocol = "linear-cllr-cifar-v1-lphi"
    same = {"dataset": "cifar10", "epochs": 400}
    measure(tmp_path, key, protocol, **same, value=92.8)
    measure(
        tmp_path, key, protocol, **same, metric="train_top1", split="train", value=90.0
    )
    _, judged = catalogue.measured([tmp_path])
    found = {}
    for one in number_states(catalogue.find("cllr:0.6"), [tmp_path], judged):
        if one.number.key == key:
            found[one.number.metric] = one.judged
    (test,) = found["test_error_top5"]
    (train,) = found["train_error_top5"]
    assert (test.published, test.verdict) == (92.8, "within")
    assert (train.published, train.verdict) == (97.6, "outside")


def test_one_table_says_what_is_measured_running_and_missing(tmp_path, capsys):
    runs = tmp_path / "runs"
    measure(runs, *STL10, dataset="stl10", value=58)
    (runs / "pretrain" / "b").mkdir(parents=True)
    begun = 'name: b\nexpected: ["mio:4:mio-b:resnet50:250:cifar10"]\n'
    (runs / "pretrain" / "b" / "recipe.yaml").write_text(begun)
    assert main(["paper", "mio:4", str(runs)]) == 0
    out = capsys.readouterr().out
    lines = {}
    for line in out.splitlines()[1:31]:
        row, what, *_ = line.split()
        lines[row, what] = line
    running = lines["mio:4:mio-b:resnet50:250", "linear/cifar10/top1"]
    assert running.endswith("84.55  running")
    missing = lines["mio:4:mio-c:resnet50:250", "linear/cifar10/top1"]
    assert missing.endswith("85.4  missing")
    measured = lines["mio:4:mio-a:resnet50:250", "linear/stl10/top1"]
    assert measured.endswith("58.1  measured  58.00 within (mine)")
    assert f"backbench launch run mio_table4 --data ROOT --out {runs}" in out
    assert main(["paper", "mio:44"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_what_the_released_code_trains_stands_beside_the_table(tmp_path, capsys):
    """It is found by its recipe, whatever the run is called, and gets no verdict."""
    assert main(["paper", "lorac:1"]) == 0
    out = capsys.readouterr().out
    for name in ("moco_m", "lorac"):
        recipe = f"lorac/{name}_imagenet_code"
        assert f"beside, judged by no number: {recipe}  not measured\n" in out
    row = {
        "name": "mine",
        "dataset": "imagenet",
        "protocol": "linear-lorac-imagenet-v1",
        "epochs": 200,
        "value": 73.0,
    }
    provenance = held("linear", "imagenet", row["protocol"])
    store.append(tmp_path / "probe", [a_result(**row, provenance=provenance)])
    about = {"recipe": {**grid_recipes.shipped("lorac/lorac_imagenet_code"), "seed": 3}}
    records.checkpoint_header(
        tmp_path / "x.safetensors", a_result().checkpoint, **about
    )
    assert main(["paper", "lorac:1", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    said = "lorac/lorac_imagenet_code  linear/imagenet/top1 73.00 (mine)\n"
    assert f"beside, judged by no number: {said}" in out
    assert "lorac/moco_m_imagenet_code  not measured\n" in out
    assert "33 numbers: 21 quoted, 12 missing" in out


@pytest.mark.parametrize(("item", "points"), [("jcl:fig.3", 2), ("arb:1", None)])
def test_a_figure_without_numbers_says_how_many_points_it_has(item, points, capsys):
    assert main(["paper", item]) == 0
    said = re.findall(
        r"^  no number is printed; (\d+) points$", capsys.readouterr().out, re.M
    )
    assert said == ([] if points is None else [str(points)])


APART = "530 judgeable (of them 108 on a lost L, 86 on a training that explodes)"


LOST = {
    "cllr:0.1": 20,
    "cllr:0.2": 20,
    "cllr:0.4": 12,
    "cllr:0.5": 8,
    "cllr:0.6": 16,
    "cllr:1": 16,
    "cllr:3": 16,
}
EXPLODING = {
    "cllr:0.1": 15,
    "cllr:0.2": 15,
    "cllr:0.4": 12,
    "cllr:0.5": 4,
    "cllr:0.6": 8,
    "cllr:1": 24,
    "cllr:3": 8,
}


@pytest.mark.parametrize(
    ("count", "expected", "words"),
    [
        ("on_lost_projection", LOST, "of them rest on a lost L: "),
        (
            "on_exploding_training",
            EXPLODING,
            "of them rest on a training that explodes ",
        ),
    ],
)
def test_numbers_of_cllr_are_counted_apart(capsys, count, expected, words):
    found = {item.prints: getattr(item, count) for item in catalogue.items()}
    assert {prints: number for prints, number in found.items() if number} == expected
    for name in ("cllr:1", "cllr:0.5", "cllr:0.3", "arb:1"):
        assert main(["paper", name]) == 0
        out = capsys.readouterr().out
        assert (words in out) == (name in expected)
        if name in expected:
            assert f"\n{expected[name]} {words}" in out


def test_a_lost_projection_is_of_penalties_and_an_explosion_of_rates():
    """Rows without a penalty lose no L; rows of lambda 0.01 and of Adam do not explode."""
    table = catalogue.find("cllr:1")

    def methods(keys):
        return {key.split(":")[2].split("-")[1] for key in keys}

    assert methods(table.lost) == {"l21", "nuclear"}
    assert methods(table.exploding) == {"alpha=0", "l21", "nuclear"}
    small = catalogue.find("cllr:0.1")
    assert any("lambda-0.01-" in key for key in small.lost)
    assert not any("lambda-0.01-" in key for key in small.exploding)
    optimisers = catalogue.find("cllr:0.6")
    assert any("adam" in key for key in optimisers.lost)
    assert not any("adam" in key for key in optimisers.exploding)


def test_measured_numbers_are_counted_from_records(tmp_path, capsys):
    docs = tmp_path / "docs"
    measure(docs / "records", *STL10, dataset="stl10", value=58)
    assert main(["paper", "all", str(docs / "records")]) == 0
    out = capsys.readouterr().out
    assert f"834 printed numbers: {APART}, 1 measured; 96 spread" in out
    (line,) = (x for x in out.splitlines() if "mio:4 " in x)
    assert "30 judgeable, 1 measured " in line
    papers = f"papers: 834 printed, {APART}, 1 measured"
    assert f"\n{papers}\n" in out
    of_timm = f"\ntimm: 9,336 printed, {9336 - FASTERNETS:,} judgeable, 0 measured\n"
    assert f"{of_timm}testbed: 28 printed" in out
    assert main(["paper"]) == 0
    assert f"{APART}, 0 measured" in capsys.readouterr().out


def test_the_page_counts_the_given_runs_or_the_records_beside_it(tmp_path):
    docs = tmp_path / "docs"
    measure(docs / "records", *STL10, dataset="stl10", value=58)
    (tmp_path / "other").mkdir()
    write = ["paper", "--markdown", str(docs / "papers.md")]
    for runs, count in (
        ([], 1),
        (["all", str(docs)], 1),
        (["all", str(tmp_path / "other")], 0),
    ):
        assert main([*write, *runs]) == 0
        page = (docs / "papers.md").read_text()
        assert "530 are judgeable" in page
        assert f"; {count} are measured" in page
        assert ("(30 judgeable, 1 measured)" in page) == count
        assert "Table 4, no grid (36 imageless, 36 spread)" in page
        assert f"| papers | 834 | {APART.replace(' judgeable', '')} |" in page
        assert "Fig. 3, no grid (text)" in page
    assert main([*write, "all", str(tmp_path / "x")]) == 2


def a_run(folder, recipe, metrics):
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "metrics.jsonl").write_text(metrics)


def test_time_and_memory_stand_beside_the_hosts(tmp_path, capsys):
    for name, speed in (
        ("time-simclr-cifar10", 30.0),
        ("time-cllr-simclr-nuclear-cifar10", 20.0),
    ):
        metrics = ""
        for step in (0, 1, 9):
            row = {"step": step, "images_per_s": speed + step, "memory_gib": 1.5}
            metrics += json.dumps(row) + "\n"
        recipe = f"name: {name} batch_size=512\nbatch_size: 512\n"
        a_run(tmp_path / name, recipe, metrics)
    for name, torn in (
        ("a", "name: [time-"),
        ("b", "name: time-simclr-cifar10 \n"),
        ("c", "x"),
    ):
        a_run(tmp_path / name, torn, '{"step": 0, "images_per_s": 1}\n')
    assert main(["paper", "cllr:0.3", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (host,) = (line for line in lines if "time-simclr-cifar10 " in line)
    assert "31.0 images/s    1.50 GiB" in host
    (with_cllr,) = (line for line in lines if "time-cllr-simclr-nuclear" in line)
    assert "21.0 images/s" in with_cllr
