"""Faults that a cluster does to jobs, on a real Slurm of three nodes.

A pretraining meets the fault and a probe waits for it. Both must end, with the numbers of a run
that nothing disturbed, and Slurm must not have called anything failed.
"""

import os
import time
from pathlib import Path

import pytest
from support import slurm_cluster

from backbench.launch.slurm_client import queue

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("three_nodes")]
LONG = 240.0  # seconds; what is waited for takes a tenth of it on an idle machine


@pytest.fixture(autouse=True)
def nodes_stay_in_service(three_nodes):
    yield
    reason = slurm_cluster.why_drained()
    assert not reason, f"Slurm took a node out of service: {reason}"


class Trial:
    """A pretraining under way on `nodes` nodes, with its state saved; a probe behind it."""

    def __init__(
        self,
        lab,
        shell,
        *,
        nodes=1,
        partition="main",
        hours=0.2,
        steps=120,
        started=True,
        **more,
    ) -> None:
        self.lab = lab
        self.shell = shell
        self.walk = {"steps": steps, "step_s": 0.1, "save_every": 5}
        lab.dataset("pretrain", **self.walk)
        self.grid = lab.grid(recipes=["demo_random"], evaluate=lab.linear("d1"))
        asked = {"cpus": 1, "memory_gb": 0.5, "hours": hours, "partition": partition}
        rows = {"default": asked, "pretrain": {"nodes": nodes}}
        self.cluster = lab.cluster("slurm", resources=rows, **more)
        assert lab.run(self.grid, self.cluster, "runs") == 0
        if started:
            self.until_saved()

    def until_saved(self) -> None:
        self.lab.until("runs", lambda _: self.lab.run_files("runs", "state.json"), LONG)

    @property
    def name(self) -> str:
        names = self.lab.look("runs").records
        (pretraining,) = [name for name in names if name.startswith("pretrain/")]
        return pretraining

    @property
    def number(self) -> str:
        return self.lab.look("runs").records[self.name].id

    def nodes(self) -> str:
        return self.shell(f"squeue -h -j {self.number} -o %N").strip()

    def preempt(self) -> None:
        """Somebody with priority wants every CPU of its nodes for a moment."""
        nodes = self.nodes()
        count = len(self.shell(f"scontrol show hostnames {nodes}").split())
        where = f"-p urgent -w {nodes} -N {count} --ntasks-per-node 1 -c 4"
        self.shell(f"sbatch {where} -o /dev/null --wrap 'sleep 1'")

    def ends_well(self, attempts: int = 2) -> list[str]:
        """How the attempts at the pretraining ended."""
        self.lab.until_done("runs", LONG)
        for queued in queue().values():
            assert queued.state not in ("FAILED", "NODE_FAIL", "TIMEOUT"), queued
        hows = self.lab.attempts("runs")[self.name]
        assert len(hows) == attempts, hows
        assert hows[-1] == "done", hows
        self.equals_an_undisturbed_run()
        return hows

    def equals_an_undisturbed_run(self) -> None:
        self.lab.dataset("pretrain", steps=self.walk["steps"])
        self.lab.dataset("d1", steps=1)
        assert self.lab.values("runs") == self.lab.reference(self.grid)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("partition", ["grace", "main"])
def test_preemption(lab, shell, partition, nodes):
    trial = Trial(lab, shell, nodes=nodes, partition=partition)
    began = time.monotonic()
    trial.preempt()
    trial.ends_well()
    statuses = str(lab.statuses("runs"))
    assert "failed" not in statuses, "nothing failed, so nothing may say so"
    print(f"{partition}, {nodes} nodes: {time.monotonic() - began:.0f} s")


@pytest.mark.parametrize("sent", ["TERM", "USR2", "preemption"])
def test_signal_before_the_job_can_listen(lab, shell, sent):
    """Its Python takes some seconds to start, as on a busy file system."""
    folder = lab.root / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import time; time.sleep(8)")
    setup = [f"export PYTHONPATH={folder}:$PYTHONPATH"]
    trial = Trial(lab, shell, partition="grace", setup=setup, started=False)
    lab.until("runs", lambda states: states[trial.name] == "running", LONG)
    time.sleep(2.0)
    if sent == "preemption":
        trial.preempt()
    else:
        shell(f"scancel --signal {sent} {trial.number}")
    trial.ends_well(attempts=1)
    assert "Restarts=1" in shell(f"scontrol show job {trial.number}")


