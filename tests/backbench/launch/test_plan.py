"""The plan of a grid: the missing jobs, their arrays, their cost."""

import re
import time

from backbench.launch.clusters import read_cluster
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.job import Job
from backbench.launch.plan import CommandCheck, arrays
from backbench.launch.records import Ledger, Submission


def test_arrays_have_one_set_of_resources_and_dependencies(lab):
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=["table2", "table4"], pack=1
    )
    jobs = Expansion(read_grid(grid), lab.root / "runs", where="grid").jobs
    cluster = read_cluster(
        lab.cluster("slurm", max_array=10, resources={"detect": {"gpus": 2}})
    )
    made = list(arrays(cluster, jobs))
    packed = [job.name for array in made for job in array.jobs]
    assert sorted(packed) == sorted(job.name for job in jobs)
    assert max(len(array.jobs) for array in made) == 10
    submitted: set[str] = set()
    for array in made:
        assert len({cluster.resources_for(job) for job in array.jobs}) == 1
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
    assert (
        "array 0: 5 jobs" in text
        and "  1 CPUs feed a GPU 250 to 750 images/s\n" in text
    )
    assert "5 jobs, 1 skipped as done, 0 others" in text
    assert re.search(r"skipped \(done\): a-\w+/linear-lorac-d1", text)
    for name in ("b", "c"):
        took = re.search(rf"  {name}-\w+/linear-lorac-d1-\S+  (\d\.\d) s", text)
        assert float(took[1]) >= 0.4
    assert len(re.findall(r"  \w-\w+/linear-lorac-d2-\S+  unknown", text)) == 3
    assert "cost unknown for 3 jobs (3 x linear-lorac-d2)" in text
    assert sorted(lab.root.glob("runs/.launch/submissions/*")) == before


def pretraining(lab, *overrides):
    return lab.grid(recipes=[{"recipe": "demo_simclr", "overrides": list(overrides)}])


def cost(lab, capsys, grid, cluster):
    """Return the cost that the dry run says for its one job."""
    capsys.readouterr()
    assert lab.run(grid, cluster, "runs", "--dry-run") == 0
    text = capsys.readouterr().out
    (said,) = re.findall(r"^  \S+  (.*)$", text, re.MULTILINE)
    assert (
        ("cost unknown for 1 jobs" in text)
        == (said == "unknown")
        != ("estimated" in text)
    )
    return said


def was_run(lab, grid, cluster, state, seconds):
    """On record as a job that ran for so long."""
    ledger, place = Ledger(lab.root / "runs"), read_cluster(cluster)
    (job,) = Expansion(read_grid(grid), ledger.runs, where="grid").jobs
    ledger.write_submission(Submission.to(place, "lab", "u1", [job]))
    end = time.time()
    note = {"start": end - seconds, "end": end, "how": state, "gpus": 0, "machine": ""}
    # One before it ended without a word: nobody knows how long it took
    attempts = [{"start": end - 9 * seconds, "end": None}, note]
    ledger.write_status(job, {"name": job.name, "state": state, "attempts": attempts})
    (ledger.runs / job.name).mkdir(parents=True)
    return ledger.runs / job.name


def test_cost_is_of_the_same_recipe_scaled_by_its_epochs_or_unknown(lab, capsys):
    cluster = lab.cluster("local")
    short = pretraining(lab, "epochs=2")
    assert cost(lab, capsys, short, cluster) == "unknown"
    (was_run(lab, short, cluster, "done", 100.0) / "backbone.safetensors").touch()
    for same in (["seed=1"], ["optim.lr=0.5"], ["method.temperature=0.7"]):
        assert cost(lab, capsys, pretraining(lab, "epochs=2", *same), cluster) == "1:40"
        assert (
            cost(lab, capsys, pretraining(lab, "epochs=200", *same), cluster)
            == "2:46:40"
        )
    for other in (
        ["arch=resnet50"],
        ["batch_size=32"],
        ["method.head.hidden=256"],
        ["stem=small"],
    ):
        assert (
            cost(lab, capsys, pretraining(lab, "epochs=2", *other), cluster)
            == "unknown"
        )
    assert (
        cost(lab, capsys, pretraining(lab, "epochs=200"), lab.cluster("local"))
        == "unknown"
    )
    more = lab.cluster("local", gpus=1, resources={"default": {"gpus": 1}})
    assert cost(lab, capsys, pretraining(lab, "epochs=200"), more) == "unknown"


def test_cost_of_a_detector_is_of_the_same_config_and_keys(lab, capsys):
    cluster = lab.cluster("local")

    def detector(name="a", config="mask_rcnn_R_50_FPN_1x", keys=()):
        entry = {"verb": "detect", "config": config, "args": list(keys)}
        return lab.grid(checkpoints=[lab.checkpoints(name)], evaluate=[entry])

    was_run(lab, detector(), cluster, "done", 100.0)
    (lab.root / "ck" / "a.safetensors").unlink()
    assert cost(lab, capsys, detector(name="b"), cluster) == "1:40"
    for other in (
        {"keys": ("SOLVER.IMS_PER_BATCH", "2")},
        {"config": "mask_rcnn_R_50_C4_1x"},
    ):
        assert cost(lab, capsys, detector(name="b", **other), cluster) == "unknown"


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
