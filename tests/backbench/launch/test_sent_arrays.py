"""What sbatch is told of an array, which jobs go to it, and how many it takes."""

import math

import pytest

from backbench.errors import BadInput
from backbench.launch import clusters, slurm, slurm_client
from backbench.launch.clusters import Cluster, Resources
from backbench.launch.job import Job
from backbench.launch.records import Submission
from backbench.launch.slurm_client import Node


def job(name, *, verb="linear", **more):
    return Job(name=name, argv=(verb,), like=f"like-{name}", cells=(name,), **more)


def told(cluster, dependency=""):
    submission = Submission.to(cluster, "table", "u1", [job("a")])
    return slurm._parameters(cluster, submission, dependency)


def test_sbatch_is_told_all_that_a_job_asks_for():
    asked = {
        "partition": "main",
        "account": "lab",
        "qos": "long",
        "constraint": "a100",
        "gpus": 4,
        "nodes": 2,
        "tasks_per_node": 4,
        "cpus": 6,
        "memory_gb": 0.7,
        "hours": 1.51,
    }
    cluster = Cluster(
        name="c",
        kind="slurm",
        jobs=3,
        signal_s=90,
        setup=("module load x", "set -e"),
        sbatch={"requeue": False, "nice": 5},
        resources={"default": asked},
    )
    parameters = told(cluster, "afterok:7")
    *setup, last = parameters.pop("setup")
    assert setup == ["module load x", "set -e"]
    assert last == slurm.EARLY_SIGNAL
    assert parameters == {
        "job_name": "backbench-table",
        "comment": "u1",
        "nodes": 2,
        "ntasks_per_node": 4,
        "cpus_per_task": 6,
        "srun_args": ["--cpus-per-task=6"],
        "gpus_per_node": 4,
        "partition": "main",
        "account": "lab",
        "qos": "long",
        "constraint": "a100",
        # 716.8 MB and 90.6 minutes: what is asked for is never cut
        "mem": "717M",
        "time": 91,
        "signal_delay_s": 90,
        "array_parallelism": 3,
        "dependency": "afterok:7",
        "stderr_to_stdout": True,
        "additional_parameters": {
            "requeue": False,
            "kill-on-invalid-dep": "yes",
            "nice": 5,
        },
    }


def test_sbatch_is_not_told_what_nobody_asked_for():
    cluster = Cluster(name="c", kind="slurm", resources={"linear": None})
    parameters = told(cluster)
    absent = ("gpus_per_node", "partition", "account", "qos", "constraint")
    assert not parameters.keys() & {*absent, "mem", "time", "dependency"}
    assert parameters["additional_parameters"]["requeue"] is True
    assert parameters["signal_delay_s"] == 120
    # A grace is half of the time at most
    short = Cluster(
        name="c", kind="slurm", resources={"default": {"hours": 2 / 60, "gpus": 1}}
    )
    parameters = told(short)
    assert (parameters["time"], parameters["signal_delay_s"]) == (2, 60)
    assert parameters["gpus_per_node"] == 1


def test_jobs_that_wait_for_what_is_not_on_this_slurm_are_left_out(caplog):
    jobs = [
        job("on_slurm", needs=("earlier",)),
        job("lonely", needs=("earlier", "absent", "also_absent")),
        job("behind_lonely", needs=("lonely",)),
        job("behind_both", needs=("on_slurm", "earlier")),
        job("free", after=("absent",)),
    ]
    caplog.set_level("INFO")
    kept = slurm._reachable(jobs, {"earlier": "7_0"})
    assert [each.name for each in kept] == ["on_slurm", "behind_both", "free"]
    assert caplog.messages == [
        "left out: lonely waits for absent, which is not on this Slurm; run this again later",
        "left out: behind_lonely waits for lonely, which is not on this Slurm;"
        " run this again later",
    ]