@pytest.mark.parametrize("nodes", [1, 2])
def test_requeue(lab, shell, nodes):
    trial = Trial(lab, shell, nodes=nodes)
    shell(f"scontrol requeue {trial.number}")
    trial.ends_well()


@pytest.mark.parametrize("nodes", [1, 2])
def test_lost_node(lab, shell, nodes):
    trial = Trial(lab, shell, nodes=nodes)
    lost = shell(f"scontrol show hostnames {trial.nodes()}").split()[-1]
    shell(f"scontrol update NodeName={lost} State=DOWN Reason=lost")
    trial.ends_well()


@pytest.mark.parametrize("nodes", [1, 2])
def test_scancel_and_run_again(lab, shell, nodes):
    trial = Trial(lab, shell, nodes=nodes)
    shell(f"scancel {trial.number}")
    lab.until("runs", lambda states: states[trial.name] == "cancelled", LONG)
    assert lab.run(trial.grid, trial.cluster, "runs") == 0
    trial.ends_well()


@pytest.mark.parametrize("nodes", [1, 2])
def test_time_limit(lab, shell, nodes):
    """Slurm's clock: one minute, told to save 20 s before; it may be up to a minute early."""
    trial = Trial(lab, shell, nodes=nodes, hours=1 / 60, steps=600)
    lab.until_done("runs", LONG)
    hows = lab.attempts("runs")[trial.name]
    assert hows[0] == "time limit", hows
    assert hows[-1] == "done", hows
    trial.equals_an_undisturbed_run()


@pytest.mark.parametrize(
    "fault", ["preemption", "user's signal", "failures", "time limit"]
)
def test_nodes_without_scontrol(lab, shell, fault):
    """Jobs there see every program but Slurm's own (submitit#1601)."""
    programs = lab.root / "programs"
    programs.mkdir()
    for file in Path("/usr/bin").iterdir():
        if file.name not in ("scontrol", "sbatch", "scancel", "squeue", "sinfo"):
            (programs / file.name).symlink_to(file)
    if fault == "failures":
        lab.dataset("d1", steps=1, fault="now and then", times=2)
    long = {}
    if fault == "time limit":
        long = {"hours": 1 / 60, "steps": 600}
    setup = [f"export PATH={programs}", "! command -v scontrol"]
    trial = Trial(lab, shell, partition="grace", setup=setup, **long)
    if fault == "preemption":
        trial.preempt()
        trial.ends_well()
    elif fault == "user's signal":
        # The warning before the time limit, sent by hand: nobody ends the job.
        shell(f"scancel --signal USR2 {trial.number}")

        def has_saved(_):
            return "preempted" in lab.attempts("runs")[trial.name]

        lab.until("runs", has_saved, LONG)
        shell(f"scontrol requeue {trial.number}")
        trial.ends_well()
    elif fault == "time limit":
        # The job ends. Who watches submits it again, and the probe.
        watch = lab.background(
            trial.grid, trial.cluster, "runs", "--watch", "--interval", "2"
        )
        _, said = watch.communicate(timeout=2 * LONG)
        assert watch.returncode == 0, said
        hows = lab.attempts("runs")[trial.name]
        assert "time limit" in hows, hows
        assert hows[-1] == "done", hows
        trial.equals_an_undisturbed_run()
    else:
        # The attempts at the probe are made one after another in one job of Slurm's.
        trial.ends_well(attempts=1)
        (probe,) = [name for name in lab.attempts("runs") if name != trial.name]
        assert lab.attempts("runs")[probe] == ["failed", "failed", "done"]
        attempts = lab.statuses("runs")[probe]["attempts"]
        assert len({attempt["place"] for attempt in attempts}) == 1
    assert os.access("/usr/bin/scontrol", os.X_OK), "there all along, for this test"
