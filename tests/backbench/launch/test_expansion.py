"""Expansion of grids: which jobs, under which names, behind which others. Nothing runs here."""

import json
import re

import pytest
from support import fake_verbs

from backbench.errors import BadInput
from backbench.launch.expansion import Expansion, folder_name
from backbench.launch.grid import TABLE2, read_grid
from backbench.launch.job import command_kind
from backbench.recipes import config


def expand(lab, grid, **options):
    return Expansion(read_grid(grid), lab.root / "runs", where="grid", **options)


def jobs_of(lab, grid, **options):
    return expand(lab, grid, **options).jobs


def value_of(option, job):
    return job.argv[job.argv.index(option) + 1]


def test_all_is_nineteen_evaluations_of_each_checkpoint(lab):
    for percent in (1, 10):
        (lab.data / f"{percent}percent.txt").touch()
    content = {
        "checkpoints": [lab.checkpoints("a", "b")],
        "evaluate": ["all"],
        "lists": str(lab.data),
        "pack": 1,
    }
    assert len(jobs_of(lab, lab.grid(**content, again=0))) == 2 * 19
    jobs = jobs_of(lab, lab.grid(**content))
    again = [job for job in jobs if re.search(r"-s[12]-", job.name)]
    assert len(again) == 2 * 2 * 18, "two seeds of all but the kNN"
    assert len(jobs) == 2 * 19 + len(again)
    assert not [job for job in again if "knn" in job.name]
    datasets = set()
    for job in jobs:
        if job.verb == "linear":
            datasets.add(value_of("--datasets", job))
        if job.verb == "detect":
            # The checkpoint itself; what it is in Detectron2's names is the engine's affair.
            assert value_of("--checkpoint", job).endswith((".safetensors", ".pth"))
            assert "--resume" in job.argv
            assert not job.needs
    assert datasets == {*TABLE2, "imagenet"}


def test_boxes_of_ones_own_are_datasets_of_detect(lab):
    pattern = lab.checkpoints("a", "b")
    one = {"verb": "detect", "datasets": ["cells", "drones"], "seeds": [0, 1]}
    with_config = {**one, "config": "mask_rcnn_own", "seeds": 0}
    jobs = jobs_of(lab, lab.grid(checkpoints=[pattern], evaluate=[one, with_config]))
    assert len(jobs) == 2 * 2 * (2 + 1)
    configs = []
    for job in jobs:
        assert value_of("--dataset", job) in ("cells", "drones")
        if "--config-file" in job.argv:
            configs.append(value_of("--config-file", job))
    assert configs == ["mask_rcnn_own"] * 4, "else the verb finds the config itself"


