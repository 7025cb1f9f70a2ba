"""Clusters as files: what is refused, and what a verb is told."""

import json

import pytest

from backbench.launch import slurm_client
from backbench.launch.clusters import ROWS, Resources, read_cluster
from backbench.launch.job import Job
from backbench.recipes import config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"kind": "slrum"}, "'kind' is 'slrum'; did you mean 'slurm'"),
        (
            {"resources": {"linaer": {}}},
            "unknown key 'resources.linaer'; did you mean 'linear'",
        ),
        (
            {"resources": {"linear": {"gpu": 1}}},
            "unknown key 'gpu'; did you mean 'gpus'",
        ),
        (
            {"resources": {"default": {"nodes": 2, "gpus": 4}}},
            "task per GPU: tasks_per_node 4",
        ),
        (
            {"gpus": 1, "resources": {"linear": {"gpus": 2}}},
            "asks for 2 GPUs; this machine has 1",
        ),
        ({"overrides": ["jobs=1"]}, "unknown key 'overrides'"),
        ({"file": "x"}, "unknown key 'file'"),
        ({"jobs": 0}, "'jobs' must be greater than or equal to 1, not 0"),
        ({"jobs": 10**6}, "'jobs' must be less than or equal to 4096"),
        ({"signal_s": -5}, "'signal_s' must be greater than or equal to 1, not -5"),
        ({"gpus": -3}, "'gpus' must be greater than or equal to 0, not -3"),
        (
            {"command": 'apptainer exec "'},
            "command 'apptainer exec \"': No closing quotation",
        ),
        ({"resources": {"default": {"hours": "inf"}}}, "'hours' must be less than"),
        (
            {"resources": {"default": {"memory_gb": -1}}},
            "'memory_gb' must be greater than 0, not -1",
        ),
        (
            {"resources": {"default": {"workers": -5}}},
            "'workers' must be greater than or equal to 0",
        ),
        (
            {"sbatch": {"comment": "mine"}},
            "'sbatch.comment' is set by the launcher itself",
        ),
        (
            {"sbatch": {"ntasks_per_node": 2}},
            "'sbatch.ntasks-per-node' is set by the launcher",
        ),
    ],
)
def test_bad_clusters_are_refused_in_a_file_and_on_the_command_line(
    lab, bad_input, content, says
):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    in_the_file = lab.cluster("local", **content)
    bad_input(lab.run(grid, in_the_file, "runs"), says)
    said = [f"cluster.{key}={json.dumps(value)}" for key, value in content.items()]
    bad_input(lab.run(grid, lab.cluster("local"), "runs", *said), says)


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_an_empty_cluster_or_changes_of_none_are_refused(lab, bad_input, verb):
    (lab.root / "runs").mkdir()
    bad_input(lab.launch(verb, "runs", "--cluster", ""), "no recipe ''")
    said = "cluster.jobs=1: say of which cluster, --cluster FILE"
    bad_input(lab.launch(verb, "runs", "cluster.jobs=1"), said)


def test_shipped_clusters_have_resources_for_every_verb():
    for path in sorted((config.configs_dir() / "clusters").glob("*.yaml")):
        cluster = read_cluster(path)
        for verb in ROWS[1:]:
            job = Job(name="x", argv=(verb,), like="x", cells=())
            assert cluster.resources_for(job).cpus >= 1


def test_nodes_are_read_however_slurm_writes_their_sizes(stand_in_slurm):
    lines = [
        "main*|1:00|64+|256000|gpu:a100:4(S:0-1),gpu:2|(null)",
        "big|infinite|1.50K|1056000+|(null)|ib,nvme",
        "old|(null)|(null)|||x",
    ]
    stand_in_slurm.says("sinfo", "".join(f"{line}\n" for line in lines))
    main, big, old = slurm_client.nodes()
    assert main.sizes == (6, 64, 256000)
    assert main.limit_s == 60
    assert main.default
    assert big.sizes == (0, 1536, 1056000)
    assert big.features == {"ib", "nvme"}
    assert old.sizes == (0, 0, 0)


def test_a_job_stands_as_slurm_says(stand_in_slurm):
    assert slurm_client.standing("12_3") is None, "no answer"
    for time, standing in (("None", "running"), ("2026-01-02T03:04:05", "preempted")):
        stand_in_slurm.says("scontrol", f"JobState=RUNNING PreemptTime={time}")
        assert slurm_client.standing("12_3") == standing
    stand_in_slurm.says("scontrol", "JobState=COMPLETING PreemptTime=None")
    assert slurm_client.standing("12_3") == "ending"
    assert set(stand_in_slurm.called("scontrol")) == {"show job 12_3"}


def test_a_verb_is_told_of_its_gpus_nodes_and_workers():
    asked = Resources(gpus=8, nodes=4, tasks_per_node=8, workers=6, accelerator="cuda")
    said = "--devices 8 --nodes 4 --accelerator cuda --workers 6"
    assert " ".join(asked.options("pretrain")) == said
    assert Resources(gpus=4).options("detect") == ("--num-gpus", "4")
    assert Resources(gpus=4).options("export") == ()
    one_process = Resources(gpus=4, workers=1).options("analyze")
    assert one_process == ("--workers", "1")
