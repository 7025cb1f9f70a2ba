"""Expansion of grids: which jobs, under which names, behind which others. Nothing runs here."""

import json
import re

import pytest

from backbench.errors import BadInput
from backbench.launch.expansion import Expansion
from backbench.launch.grid import TABLE2, read_grid
from backbench.launch.job import command_kind
from backbench.recipes import config


def jobs_of(lab, grid, **options):
    return Expansion(read_grid(grid), lab.root / "runs", where="grid", **options).jobs


def test_all_is_nineteen_evaluations_of_each_checkpoint(lab):
    for percent in (1, 10):
        (lab.data / f"{percent}percent.txt").touch()
    content = {
        "checkpoints": [lab.checkpoints("a", "b")],
        "evaluate": ["all"],
        "pack": 1,
    }
    content["lists"] = str(lab.data)
    assert len(jobs_of(lab, lab.grid(**content, again=0))) == 2 * 19
    jobs = jobs_of(lab, lab.grid(**content))
    again = [job for job in jobs if re.search(r"-s[12]-", job.name)]
    assert len(jobs) == 2 * 19 + len(again) and len(again) == 2 * 2 * 18, (
        "all but the kNN"
    )
    assert not [job for job in again if "knn" in job.name]
    datasets = [
        j.argv[j.argv.index("--datasets") + 1] for j in jobs if j.verb == "linear"
    ]
    assert sorted(set(datasets)) == sorted([*TABLE2, "imagenet"])
    for job in jobs:
        if job.verb == "detect":
            # The checkpoint itself; what it is in Detectron2's names is the engine's affair.
            file = job.argv[job.argv.index("--checkpoint") + 1]
            assert file.endswith((".safetensors", ".pth")) and "--resume" in job.argv
            assert not job.needs


def test_two_checkpoints_train_again_for_all_and_the_dry_run_says_so(lab, capsys):
    pattern = lab.checkpoints("a", "b", "c", "d")
    grid = lab.grid(checkpoints=[pattern], evaluate=["table4"])
    assert lab.run(grid, lab.cluster("local"), "runs", "--dry-run") == 0
    said = capsys.readouterr().out
    assert (
        "24 jobs, 0 skipped" in said
        and "12 of them train two checkpoints again" in said
    )
    jobs = jobs_of(lab, grid)
    seeds = [
        job.argv[job.argv.index("--seed") + 1] for job in jobs if "--seed" in job.argv
    ]
    assert sorted(seeds) == ["1"] * 6 + ["2"] * 6
    assert len({job.argv for job in jobs}) == len(jobs) == 24
    one = lab.grid(checkpoints=[pattern.replace("*", "a")], evaluate=["table4"])
    assert len(jobs_of(lab, one)) == 3, "the seeds of one checkpoint tell too little"


def test_names_are_stable_and_each_cell_is_there_once(lab):
    pattern, folder = lab.checkpoints("a", "b"), lab.root / "ck"
    (folder / "copy.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    evaluate = [
        *lab.linear("d1"),
        *lab.linear("d1", "d2"),
        *lab.linear("d1", seeds=[0, 1]),
    ]
    twice = [pattern, pattern, str(folder / "a.safetensors")]
    first = jobs_of(lab, lab.grid(checkpoints=twice, evaluate=evaluate))
    second = jobs_of(lab, lab.grid(checkpoints=[pattern], evaluate=evaluate))
    assert [j.name for j in first] == [j.name for j in second]
    cells = [c for j in first for c in j.cells]
    assert len(cells) == len(set(cells)) == 2 * 3


def test_what_a_checkpoint_is_told_goes_through_an_import(lab):
    """An own file needs none, unless something is said about it."""
    lab.checkpoints("a")
    path = str(lab.root / "ck" / "a.safetensors")
    for key, value in (("name", "A"), ("method", "jcl"), ("epochs", 800)):
        named = {"path": path, key: value}
        jobs = jobs_of(lab, lab.grid(checkpoints=[named], evaluate=lab.linear("d1")))
        assert [j.verb for j in jobs] == ["import", "linear"]
        assert jobs[0].argv[2:4] == (f"--{key}", str(value))