def test_two_checkpoints_train_again_for_all_and_the_dry_run_says_so(lab, capsys):
    pattern = lab.checkpoints("a", "b", "c", "d")
    grid = lab.grid(checkpoints=[pattern], evaluate=["table4"])
    assert lab.run(grid, lab.cluster("local"), "runs", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "24 jobs, 0 skipped" in said
    assert "12 of them train the grid's first checkpoints again" in said
    jobs = jobs_of(lab, grid)
    seeds = [value_of("--seed", job) for job in jobs if "--seed" in job.argv]
    assert sorted(seeds) == ["1"] * 6 + ["2"] * 6
    assert len({job.argv for job in jobs}) == len(jobs) == 24
    one = lab.grid(checkpoints=[pattern.replace("*", "a")], evaluate=["table4"])
    assert len(jobs_of(lab, one)) == 3, "the seeds of one checkpoint tell too little"


def test_names_are_stable_and_each_cell_is_there_once(lab):
    pattern = lab.checkpoints("a", "b")
    folder = lab.root / "ck"
    (folder / "copy.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    evaluate = [
        *lab.linear("d1"),
        *lab.linear("d1", "d2"),
        *lab.linear("d1", seeds=[0, 1]),
    ]
    twice = [pattern, pattern, str(folder / "a.safetensors")]
    first = jobs_of(lab, lab.grid(checkpoints=twice, evaluate=evaluate))
    second = jobs_of(lab, lab.grid(checkpoints=[pattern], evaluate=evaluate))
    assert [job.name for job in first] == [job.name for job in second]
    cells = [cell for job in first for cell in job.cells]
    assert len(cells) == len(set(cells)) == 2 * 3


def test_what_a_checkpoint_is_told_goes_through_an_import(lab):
    """An own file needs none, unless something is said about it."""
    lab.checkpoints("a")
    path = str(lab.root / "ck" / "a.safetensors")
    for key, value in (("name", "A"), ("method", "jcl"), ("epochs", 800)):
        named = {"path": path, key: value}
        jobs = jobs_of(lab, lab.grid(checkpoints=[named], evaluate=lab.linear("d1")))
        assert [job.verb for job in jobs] == ["import", "linear"]
        assert jobs[0].argv[2:4] == (f"--{key}", str(value))


def test_a_name_of_timms_is_a_checkpoint_without_a_file(lab):
    told = {"path": "timm:test_vit@random", "name": "V"}
    grid = lab.grid(
        checkpoints=["timm:test_convnext@random", told], evaluate=lab.linear("digits")
    )
    jobs = jobs_of(lab, grid)
    (made,) = [job for job in jobs if job.verb == "import"]
    assert made.argv[1:4] == ("timm:test_vit@random", "--name", "V")
    words = {word for job in jobs if job.verb == "linear" for word in job.argv}
    assert "timm:test_convnext@random" in words
    assert str(lab.root / "runs" / made.makes) in words
    encoder = told | {"encoder": "x"}
    grid = lab.grid(checkpoints=[encoder], evaluate=lab.linear("digits"))
    with pytest.raises(BadInput, match="names one trunk; leave out encoder"):
        jobs_of(lab, grid)


def members(job):
    """The checkpoints of a job, which have names of one letter."""
    return [cell[0] for cell in job.cells]


def test_packs_share_a_pass_and_new_checkpoints_do_not_repack_old_ones(lab):
    pattern = lab.checkpoints("a", "b", "c")
    grid = lab.grid(checkpoints=[pattern], evaluate=lab.linear("d1", pack=2))
    # 1. Three checkpoints: a pack of two, and one alone
    pack, alone = jobs_of(lab, grid)
    assert members(pack) == ["a", "b"]
    assert members(alone) == ["c"]
    assert sum(word.endswith(".safetensors") for word in pack.argv) == 2
    # 2. Three more: the first two stay where they are
    claimed = {cell: job.name for job in (pack, alone) for cell in job.cells}
    lab.checkpoints("a", "b", "c", "d", "e", "f")
    expansion = expand(lab, grid, claimed=claimed)
    assert list(expansion.packed) == [pack.name]
    again = {job.name: members(job) for job in expansion.jobs}
    assert again.pop(alone.name) == ["c"]
    assert sorted(again.values()) == [["d", "e"], ["f"]]
    # 3. One of them was run by hand: it is in no pack
    cells = [cell for job in expansion.jobs for cell in job.cells]
    (by_hand,) = [cell for cell in cells if cell.startswith("e-")]
    (lab.root / "runs" / by_hand).mkdir(parents=True)
    packs = [members(job) for job in jobs_of(lab, grid, claimed=claimed)]
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
        return jobs_of(lab, lab.grid(recipes=list(recipes), **grid))

    simclr, lorac = pretrainings("demo_simclr", "demo_lorac")
    # 1. For the whole grid, but for one recipe that says otherwise
    slow_lorac = {"recipe": "demo_lorac", "fast": False}
    fast_simclr, other_lorac = pretrainings("demo_simclr", slow_lorac, fast=True)
    assert fast_simclr.name != simclr.name
    assert "--fast" in fast_simclr.argv
    assert command_kind(fast_simclr.argv) != command_kind(simclr.argv)
    assert other_lorac.name == lorac.name
    assert "--fast" not in other_lorac.argv
    assert command_kind(other_lorac.argv) == command_kind(lorac.argv)
    # 2. For one recipe alone
    entry = {"recipe": "demo_simclr", "fast": True}
    one, another = pretrainings(entry, "demo_lorac")
    assert one.name == fast_simclr.name
    assert another.name == lorac.name
    # 3. By hand wins, in the job's command as on a command line, and it is another run
    exact = {"recipe": "demo_simclr", "overrides": ["precision=fp32"], "fast": True}
    (by_hand,) = pretrainings(exact)
    assert "precision=fp32" in by_hand.argv
    assert "--fast" in by_hand.argv
    assert by_hand.name not in (fast_simclr.name, simclr.name)
    # 4. As an override of a grid that is not one's own; the dry run shows the command
    cluster = lab.cluster("local")
    grid = lab.grid(recipes=["demo_simclr"])
    command = "backbench pretrain demo_simclr --fast --data"
    assert lab.run(grid, cluster, "runs", "--dry-run", "fast=true") == 0
    assert command in capsys.readouterr().out
    assert lab.run(grid, cluster, "runs", "--dry-run") == 0
    assert command not in capsys.readouterr().out


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
    (pretraining,) = jobs_of(lab, lab.grid(recipes=["demo_random"]))
    known = lab.root / "runs" / pretraining.name
    unknown = lab.root / "elsewhere"
    for folder in (known, unknown):
        folder.mkdir(parents=True)
        about = {"verb": "pretrain", "identity": {}, "created": "then"}
        (folder / "run.json").write_text(json.dumps(about))
    named = [str(known), str(unknown)]
    grid = lab.grid(checkpoints=named, evaluate=lab.linear("d1"))
    claimed = {pretraining.name: pretraining.name}
    expansion = expand(lab, grid, claimed=claimed)
    assert expansion.waiting == [str(unknown)]
    (probe,) = expansion.jobs
    assert probe.needs == (pretraining.name,)
    (known / "backbone.safetensors").touch()
    (after,) = jobs_of(lab, grid, claimed=claimed)
    assert after.name == probe.name
    assert after.needs == ()


def test_points_of_a_sweep(lab):
    """Two batches with their epochs, two temperatures, two seeds of the grid; and their probes."""
    sizes = {
        "16": {"batch_size": 16, "epochs": 1},
        "32": {"batch_size": 32, "epochs": 2},
    }
    sweep = {
        "recipe": "demo_simclr",
        "vary": {"batch": sizes, "method.temperature": [0.1, 0.5]},
        "expected": ["paper:1:simclr:batch-{batch}-tau-{temperature}"],
    }
    grid = lab.grid(recipes=[sweep], evaluate=lab.linear("d1"), seeds=[0, 1])
    jobs = jobs_of(lab, grid)
    assert len({job.name for job in jobs}) == len(jobs) == 2 * 8
    found = set()
    for job in jobs:
        if job.verb == "linear":
            (need,) = job.needs
            assert str(lab.root / "runs" / need / "backbone.safetensors") in job.argv
            continue
        recipe = config.apply_overrides({}, job.argv[2 : job.argv.index("--data")])
        batch = recipe["batch_size"]
        temperature = recipe["method"]["temperature"]
        assert recipe["name"] == f"simclr-demo batch={batch} temperature={temperature}"
        assert recipe["epochs"] == batch // 16
        row = f"paper:1:simclr:batch-{batch}-tau-{temperature}"
        assert recipe["expected"] == [row]
        # The folder's name has the key that varies alone. What moves together has a name of ours,
        # which is not in it: the fingerprint tells the folders apart by all keys.
        assert "temperature-" in job.name
        assert "batch" not in job.name
        assert "=" not in job.name
        found.add((batch, temperature, recipe["seed"]))
    assert len(found) == 8


def test_an_evaluation_may_be_of_some_pretrainings_only(lab):
    recipes = [
        {"recipe": "demo_random", "overrides": [f"data.dataset={name}"]}
        for name in ("cifar10", "stl10", "imagenet")
    ]
    evaluate = lab.linear("d1", pretrained_on=["stl10", "imagenet"])
    evaluate += lab.linear("own", seeds=[3])
    jobs = jobs_of(lab, lab.grid(recipes=recipes, evaluate=evaluate))
    cifar, stl, imagenet, *probes = jobs
    found = [
        (job.needs, value_of("--datasets", job), value_of("--seed", job))
        for job in probes[2:]
    ]
    assert [job.needs for job in probes[:2]] == [(stl.name,), (imagenet.name,)]
    assert {value_of("--datasets", job) for job in probes[:2]} == {"d1"}
    assert found == [
        ((cifar.name,), "cifar10", "3"),
        ((stl.name,), "stl10", "3"),
        ((imagenet.name,), "imagenet", "3"),
    ]


def test_nobody_knows_what_a_foreign_file_was_pretrained_on(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("own"))
    with pytest.raises(BadInput) as refused:
        expand(lab, grid)
    file = lab.root / "ck" / "a.safetensors"
    assert str(refused.value) == (
        f"grid: nobody knows what {file} was pretrained on; name the dataset in place of 'own'"
    )
    # Where only some are measured, nobody needs to know
    some = lab.linear("own", pretrained_on=["cifar10"])
    assert (
        jobs_of(lab, lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=some)) == []
    )


