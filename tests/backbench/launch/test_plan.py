"""What is missing, in which arrays, at what cost."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import pytest

from backbench.launch.clusters import read_cluster
from backbench.launch.expansion import expand
from backbench.launch.grid import Grid, read_grid
from backbench.launch.job import Job
from backbench.launch.plan import arrays, estimates


def test_arrays_have_one_set_of_resources_and_dependencies(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b")], evaluate=["table2", "table4"], pack=1)
    jobs = expand(read_grid(grid), lab.root / "runs", where="grid").jobs
    cluster = read_cluster(lab.cluster("slurm", max_array=10, resources={"detect": {"gpus": 2}}))
    made = list(arrays(cluster, jobs))
    packed = [job.name for array in made for job in array.jobs]
    assert sorted(packed) == sorted(job.name for job in jobs)
    assert max(len(array.jobs) for array in made) == 10
    submitted: set[str] = set()
    for array in made:
        assert len({cluster.asks(job) for job in array.jobs}) == 1
        assert all(set(job.needs) == set(array.needs) for job in array.jobs)
        assert submitted.issuperset(array.needs)
        submitted |= {job.name for job in array.jobs}


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
    took = estimates(lab.look("runs"))["linear-lorac-d1"]
    assert hours == pytest.approx(5 * took / 3600, abs=0.005) and took > 0.4
    assert sorted(lab.root.glob("runs/.launch/submissions/*")) == before


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
