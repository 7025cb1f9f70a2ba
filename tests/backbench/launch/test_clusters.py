"""Clusters as files: what is refused, and what a verb is told."""

import pytest

from backbench import cli
from backbench.launch import slurm_client
from backbench.launch.clusters import ROWS, Resources, read_cluster
from backbench.launch.job import Job
from backbench.recipes import config


@pytest.mark.parametrize(("content", "says"), [
    ({"kind": "slrum"}, "'kind' is 'slrum'; did you mean 'slurm'"),
    ({"resources": {"linaer": {}}}, "unknown key 'resources.linaer'; did you mean 'linear'"),
    ({"resources": {"linear": {"gpu": 1}}}, "unknown key 'gpu'; did you mean 'gpus'"),
    ({"resources": {"default": {"nodes": 2, "gpus": 4}}}, "task per GPU: tasks_per_node 4"),
    ({"gpus": 1, "resources": {"linear": {"gpus": 2}}}, "asks for 2 GPUs; this machine has 1"),
    ({"overrides": ["jobs=1"]}, "unknown key 'overrides'"),
    ({"sbatch": {"comment": "mine"}}, "'sbatch.comment' is set by the launcher itself"),
    ({"sbatch": {"ntasks_per_node": 2}}, "'sbatch.ntasks-per-node' is set by the launcher"),
])  # fmt: skip
def test_bad_clusters(lab, capsys, content, says):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert lab.run(grid, lab.cluster("local", **content), "runs") == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_an_empty_cluster_is_none(lab, capsys, verb):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert lab.run(grid, lab.cluster("debug"), "runs") == 0
    words = ("launch", verb, "--cluster", "", "--out", str(lab.root / "runs"))
    assert cli.main(words) == 2
    assert "no recipe ''" in capsys.readouterr().err


def test_shipped_clusters_read():
    for path in sorted((config.configs_dir() / "clusters").glob("*.yaml")):
        cluster = read_cluster(path)
        for verb in ROWS[1:]:
            cluster.resources_for(Job(name="x", argv=(verb,), like="x", cells=()))


def test_nodes_are_read_however_slurm_writes_their_sizes(stand_in_slurm):
    lines = ["main*|1:00|64+|256000|gpu:a100:4(S:0-1),gpu:2|(null)"]
    lines += ["big|infinite|1.50K|1056000+|(null)|ib,nvme", "old|(null)|(null)|||x"]
    stand_in_slurm.says("sinfo", "".join(f"{line}\n" for line in lines))
    main, big, old = slurm_client.nodes()
    assert (main.sizes, main.limit_s, main.default) == ((6, 64, 256000), 60, True)
    assert (big.sizes, big.features) == ((0, 1536, 1056000), {"ib", "nvme"})
    assert old.sizes == (0, 0, 0)


def test_multi_node_options_and_resources():
    asked = Resources(gpus=8, nodes=4, tasks_per_node=8, workers=6, accelerator="cuda")
    said = "--devices 8 --nodes 4 --accelerator cuda --workers 6"
    assert " ".join(asked.options("pretrain")) == said
    assert Resources(gpus=4).options("detect") == ("--num-gpus", "4")
    assert Resources(gpus=4).options("export") == ()
    assert Resources(gpus=4, workers=1).options("analyze") == ("--workers", "1")  # one process