def test_a_grid_says_where_its_data_are(lab):
    evaluate = lab.linear("d1")
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=evaluate, data=None)
    with pytest.raises(
        BadInput, match=r"^grid: no data folder; add `data: ROOT` to it or"
    ):
        expand(lab, grid)
    with pytest.raises(
        BadInput, match=rf"^grid: data folder {lab.root / 'x'} is not there;"
    ):
        expand(lab, grid, data=lab.root / "x")
    # Only the nodes may have them
    (job,) = expand(lab, grid, data=lab.root / "x", data_later=True).jobs
    assert str(lab.root / "x") in job.argv
    # The command line's wins
    (lab.root / "other").mkdir()
    for one in (grid, lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=evaluate)):
        (job,) = jobs_of(lab, one, data=lab.root / "other")
        assert value_of("--data", job) == str(lab.root / "other")


def test_a_jobs_kind_has_what_tells_it_from_others(lab):
    (lab.data / "1percent.txt").touch()
    evaluate = [
        {"verb": "detect", "config": "mask_rcnn_own", "engine": "torchvision"},
        {"verb": "detect", "datasets": ["cells"]},
        {"verb": "semisup", "percent": 1, "lists": str(lab.data)},
        {"verb": "analyze", "datasets": ["d1"]},
    ]
    jobs = jobs_of(lab, lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=evaluate))
    assert [job.like for job in jobs] == [
        "detect-mask_rcnn_own-torchvision",
        "detect-cells",
        "semisup-1",
        "analyze-d1",
    ]
    for job in jobs:
        (cell,) = job.cells
        assert cell == job.name
        assert job.name.split("/")[1].startswith(f"{job.like}-s0-")