def test_a_name_of_timms_is_a_checkpoint_without_a_file(lab):
    told = {"path": "timm:test_vit@random", "name": "V"}
    grid = lab.grid(
        checkpoints=["timm:test_convnext@random", told], evaluate=lab.linear("digits")
    )
    plan = jobs_of(lab, grid)
    (made,) = [job for job in plan if job.argv[0] == "import"]
    assert made.argv[1:4] == ("timm:test_vit@random", "--name", "V")
    files = {word for job in plan if job.argv[0] == "linear" for word in job.argv[1:]}
    assert {"timm:test_convnext@random", str(lab.root / "runs" / made.makes)} <= files
    with pytest.raises(BadInput, match="names one trunk; leave out encoder"):
        jobs_of(
            lab,
            lab.grid(
                checkpoints=[told | {"encoder": "x"}], evaluate=lab.linear("digits")
            ),
        )


def test_packs_share_a_pass_and_new_checkpoints_do_not_repack_old_ones(lab):
    pattern = lab.checkpoints("a", "b", "c")
    grid = lab.grid(checkpoints=[pattern], evaluate=lab.linear("d1", pack=2))
    first = jobs_of(lab, grid)
    assert [len(j.cells) for j in first] == [2, 1]
    assert sum(arg.endswith(".safetensors") for arg in first[0].argv) == 2
    claimed = {cell: job.name for job in first for cell in job.cells}
    lab.checkpoints("a", "b", "c", "d", "e", "f")
    expansion = Expansion(
        read_grid(grid), lab.root / "runs", where="grid", claimed=claimed
    )
    assert list(expansion.packed) == [first[0].name]
    again = {j.name: [c[0] for c in j.cells] for j in expansion.jobs}
    assert again.pop(first[1].name) == ["c"]
    assert sorted(again.values()) == [["d", "e"], ["f"]]
    by_hand = next(
        cell for job in expansion.jobs for cell in job.cells if cell.startswith("e-")
    )
    (lab.root / "runs" / by_hand).mkdir(parents=True)
    packs = [[c[0] for c in job.cells] for job in jobs_of(lab, grid, claimed=claimed)]
    assert sorted(packs) == [["c"], ["d", "f"], ["e"]]


def test_probes_on_the_same_features_come_after_the_first(lab):
    evaluate = []
    for protocol in ("knn", "fewshot", "logreg", "lorac"):
        evaluate += lab.linear("d1", protocol=protocol)
    evaluate += lab.linear("d1", protocol="seg_knn", seeds=[0, 1])
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=evaluate)
    knn, fewshot, logreg, lorac, *dense = jobs_of(lab, grid)
    assert fewshot.after == (knn.name,), "same geometry"
    assert logreg.after == () and lorac.after == (), "other pixels; augmented"
    assert [job.after for job in dense] == [(), ()], (
        "maps and tokens, which no cache holds"
    )


def test_a_recipe_of_the_grid_may_name_a_file_as_its_probe(lab):
    file = lab.root / "mine.yaml"
    file.write_text("base: knn_demo\n")
    recipe = {"recipe": "demo_random", "overrides": [f"probe.d1={file}"]}
    grid = lab.grid(recipes=[recipe], evaluate=lab.linear("d1", protocol="own"))
    assert str(file) in jobs_of(lab, grid)[-1].argv


def test_a_grid_goes_the_fast_way_by_one_key(lab, capsys):
    def pretrainings(*recipes, **grid):
        jobs = jobs_of(lab, lab.grid(recipes=list(recipes), **grid))
        return {
            j.argv[1] + " ".join(w for w in j.argv if "precision" in w): j for j in jobs
        }

    plain = pretrainings("demo_simclr", "demo_lorac")
    quick = pretrainings(
        "demo_simclr", {"recipe": "demo_lorac", "fast": False}, fast=True
    )
    one = pretrainings({"recipe": "demo_simclr", "fast": True}, "demo_lorac")
    assert [quick[n].name == plain[n].name for n in plain] == [False, True]
    assert [quick[n].name == one[n].name for n in plain] == [True, True]
    kinds = [command_kind(quick[n].argv) == command_kind(plain[n].argv) for n in plain]
    assert kinds == [False, True], "their costs are told apart"
    assert (
        "--fast" in quick["demo_simclr"].argv
        and "--fast" not in quick["demo_lorac"].argv
    )
    # By hand wins, in the job's command as on a command line, and it is another run
    exact = {"recipe": "demo_simclr", "overrides": ["precision=fp32"], "fast": True}
    (by_hand,) = pretrainings(exact).values()
    assert "precision=fp32" in by_hand.argv and "--fast" in by_hand.argv
    assert by_hand.name not in (quick["demo_simclr"].name, plain["demo_simclr"].name)
    # As an override of a grid that is not one's own; the dry run shows the command
    cluster, grid = lab.cluster("local"), lab.grid(recipes=["demo_simclr"])
    for said in (["fast=true"], []):
        assert lab.run(grid, cluster, "runs", "--dry-run", *said) == 0
        shown = (
            "backbench pretrain demo_simclr --fast --data" in capsys.readouterr().out
        )
        assert shown == bool(said)


