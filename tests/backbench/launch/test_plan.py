"""The plan of a grid: the missing jobs, their arrays, and what a dry run shows."""

import re
import shutil

import pytest
from support import fake_verbs

from backbench.errors import BadInput
from backbench.launch.clusters import read_cluster
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.job import Job
from backbench.launch.plan import CommandCheck, arrays


def test_arrays_have_one_set_of_resources_and_dependencies(lab):
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=["table2", "table4"], pack=1
    )
    jobs = Expansion(read_grid(grid), lab.root / "runs", where="grid").jobs
    resources = {"detect": {"gpus": 2}}
    cluster = read_cluster(lab.cluster("slurm", max_array=10, resources=resources))
    made = list(arrays(cluster, jobs))
    names = [job.name for array in made for job in array.jobs]
    assert sorted(names) == sorted(job.name for job in jobs)
    assert max(len(array.jobs) for array in made) == 10
    submitted: set[str] = set()
    for array in made:
        assert len({cluster.resources_for(job) for job in array.jobs}) == 1
        assert all(set(job.needs) == set(array.needs) for job in array.jobs)
        assert submitted.issuperset(array.needs)
        submitted |= {job.name for job in array.jobs}


def test_dry_run_prints_the_missing_jobs_and_what_is_done(lab, capsys):
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
    assert "array 0: 5 jobs" in text
    assert "  1 CPUs feed a GPU 250 to 750 images/s\n" in text
    assert "5 jobs, 1 skipped as done, 0 others" in text
    assert re.search(r"skipped \(done\): a-\w+/linear-lorac-d1", text)
    missing = re.findall(r"^  (\w)-\w+/linear-lorac-(d\d)-\S+$", text, re.MULTILINE)
    assert sorted(missing) == [
        ("a", "d2"),
        ("b", "d1"),
        ("b", "d2"),
        ("c", "d1"),
        ("c", "d2"),
    ]
    assert sorted(lab.root.glob("runs/.launch/submissions/*")) == before


def test_numbers_of_other_weights_than_a_file_holds_now_are_told(lab, capsys, caplog):
    """A pretraining that is made anew has the folder of the old one, and other weights."""
    grid = lab.grid(recipes=["demo_random"], evaluate=lab.linear("d1", "d2"))
    cluster = lab.cluster("local")
    assert lab.run(grid, cluster, "runs") == 0
    (made,) = (lab.root / "runs/pretrain").glob("*/backbone.safetensors")
    again = lab.root / "again.safetensors"
    fake_verbs.write_checkpoint(again, "again")
    caplog.clear()
    assert lab.run(grid, cluster, "runs") == 0
    assert "outdated" not in caplog.text
    again.replace(made)
    assert lab.run(grid, cluster, "runs") == 0
    (told,) = [line for line in caplog.messages if "outdated" in line]
    assert told.startswith(
        f"{made}: holds other weights than {lab.root / 'runs'}/demo_"
    )
    assert " and 1 more measured; remove what is outdated" in told
    capsys.readouterr()
    assert lab.run(grid, cluster, "runs", "--dry-run") == 0
    shown = re.findall(
        r"^outdated \(.*\): (\S+)$", capsys.readouterr().out, re.MULTILINE
    )
    assert len(shown) == 2
    # The next run measures what was removed
    shutil.rmtree(lab.root / "runs" / shown[0])
    shutil.rmtree(lab.root / "runs" / shown[1])
    caplog.clear()
    assert lab.run(grid, cluster, "runs") == 0
    assert "2 jobs to run" in caplog.text and "outdated" not in caplog.text


def test_a_failed_job_whose_command_has_changed_goes_again(lab):
    """`launch retry` repeats the recorded command, which names the folder that was wrong."""
    lab.dataset("d1", fault="bad")
    content = {
        "checkpoints": [lab.checkpoints("a")],
        "evaluate": lab.linear("d1", "d2"),
    }
    grid = lab.grid(**content)
    cluster = lab.cluster("local")
    assert lab.run(grid, cluster, "runs") == 1
    states = lab.states("runs")
    (name,) = [name for name, state in states.items() if state == "failed"]
    (done,) = [name for name, state in states.items() if state == "done"]
    assert lab.run(grid, cluster, "runs") == 0, "the same command waits for `retry`"
    assert len(lab.attempts("runs")[name]) == 1
    (lab.root / "other").mkdir()
    assert lab.run(grid, cluster, "runs", "--data", str(lab.root / "other")) == 0
    assert set(lab.states("runs").values()) == {"done"}
    assert len(lab.attempts("runs")[name]) == 2
    assert len(lab.attempts("runs")[done]) == 1, "what is done is not measured again"


def test_boxes_that_are_not_here_are_named_once_each(tmp_path, caplog):
    looked = []
    jobs = []
    for name in ("cells", "drones", "cells"):
        line = f"detect --dataset {name} --checkpoint a.pth --data {tmp_path} --out x"
        jobs.append(Job(name=name, argv=tuple(line.split()), like="x", cells=()))
    check = CommandCheck(looked.append)
    check.refuse(jobs, "grid")
    with pytest.raises(BadInput) as refused:
        check.refuse_missing("grid", later=False)
    line = str(refused.value)
    for name in ("cells", "drones"):
        assert line.count(f"{tmp_path}/{name}: no such folder (for {name})") == 1
    assert "no job is started" in line and "--data-later" in line
    # The nodes may have what this machine has not
    check.refuse_missing("grid", later=True)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert f"{tmp_path}/cells: no such folder; expected COCO's" in told[0]
    assert f"{tmp_path}/drones: no such folder; expected COCO's" in told[1]
    assert not looked, "its files are read where it runs"


def test_each_kind_of_command_is_looked_at_once():
    looked = []

    def job(line):
        return Job(name=line, argv=tuple(line.split()), like="x", cells=())

    line = CommandCheck(looked.append)
    jobs = [job("detect --config-file x")]  # which looks for itself
    for n in range(50):
        for protocol in ("a", "b"):
            jobs.append(
                job(
                    f"semisup {n}.pth --percent 1 --protocol {protocol} --seed {n}"
                    f" --data . --out {n}"
                )
            )
        for lr in (1, 2, 3):
            jobs.append(
                job(f"pretrain demo_moco_v2 optim.lr={lr} seed={n} --data . --out {n}")
            )
    for _ in range(2):  # as --watch does
        line.refuse(jobs, "grid")
    assert len(looked) == 2 + 3
