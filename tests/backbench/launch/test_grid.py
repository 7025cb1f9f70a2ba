"""Expansion of grids: which jobs, under which names, behind which others. Nothing runs here."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import pytest

from backbench import config
from backbench.errors import BadInput
from backbench.launch.attempt import Store
from backbench.launch.grid import TABLE2, Grid, Job, evaluations, expand, read_grid
from backbench.launch.verb import ROWS, Resources, _eta, arrays, estimates, read_cluster


def jobs_of(lab, grid, **options):
    return expand(read_grid(grid), lab.root / "runs", where="grid", **options).jobs


def test_all_is_nineteen_evaluations_of_each_checkpoint(lab):
    for percent in (1, 10):
        (lab.data / f"{percent}percent.txt").touch()
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=["all"], lists=str(lab.data), pack=1
    )
    jobs = jobs_of(lab, grid)
    measured = [j for j in jobs if j.verb != "export"]
    assert len(measured) == 2 * 19 and len(jobs) == 2 * 20
    datasets = [j.argv[j.argv.index("--datasets") + 1] for j in measured if j.verb == "linear"]
    assert sorted(set(datasets)) == sorted([*TABLE2, "imagenet"])
    converted = {j.name: j for j in jobs if j.verb == "export"}
    for job in measured:
        if job.verb == "detect":
            (need,) = job.needs
            assert (
                str(lab.root / "runs" / converted[need].makes) in job.argv
                and "--resume" in job.argv
            )


def test_names_are_stable_and_each_cell_is_there_once(lab):
    pattern = lab.checkpoints("a", "b")
    evaluate = [*lab.linear("d1"), *lab.linear("d1", "d2"), *lab.linear("d1", seeds=[0, 1])]
    first = jobs_of(
        lab,
        lab.grid(
            checkpoints=[pattern, pattern, str(lab.root / "ck" / "a.safetensors")],
            evaluate=evaluate,
        ),
    )
    second = jobs_of(lab, lab.grid(checkpoints=[pattern], evaluate=evaluate))
    assert [j.name for j in first] == [j.name for j in second]
    cells = [c for j in first for c in j.cells]
    assert len(cells) == len(set(cells)) == 2 * 3


def test_same_weights_in_two_files_are_one_checkpoint(lab):
    lab.checkpoints("a")
    (lab.root / "ck" / "copy.safetensors").write_bytes(
        (lab.root / "ck" / "a.safetensors").read_bytes()
    )
    assert (
        len(
            jobs_of(
                lab, lab.grid(checkpoints=[str(lab.root / "ck" / "*")], evaluate=lab.linear("d1"))
            )
        )
        == 1
    )


def test_what_a_checkpoint_is_told_goes_through_an_import(lab):
    """An own file needs none, unless something is said about it."""
    lab.checkpoints("a")
    path = str(lab.root / "ck" / "a.safetensors")
    for key, value in (("name", "A"), ("method", "jcl"), ("epochs", 800)):
        jobs = jobs_of(
            lab, lab.grid(checkpoints=[{"path": path, key: value}], evaluate=lab.linear("d1"))
        )
        assert [j.verb for j in jobs] == ["import", "linear"]
        assert jobs[0].argv[2:4] == (f"--{key}", str(value))


def test_packs_share_a_pass_and_new_checkpoints_do_not_repack_old_ones(lab):
    pattern = lab.checkpoints("a", "b", "c")
    grid = lab.grid(checkpoints=[pattern], evaluate=lab.linear("d1", pack=2))
    first = jobs_of(lab, grid)
    assert [len(j.cells) for j in first] == [2, 1] and first[0].expects == 2
    assert sum(arg.endswith(".safetensors") for arg in first[0].argv) == 2
    claimed = {cell: job.name for job in first for cell in job.cells}
    lab.checkpoints("a", "b", "c", "d", "e", "f")
    expansion = expand(read_grid(grid), lab.root / "runs", where="grid", claimed=claimed)
    assert expansion.packed == [first[0].name]
    again = {j.name: [c[0] for c in j.cells] for j in expansion.jobs}
    assert again.pop(first[1].name) == ["c"]
    assert sorted(again.values()) == [["d", "e"], ["f"]]


def test_probes_on_the_same_features_come_after_the_first(lab):
    evaluate = [
        {"verb": "linear", "datasets": ["d1"], "protocol": p}
        for p in ("knn", "fewshot", "logreg", "lorac")
    ]
    knn, fewshot, logreg, lorac = jobs_of(
        lab, lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=evaluate)
    )
    assert fewshot.after == (knn.name,), "same geometry"
    assert logreg.after == () and lorac.after == (), "other pixels; augmented"


def test_ablation_recipe_times_values_times_seeds(lab):
    recipe = {
        "recipe": "demo_simclr",
        "vary": {"method.temperature": [0.1, 0.2], "epochs": [1, 2]},
        "seeds": [0, 1, 2],
    }
    jobs = jobs_of(lab, lab.grid(recipes=[recipe], evaluate=lab.linear("d1")))
    pretrainings = [j for j in jobs if j.verb == "pretrain"]
    assert len(pretrainings) == 12 and len(jobs) == 24
    assert len({j.name for j in jobs}) == 24
    names = {next(a for a in j.argv if a.startswith("name=")) for j in pretrainings}
    assert names == {
        f'name="simclr-demo temperature={t} epochs={e}"' for t in (0.1, 0.2) for e in (1, 2)
    }
    for job in jobs:
        if job.verb == "linear":
            (need,) = job.needs
            assert str(lab.root / "runs" / need / "backbone.safetensors") in job.argv
        else:
            recipe = config.apply_overrides(
                {}, [a for a in job.argv[2:] if "=" in a and not a.startswith("--")]
            )
            assert {"name", "seed", "epochs", "method"} == set(recipe) and "=" not in job.name


def test_running_pretraining_of_an_earlier_grid_is_waited_for(lab):
    """Its folder is in RUNS and on record: the probes go behind the job. A folder nobody knows is only named."""
    pretraining = jobs_of(lab, lab.grid(recipes=["demo_random"]))[0]
    folders = [lab.root / "runs" / pretraining.name, lab.root / "elsewhere"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(
            json.dumps({"verb": "pretrain", "identity": {}, "created": "then"})
        )
    grid = lab.grid(checkpoints=[str(f) for f in folders], evaluate=lab.linear("d1"))
    claimed = {pretraining.name: pretraining.name}
    expansion = expand(read_grid(grid), lab.root / "runs", where="grid", claimed=claimed)
    assert expansion.waiting == [str(folders[1])]
    (probe,) = expansion.jobs
    assert probe.needs == (pretraining.name,)
    (folders[0] / "backbone.safetensors").touch()
    (after,) = expand(read_grid(grid), lab.root / "runs", where="grid", claimed=claimed).jobs
    assert after.name == probe.name and after.needs == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"evaluate": ["tabel2"]}, "unknown evaluation 'tabel2'; did you mean 'table2'"),
        (
            {"evaluate": [{"verb": "lineer", "datasets": ["d"]}]},
            "'verb' is 'lineer'; did you mean 'linear'",
        ),
        (
            {"evaluate": [{"verb": "linear", "dataset": ["d"]}]},
            "unknown key 'dataset'; did you mean 'datasets'",
        ),
        ({"evaluate": [{"verb": "linear"}]}, "'linear' needs 'datasets'"),
        (
            {"evaluate": [{"verb": "semisup", "percent": 1, "config": "x"}]},
            "'semisup' takes no 'config'",
        ),
        (
            {"evaluate": [{"verb": "linear", "datasets": ["d"], "protocol": "lorca"}]},
            "no recipe 'lorca'",
        ),
        ({"evaluate": [{"verb": "detect", "config": "mask_rcnn"}]}, "no recipe 'mask_rcnn'"),
        ({"evaluate": ["table3"]}, "semisup needs `lists: DIR`"),
        ({"evaluate": ["table3"], "lists": "nowhere"}, "nowhere/1percent.txt: no such file"),
        ({"checkpoints": ["gone.safetensors"]}, r"gone.safetensors: no such file or folder"),
        ({"checkpoints": ["gone/*.safetensors"]}, "'gone/*.safetensors' matches no file"),
        (
            {"checkpoints": ["{data}"]},
            "has no run.json; a folder must be a run of `backbench pretrain`",
        ),
        ({"checkpoints": []}, "names neither checkpoints nor recipes"),
        ({"recipes": ["mocov2"]}, "no recipe 'mocov2'"),
        (
            {"recipes": [{"recipe": "demo_random", "vary": {"epochs": 3}}]},
            "vary.epochs must be a list of values, not 3",
        ),
        ({"data": "/nowhere"}, "data folder /nowhere is not there"),
        ({"name": "a b"}, "name 'a b' may hold letters"),
        ({"evaluat": []}, "unknown key 'evaluat'; did you mean 'evaluate'"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(lab, capsys, content, says):
    usual = {"checkpoints": [lab.checkpoints("a")], "evaluate": lab.linear("d1")}
    text = json.dumps({**usual, **content}).replace("{data}", str(lab.data))
    grid = lab.grid(**json.loads(text))
    for more in ([], ["--dry-run"]):
        if more and "matches no file" in says:
            continue  # a dry run shows what --watch would wait for
        assert lab.run(grid, lab.cluster("local"), "runs", *more) == 2
        message = capsys.readouterr().err
        assert len(message.strip().splitlines()) == 1 and says in message, message
        assert not (lab.root / "runs").exists() or not list((lab.root / "runs").rglob("*.json"))


def test_two_clusters_of_one_name(lab):
    path = lab.cluster("local", name="slurm")
    with pytest.raises(
        BadInput, match=r"two clusters are called 'slurm': .*local0\.yaml and .*slurm\.yaml"
    ):
        read_cluster(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"kind": "slrum"}, "'kind' is 'slrum'; did you mean 'slurm'"),
        ({"resources": {"linaer": {}}}, "unknown key 'resources.linaer'; did you mean 'linear'"),
        ({"resources": {"linear": {"gpu": 1}}}, "unknown key 'gpu'; did you mean 'gpus'"),
        (
            {"resources": {"default": {"nodes": 2, "gpus": 4}}},
            "several nodes need one task per GPU: tasks_per_node 4",
        ),
        ({"gpus": 1, "resources": {"linear": {"gpus": 2}}}, "asks for 2 GPUs; this machine has 1"),
        ({"sbatch": {"comment": "mine"}}, "'sbatch.comment' is set by the launcher itself"),
        (
            {"sbatch": {"ntasks_per_node": 2}},
            "'sbatch.ntasks-per-node' is set by the launcher itself",
        ),
    ],
)
def test_bad_clusters(lab, capsys, content, says):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert lab.run(grid, lab.cluster("local", **content), "runs") == 2
    assert says in capsys.readouterr().err


def test_shipped_grids_and_clusters_read(lab):
    folder = config.configs_dir()
    for percent in (1, 10):
        (lab.data / f"{percent}percent.txt").touch()
    for path in sorted((folder / "clusters").glob("*.yaml")):
        cluster = read_cluster(path)
        for verb in ROWS[1:]:
            cluster.asks(Job(name="x", argv=(verb,), like="x", cells=()))
    for path in sorted((folder / "grids").glob("*.yaml")):
        grid = read_grid(path, [f"lists={lab.data}"])
        assert evaluations(grid, str(path)) or grid.recipes, path


def test_arrays_have_one_set_of_resources_and_dependencies(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b")], evaluate=["table2", "table4"], pack=1)
    jobs = jobs_of(lab, grid)
    cluster = read_cluster(lab.cluster("slurm", max_array=10, resources={"detect": {"gpus": 2}}))
    made = list(arrays(cluster, jobs))
    assert sorted(j.name for members, _, _ in made for j in members) == sorted(j.name for j in jobs)
    assert max(len(members) for members, _, _ in made) == 10
    submitted: set[str] = set()
    for members, needs, _ in made:
        assert len({cluster.asks(j) for j in members}) == 1
        assert all(set(j.needs) == set(needs) for j in members)
        assert submitted.issuperset(needs)
        submitted |= {j.name for j in members}


def test_dry_run_prints_jobs_cost_and_what_is_done(lab, capsys):
    lab.dataset("d1", steps=2, step_s=0.2)
    pattern = lab.checkpoints("a")
    grid = lab.grid(checkpoints=[pattern], evaluate=lab.linear("d1"))
    cluster = lab.cluster("local", gpus=1, resources={"linear": {"gpus": 1}})
    assert lab.run(grid, cluster, "runs") == 0
    lab.checkpoints("b", "c")
    capsys.readouterr()
    grid = lab.grid(checkpoints=[pattern], evaluate=lab.linear("d1", "d2"))
    before = sorted(lab.root.glob("runs/.launch/submissions/*"))
    assert lab.run(grid, cluster, "runs", "--dry-run") == 0
    text = capsys.readouterr().out
    assert "array 0: 5 jobs" in text and "5 jobs, 1 skipped as done, 0 others" in text
    assert re.search(r"skipped \(done\): a-\w+/linear-lorac-d1", text)
    hours = float(re.search(r"from past runs: ([\d.]+) GPU-hours", text)[1])
    took = estimates(lab.view("runs"))["linear-lorac-d1"]
    assert hours == pytest.approx(5 * took / 3600, abs=0.005) and took > 0.4
    assert sorted(lab.root.glob("runs/.launch/submissions/*")) == before


def test_multi_node_options_and_resources():
    asked = Resources(gpus=8, nodes=4, tasks_per_node=8, workers=6, accelerator="cuda")
    assert asked.options("pretrain") == (
        "--devices",
        "8",
        "--nodes",
        "4",
        "--accelerator",
        "cuda",
        "--workers",
        "6",
    )
    assert Resources(gpus=4).options("detect") == ("--num-gpus", "4")
    assert Resources(gpus=4).options("export") == ()


def test_status_reads_the_eta_of_a_run(lab):
    store = Store(lab.root / "runs")
    job = Job(name="x/y", argv=("linear",), like="linear", cells=("x/y",))
    file = store.runs / "x" / "y" / "progress.json"
    file.parent.mkdir(parents=True)
    state = {
        "what": "probe",
        "done": 30,
        "total": 100,
        "unit": "step",
        "eta_s": 100.0,
        "time": time.time() - 25,
    }
    file.write_text(json.dumps(state))
    assert _eta(store, job) == "probe 30/100 steps, ETA 1:15"


def test_ten_thousand_jobs_expand_quickly(lab):
    pattern = lab.checkpoints(*(f"c{i}" for i in range(250)))
    grid = Grid(
        name="big",
        data=str(lab.data),
        checkpoints=(pattern, pattern),
        evaluate=tuple(lab.linear("d", seeds=list(range(40)))),
    )
    start = time.process_time()
    jobs = expand(grid, lab.root / "runs", where="grid").jobs
    made = list(arrays(read_cluster("slurm"), jobs))
    took = time.process_time() - start
    assert len(jobs) == 10_000 and [len(a[0]) for a in made] == [1000] * 10
    assert took < 10
    assert dataclasses.asdict(jobs[0]) == dataclasses.asdict(
        Job.from_json(json.loads(json.dumps(jobs[0].to_json())))
    )