def test_a_grid_of_a_recipe_that_demands_a_precision_is_refused(lab, bad_input):
    exact = lab.root / "exact.yaml"
    exact.write_text(
        f"base: {config.find_recipe('demo_simclr', 'pretrain')}\nprecision: fp64\n"
    )
    grid = lab.grid(recipes=[str(exact)], fast=True)
    said = "the recipe demands precision fp64, and --fast computes in bf16"
    bad_input(lab.run(grid, lab.cluster("local"), "runs", "--dry-run"), said)


def test_running_pretraining_of_an_earlier_grid_is_waited_for(lab):
    """Its folder is in RUNS and on record: probes follow the job. An unknown one is only named."""
    pretraining = jobs_of(lab, lab.grid(recipes=["demo_random"]))[0]
    folders = [lab.root / "runs" / pretraining.name, lab.root / "elsewhere"]
    for folder in folders:
        folder.mkdir(parents=True)
        about = {"verb": "pretrain", "identity": {}, "created": "then"}
        (folder / "run.json").write_text(json.dumps(about))
    grid = lab.grid(checkpoints=[str(f) for f in folders], evaluate=lab.linear("d1"))
    claimed = {pretraining.name: pretraining.name}
    expansion = Expansion(
        read_grid(grid), lab.root / "runs", where="grid", claimed=claimed
    )
    assert expansion.waiting == [str(folders[1])]
    (probe,) = expansion.jobs
    assert probe.needs == (pretraining.name,)
    (folders[0] / "backbone.safetensors").touch()
    (after,) = Expansion(
        read_grid(grid), lab.root / "runs", where="grid", claimed=claimed
    ).jobs
    assert after.name == probe.name and after.needs == ()


def test_points_of_a_sweep(lab):
    sizes = {
        "16": {"batch_size": 16, "epochs": 1},
        "32": {"batch_size": 32, "epochs": 2},
    }
    vary = {"batch": sizes, "method.temperature": [0.1, 0.5]}
    expected = ["paper:1:simclr:batch-{batch}-tau-{temperature}"]
    sweep = {"recipe": "demo_simclr", "vary": vary, "expected": expected}
    grid = lab.grid(recipes=[sweep], evaluate=lab.linear("d1"), seeds=[0, 1])
    jobs = {job.name: job for job in jobs_of(lab, grid)}
    assert len(jobs) == 2 * 8, (
        "two batches, two temperatures, two seeds of the grid; their probes"
    )
    found = set()
    for job in jobs.values():
        if job.verb == "linear":
            (need,) = job.needs
            assert str(lab.root / "runs" / need / "backbone.safetensors") in job.argv
            continue
        recipe = config.apply_overrides({}, job.argv[2 : job.argv.index("--data")])
        label = f"batch={recipe['batch_size']} temperature={recipe['method']['temperature']}"
        assert recipe["name"] == f"simclr-demo {label}"
        assert recipe["epochs"] == recipe["batch_size"] // 16
        key = f"paper:1:simclr:{label}".replace("=", "-").replace(
            " temperature", "-tau"
        )
        assert recipe["expected"] == [key]
        # A name of ours for several keys is not in the folder's, which is told apart by all of them
        assert (
            "temperature-" in job.name
            and "batch" not in job.name
            and "=" not in job.name
        )
        found.add((label, recipe["seed"]))
    assert len(found) == 8
