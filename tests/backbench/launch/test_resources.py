"""What a job asks for, what its verb is told of it, and which cluster a record may name."""

import pytest

from backbench.errors import BadInput
from backbench.launch.clusters import (
    Resources,
    check_resources,
    read_cluster,
    recorded_cluster,
)
from backbench.launch.job import Job
from backbench.recipes import config


def a_job(verb="linear", **resources):
    return Job(name="x", argv=(verb,), like="x", cells=(), resources=resources)


@pytest.mark.parametrize(
    ("asked", "devices", "cpus", "options"),
    [
        ({}, 1, 1, ()),
        ({"gpus": 4, "cpus": 8}, 4, 8, ("--devices", "4")),
        ({"gpus": 4, "tasks_per_node": 4, "cpus": 8}, 4, 32, ("--devices", "4")),
        (
            {"gpus": 2, "tasks_per_node": 2, "nodes": 3},
            2,
            2,
            ("--devices", "2", "--nodes", "3"),
        ),
        (
            {"accelerator": "cpu", "workers": 1},
            1,
            1,
            ("--accelerator", "cpu", "--workers", "1"),
        ),
    ],
)
def test_a_verb_is_told_what_it_has_been_given(asked, devices, cpus, options):
    resources = Resources(**asked)
    assert (resources.devices, resources.cpus_per_node) == (devices, cpus)
    assert resources.options("linear") == options


def test_each_verb_has_words_of_its_own():
    resources = Resources(
        gpus=2, nodes=3, tasks_per_node=2, accelerator="cuda", workers=5
    )
    assert resources.options("detect") == ("--num-gpus", "2", "--num-machines", "3")
    places = ("--accelerator", "cuda", "--workers", "5")
    assert resources.options("analyze") == places
    assert resources.options("pretrain") == ("--devices", "2", "--nodes", "3", *places)
    assert resources.options("import") == resources.options("export") == ()


def test_a_time_limit_is_in_seconds_and_half_of_it_is_the_longest_grace(lab):
    assert Resources().limit_s is None
    short = Resources(hours=0.01)
    assert short.limit_s == pytest.approx(36)
    cluster = read_cluster(lab.cluster("slurm", signal_s=120))
    assert cluster.grace_s(short) == pytest.approx(18)
    assert cluster.grace_s(Resources(hours=1)) == 120
    assert cluster.grace_s(Resources()) == 120
    assert read_cluster(lab.cluster("local", signal_s=120)).grace_s(short) == 120


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"partition": "a b"}, "partition must be one plain word, not 'a b'"),
        ({"qos": "x;y"}, "qos must be one plain word"),
        ({"account": "a\nb"}, "account must be one plain word"),
        ({"constraint": "a b"}, "constraint must be one plain word"),
        (
            {"nodes": 2, "gpus": 4},
            "several nodes need one task per GPU: tasks_per_node 4",
        ),
        (
            {"nodes": 2, "tasks_per_node": 2},
            "several nodes need one task per GPU: tasks_per_node 1",
        ),
    ],
)
def test_what_sbatch_would_misread_is_refused(asked, says):
    with pytest.raises(ValueError, match=says):
        Resources(**asked)


def test_a_jobs_row_stands_over_its_verbs_and_that_over_the_default(lab):
    rows = {
        "default": {"cpus": 2, "gpus": 1, "hours": 3},
        "linear": {"cpus": 4, "gpus": 2},
    }
    cluster = read_cluster(lab.cluster("slurm", resources=rows))
    assert cluster.resources_for(a_job("detect")).cpus == 2
    found = cluster.resources_for(a_job(gpus=8))
    assert (found.cpus, found.gpus, found.hours) == (4, 8, 3)
    assert cluster.resources_for(a_job()).gpus == 2
    with pytest.raises(BadInput, match="resources of x"):
        cluster.resources_for(a_job(gpus=-1))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"resources": {"pretrian": {}}},
            "unknown key 'resources.pretrian'; .*pretrain",
        ),
        ({"resources": {"default": {"cpu": 1}}}, "resources.default"),
        ({"sbatch": {"mem": "1G"}}, "'sbatch.mem' is set by the launcher itself"),
        (
            {"sbatch": {"cpus_per_task": 3}},
            "'sbatch.cpus-per-task' is set by the launcher",
        ),
        ({"command": "python '"}, "command"),
    ],
)
def test_a_cluster_that_would_not_do_is_refused(lab, content, says):
    with pytest.raises(BadInput, match=says):
        read_cluster(lab.cluster("slurm", fake=False, **content))


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"gpus": 4}, "x asks for 4 GPUs; this machine has 2"),
        ({"nodes": 2}, "x asks for 2 nodes; 'local0' is one machine"),
    ],
)
def test_every_job_is_looked_at_before_one_starts(lab, resources, says):
    cluster = read_cluster(lab.cluster("local", gpus=2))
    check_resources(cluster, [a_job(), a_job(gpus=2)])
    with pytest.raises(BadInput, match=says):
        check_resources(cluster, [a_job(), a_job(gpus=1), a_job(**resources)])
    # Where no GPU is handed out, the jobs see those of the machine
    check_resources(read_cluster(lab.cluster("local")), [a_job(gpus=4)])


# The cluster of a record, which anybody may have written


def test_a_record_names_a_shipped_cluster_or_the_one_that_is_given(lab):
    shipped = str(config.configs_dir() / "clusters" / "local.yaml")
    assert recorded_cluster(shipped, (), None).kind == "local"
    assert recorded_cluster(shipped, ("jobs=5",), None).jobs == 5
    file = lab.cluster("local")
    with pytest.raises(
        BadInput, match="never becomes a command: name it, --cluster FILE"
    ):
        recorded_cluster(file, (), None)
    given = read_cluster(file)
    assert recorded_cluster(file, (), given).command == given.command
    with pytest.raises(BadInput, match="never becomes a command"):
        recorded_cluster(lab.cluster("local"), (), given)


def test_recorded_changes_are_numbers_and_the_command_lines_win(lab):
    file = lab.cluster("local", jobs=1)
    given = read_cluster(file, ("jobs=7",))
    found = recorded_cluster(file, ("jobs=5", "signal_s=33"), given)
    assert (found.jobs, found.signal_s) == (7, 33)
    with pytest.raises(
        BadInput,
        match=r"had cluster\.command changed; .*say it again, cluster\.command=rm",
    ):
        recorded_cluster(file, ("signal_s=33", "command=rm"), given)
    again = read_cluster(file, ("command=python",))
    found = recorded_cluster(file, ("command=rm", "signal_s=33"), again)
    assert (found.command, found.signal_s) == ("python", 33)