@pytest.fixture
def limits(monkeypatch):
    """Say Slurm's limits and the jobs in its memory."""
    asked = []

    def say(found, there):
        monkeypatch.setattr(slurm_client, "limits", lambda: found)
        monkeypatch.setattr(
            slurm_client, "slurm", lambda *words: asked.append(words) or there
        )
        return asked

    return say


def test_slurms_room_is_what_others_leave(limits):
    cluster = Cluster(name="c", kind="slurm", file="c.yaml")
    asked = limits((5, 8), "1\n2_[3-4]\n5\n")
    assert slurm._room(cluster, [5, 5, 2]) == 5
    assert asked == [("squeue", "-h", "-r", "-t", "all", "-o", "%i")]
    limits((8, 2), "1\n2\n3\n")
    assert slurm._room(cluster, [1, 2]) == 0
    with pytest.raises(BadInput, match=r"c.yaml: an array of 3 jobs, .* 2 \(MaxJob"):
        slurm._room(cluster, [3, 1])
    limits((2, 9), "")
    assert slurm._room(cluster, [2, 1]) == 9
    with pytest.raises(BadInput, match=r"array of 3 jobs, .* most 2 \(MaxArraySize\)"):
        slurm._room(cluster, [1, 3])
    assert slurm._room(cluster, []) == math.inf
    limits(None, "1\n")
    assert slurm._room(cluster, [10**6]) == math.inf


SMALL = Node("main", True, 7200.0, (1, 8, 4096), frozenset({"old"}))
LARGE = Node("main", True, 3600.0, (4, 4, 8192), frozenset({"new", "old"}))
OTHER = Node("debug", False, 60.0, (8, 64, 65536), frozenset())


def refusal(offered=(SMALL, LARGE, OTHER), **asked):
    resources = Resources(**{"hours": 1.0, **asked})
    try:
        clusters._check_partition(resources, offered, where="x")
    except BadInput as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"hours": 2.0, "gpus": 1, "cpus": 8, "memory_gb": 4},
        {"gpus": 4, "cpus": 2, "tasks_per_node": 2, "memory_gb": 8},
        {"gpus": 1, "nodes": 2},
        {"constraint": "old", "nodes": 2},
        {"constraint": "new", "cpus": 4},
        {"constraint": "new|absent"},
        {"partition": "debug", "hours": 1 / 60, "gpus": 8, "cpus": 64},
    ],
)
def test_what_just_fits_is_not_refused(asked):
    assert refusal(**asked) is None


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"hours": None}, "x has no `hours`; write them down in resources.default"),
        ({"hours": 2.5}, "x asks for 2.5 hours; 'main' allows 2"),
        (
            {"partition": "debug", "constraint": "old"},
            "x asks for constraint 'old' in partition 'debug'; its nodes have no features",
        ),
        (
            {"constraint": "olds"},
            "x asks for constraint 'olds' in partition 'main'; did you mean 'old'?",
        ),
        # The CPUs of one and the GPUs of the other do not add up
        (
            {"gpus": 2, "cpus": 5, "tasks_per_node": 1, "memory_gb": 1},
            "x asks for 1 node(s) with 2 GPUs, 5 CPUs, 1024 MB each; of the 2 of partition"
            " 'main', 0 have all (at most 4 GPUs, 8 CPUs, 8192 MB)",
        ),
        (
            {"constraint": "new", "nodes": 2},
            "x asks for 2 node(s) with 0 GPUs, 1 CPUs, 0 MB each; of the 2 of partition"
            " 'main', 1 have all (at most 4 GPUs, 8 CPUs, 8192 MB)",
        ),
    ],
)
def test_what_no_node_has_is_refused(asked, says):
    assert refusal(**asked) == says


def test_without_a_default_partition_the_names_are_said():
    assert refusal((OTHER, OTHER._replace(partition="a"))) == (
        "x names no partition and Slurm has no default; allowed: a, debug"
    )
    assert refusal(partition="mian") == (
        "x asks for partition 'mian'; did you mean 'main'?"
    )