def test_a_renamed_file_keeps_its_folders(lab):
    pattern = lab.checkpoints("a", "b")
    grid = lab.grid(checkpoints=[pattern], evaluate=lab.linear("d1"))
    before = jobs_of(lab, grid)
    file = lab.root / "ck" / "a.safetensors"
    renamed = file.rename(file.with_name("mine.safetensors"))
    claimed = {cell: job.name for job in before for cell in job.cells}
    after = jobs_of(lab, grid, claimed=claimed)
    assert {job.name for job in after} == {job.name for job in before}
    assert str(renamed) in {job.argv[1] for job in after}
    # Without records, the folders are known
    for job in before:
        (lab.root / "runs" / job.name).mkdir(parents=True)
    assert {job.name for job in jobs_of(lab, grid)} == {job.name for job in before}
    # Other weights under the old name are another checkpoint
    fake_verbs.write_checkpoint(file, "other")
    names = {job.name for job in jobs_of(lab, grid)}
    assert len(names - {job.name for job in before}) == 1


def test_two_lists_of_labels_of_one_dataset_are_two_jobs(lab):
    part = {"verb": "semisup", "percent": 10, "protocol": "semisup_own"}
    part["datasets"] = ["mine"]
    evaluate = [part]
    for name, line in (("a", "x.png"), ("b", "y.png"), ("again", "x.png")):
        (lab.root / name).mkdir()
        (lab.root / name / "10percent.txt").write_text(f"{line}\n")
        evaluate.append({**part, "lists": str(lab.root / name)})
    jobs = jobs_of(lab, lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=evaluate))
    drawn, *listed = jobs
    assert "--lists" not in drawn.argv
    folders = [str(lab.root / "a"), str(lab.root / "b")]
    assert [value_of("--lists", job) for job in listed] == folders
    assert {value_of("--dataset", job) for job in jobs} == {"mine"}


def test_names_are_made_of_letters_that_every_file_system_has():
    assert folder_name("a b/c:ü.+d-") == "a-b-c-ü.+d"
    assert folder_name("///") == "x"
    assert folder_name(".x.") == "x"
