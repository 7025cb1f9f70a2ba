"""The processes of a run: where they sit, how they meet, and how they end together.

The ranks of these tests are forks: a spawned one would import torch for seconds.
"""

import datetime
import json
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from backbench.detection import process_group
from backbench.detection.dialect import DEVICE_KEY
from backbench.detection.process_group import Seat
from backbench.detection.run import DetectionRun
from backbench.errors import BadInput, Failed
from backbench.runs.state import StopFlag


def run_of(out, *, device="cpu", **more):
    given = {DEVICE_KEY: device}
    fixed = {"cfg": None, "task": None, "engine": "torchvision", "checkpoint": None}
    return DetectionRun(given=given, **fixed, root=out, out=out / "run", **more)


@pytest.fixture
def forks(monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(process_group.mp, "get_context", lambda _: fork)
    monkeypatch.setattr(process_group, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.02)


def tell(run, seat, **what):
    """Leave what a rank saw where the test finds it."""
    (run.root / f"rank{seat.rank}.json").write_text(json.dumps(what))


def told(run):
    files = sorted(run.root.glob("rank*.json"))
    return {int(file.stem[4:]): json.loads(file.read_text()) for file in files}


def adds_up(run, seat):
    with process_group.joined(run, seat):
        total = torch.tensor([seat.rank + 1.0])
        dist.all_reduce(total)
        process_group.barrier()
        train, val = process_group.handed_over(run)
        size = dist.get_world_size()
        tell(
            run,
            seat,
            sum=total.item(),
            local=seat.local,
            world=size,
            splits=train + val,
        )
    assert not dist.is_initialized()
    return 0


def test_ranks_meet_and_get_the_splits_that_were_read_once(tmp_path, forks):
    run = run_of(tmp_path, world=2)
    with process_group.handing_over(run, ["train"], ["val"]):
        process_group.spawn(adds_up, run)
    same = {"sum": 3.0, "world": 2, "splits": ["train", "val"]}
    assert told(run) == {0: {**same, "local": 0}, 1: {**same, "local": 1}}
    assert list(run.out.iterdir()) == []  # the splits were there while they ran


def sits(run, seat):
    about = {"local": seat.local, "url": seat.url, "parent": seat.parent}
    tell(run, seat, **about, threads=torch.get_num_threads())
    return 0


def test_ranks_of_the_second_machine(tmp_path, forks, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    url = "tcp://first:4711"
    run = run_of(tmp_path, world=4, machines=2, machine=1, dist_url=url)
    process_group.spawn(sits, run)
    about = {"url": url, "parent": os.getpid(), "threads": 3}
    assert told(run) == {2: {"local": 0, **about}, 3: {"local": 1, **about}}


def has_a_gpu(run, seat):
    tell(run, seat, device=placed_on, threads=torch.get_num_threads())
    return 0


placed_on = []  # in a rank's own process


def test_each_rank_has_a_gpu_of_its_machine(tmp_path, forks, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", placed_on.append)
    about = {"device": "auto", "world": 4, "machines": 2, "machine": 1}
    run = run_of(tmp_path, **about)
    process_group.spawn(has_a_gpu, run)
    threads = torch.get_num_threads()
    assert told(run) == {
        2: {"device": [0], "threads": threads},
        3: {"device": [1], "threads": threads},
    }
    assert placed_on == []


def test_machines_that_share_a_folder_hand_over_in_files_of_their_own(tmp_path):
    first = run_of(tmp_path, world=4, machines=2)
    second = run_of(tmp_path, world=4, machines=2, machine=1)
    with (
        process_group.handing_over(first, ["first"], []),
        process_group.handing_over(second, ["second"], []),
    ):
        assert process_group.handed_over(first) == (["first"], [])
        assert process_group.handed_over(second) == (["second"], [])


def ends_as_its_machine_says(run, seat):
    """Rank N ends with the Nth status; one of -1 kills itself, one of -2 waits for ever."""
    status = run.dataset.split()[seat.rank]
    if status == "-1":
        os.kill(os.getpid(), signal.SIGKILL)
    if status == "-2":
        time.sleep(600)
    return int(status)


@pytest.mark.parametrize(
    ("ends", "status"),
    [("0 2", 2), ("1 2", 2), ("1 75", 75), ("0 -1", 1), ("-2 1", 1), ("-2 -1", 1)],
)
def test_the_run_ends_with_the_status_that_says_most(tmp_path, forks, ends, status):
    run = run_of(tmp_path, world=2, dataset=ends)
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        process_group.spawn(ends_as_its_machine_says, run)
    assert ended.value.code == status
    assert time.monotonic() - began < 300  # nobody waits for one that does not come


def stops_when_told(run, seat):
    with StopFlag() as stop:
        tell(run, seat)
        if seat.rank == 0:
            while len(list(run.root.glob("rank*.json"))) < 2:
                time.sleep(0.01)
            os.kill(seat.parent, signal.SIGTERM)
        while not stop.requested:
            time.sleep(0.01)
        first = stop.requested_at
        time.sleep(0.1)
        tell(run, seat, twice=stop.requested_at != first)
    return 75


def test_a_signal_reaches_every_rank_once(tmp_path, forks):
    run = run_of(tmp_path, world=2)
    with pytest.raises(SystemExit) as ended:
        process_group.spawn(stops_when_told, run)
    assert ended.value.code == 75
    assert told(run) == {0: {"twice": False}, 1: {"twice": False}}


def test_a_rank_whose_parent_has_ended_does_nothing(tmp_path, monkeypatch):
    bound = []
    monkeypatch.setattr(process_group, "die_with_parent", lambda: bound.append(1))
    seat = Seat(rank=0, local=0, url="", parent=os.getpid(), log_level=20)
    with pytest.raises(SystemExit) as ended:
        process_group._child(lambda *_: pytest.fail("it ran"), run_of(tmp_path), seat)
    assert ended.value.code == 1
    assert bound == [1]  # and where the parent ends later, the rank ends with it


# Which device, and how many machines


@pytest.mark.parametrize(
    ("device", "here", "count"),
    [("auto", 3, 3), ("cuda", 3, 3), ("cpu", 3, 0), ("auto", 0, 0), ("cpu", 0, 0)],
)
def test_how_many_gpus_a_run_may_use(tmp_path, monkeypatch, device, here, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    given = run_of(tmp_path, device=device).given
    assert process_group.gpus(given) == count
    kind = "cuda:2" if count else "cpu"
    assert process_group.device_of(given, 2) == torch.device(kind)


@pytest.mark.parametrize(("device", "here"), [("cuda", 0), ("cuda:1", 3), ("tpu", 3)])
def test_a_device_that_is_none_is_named(tmp_path, monkeypatch, device, here):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    with pytest.raises(BadInput, match=f"{device}: auto, cpu or cuda, of which {here}"):
        process_group.gpus(run_of(tmp_path, device=device).given)


@pytest.fixture
def slurm(monkeypatch):
    """slurm(tasks, rank, local): be a task that `backbench launch` has started."""
    for key in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "MASTER_ADDR"):
        monkeypatch.delenv(key, raising=False)

    def task(tasks, rank, local):
        monkeypatch.setenv("SLURM_NTASKS", str(tasks))
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_LOCALID", str(local))
        monkeypatch.setenv("MASTER_ADDR", "node7")
        monkeypatch.setenv("MASTER_PORT", "4711")

    return task


def test_one_machine_needs_no_place_to_meet(tmp_path, slurm):
    run = process_group.over_machines(run_of(tmp_path, world=3), 1, 0, "")
    assert (run.world, run.machines, run.machine, run.task_rank) == (3, 1, 0, None)


def test_two_machines_meet_at_the_first(tmp_path, slurm):
    url = "tcp://node1:4711"
    run = process_group.over_machines(run_of(tmp_path, world=3), 2, 1, url)
    assert (run.world, run.machines, run.machine) == (6, 2, 1)
    assert run.dist_url == url
    assert not run.leads


def test_a_task_of_slurms_is_a_rank(tmp_path, slurm, monkeypatch):
    slurm(6, 4, 1)
    placed = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", placed.append)
    run = run_of(tmp_path, device="auto", world=3)
    run = process_group.over_machines(run, 2, 0, "")
    assert run.dist_url == "tcp://node7:4711"
    assert (run.task_rank, run.local_rank) == (4, 1)
    seat = process_group.seat_of_task(run)
    assert (seat.rank, seat.local, seat.url) == (4, 1, "tcp://node7:4711")
    assert (seat.parent, seat.log_level) == (os.getppid(), process_group.log.level)
    assert placed == [1]


def test_a_task_alone_is_no_rank(tmp_path, slurm):
    """Slurm's variables stand in the environment of an allocation's shell as well."""
    slurm(1, 0, 0)
    run = process_group.over_machines(run_of(tmp_path), 1, 0, "")
    assert (run.task_rank, run.dist_url) == (None, "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((2, 2, "tcp://a:1"), "--machine-rank 2: from 0 to --num-machines 2 - 1"),
        ((1, -1, ""), "--machine-rank -1"),
        ((2, 0, ""), "--num-machines 2: where do they meet"),
        ((2, 0, "http://a:1"), "--dist-url http://a:1: give tcp://HOST:PORT"),
        ((2, 0, "tcp://a"), "--dist-url tcp://a: give"),
        ((2, 0, "tcp://a:0"), "--dist-url tcp://a:0: give"),
        ((2, 0, "tcp://a:65536"), "--dist-url tcp://a:65536: give"),
    ],
)
def test_flags_that_do_not_fit_are_said(tmp_path, slurm, flags, says):
    with pytest.raises(BadInput, match=says):
        process_group.over_machines(run_of(tmp_path), *flags)


@pytest.mark.parametrize("port", [1, 65535])
def test_every_port_there_is_may_be_named(tmp_path, slurm, port):
    run = process_group.over_machines(run_of(tmp_path), 2, 0, f"tcp://a:{port}")
    assert run.dist_url == f"tcp://a:{port}"


def test_tasks_that_are_not_the_ranks_are_said(tmp_path, slurm):
    slurm(4, 1, 1)
    says = "Slurm has started 4 tasks, --num-gpus times --num-machines is 6"
    with pytest.raises(BadInput, match=says):
        process_group.over_machines(run_of(tmp_path, world=3), 2, 0, "")


# Waiting for rank 0


@pytest.fixture
def rank_0_is_gone(monkeypatch):
    def check(keys):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(process_group, "_meeting", [SimpleNamespace(check=check)])


def test_who_waits_for_a_rank_that_has_ended_is_told(rank_0_is_gone):
    with pytest.raises(Failed, match="rank 0 has ended before its work was done"):
        process_group.wait_until(lambda: False)


def test_the_last_file_of_a_rank_that_has_ended_counts(rank_0_is_gone):
    looks = iter([False, True])
    process_group.wait_until(lambda: next(looks))


def test_a_wait_lasts_until_the_work_is_done(monkeypatch):
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(process_group, "_meeting", [SimpleNamespace(check=lambda _: 0)])
    looks = iter([False, False, False, True])
    process_group.wait_until(lambda: next(looks))
    assert next(looks, None) is None


@pytest.mark.parametrize(("here", "backend"), [(2, "nccl"), (0, "gloo")])
def test_ranks_meet_where_the_first_one_listens(tmp_path, monkeypatch, here, backend):
    did = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    monkeypatch.setattr(dist, "TCPStore", lambda *where: where)
    monkeypatch.setattr(
        dist, "init_process_group", lambda kind, **how: did.append((kind, how))
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: did.append("left"))
    run = run_of(tmp_path, device="auto", world=4)
    patience = datetime.timedelta(minutes=30)
    for rank in (0, 3):
        seat = Seat(rank=rank, local=1, url="tcp://[::1]:4711", parent=1, log_level=20)
        store = ("[::1]", 4711, 4, rank == 0, patience)
        with process_group.joined(run, seat):
            assert process_group._meeting == [store]
        how = {"store": store, "rank": rank, "world_size": 4, "timeout": patience}
        assert did == [(backend, how), "left"]
        assert process_group._meeting == []
        did.clear()


def test_an_address_without_a_port_is_said(tmp_path, slurm, monkeypatch):
    slurm(6, 4, 1)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(BadInput, match="MASTER_PORT is not; export a free port"):
        process_group.over_machines(run_of(tmp_path, world=3), 2, 0, "")
