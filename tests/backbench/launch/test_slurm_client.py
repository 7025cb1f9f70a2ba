"""Slurm's commands: how they are called, and what is made of their answers."""

import math

import pytest

from backbench.errors import BadInput, Failed
from backbench.launch import slurm_client
from backbench.launch.slurm_client import Queued


def test_a_command_that_fails_is_said_with_its_own_words(stand_in_slurm, monkeypatch):
    stand_in_slurm.says("squeue", "first\n  second\n", status=3)
    with pytest.raises(Failed, match=r"^squeue: first second$"):
        slurm_client.queue()
    stand_in_slurm.says("squeue", "", status=3)
    with pytest.raises(Failed, match=r"^squeue: exit 3$"):
        slurm_client.queue()
    (stand_in_slurm.folder / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(Failed, match=r"^squeue: no answer in 0 s; is slurmctld up\?$"):
        slurm_client.slurm("squeue", timeout_s=0.1)
    monkeypatch.setenv("PATH", str(stand_in_slurm.folder / "empty"))
    with pytest.raises(BadInput) as refused:
        slurm_client.queue()
    assert str(refused.value) == (
        "no 'squeue' here: Slurm is not installed on this machine; use --cluster local"
    )


def test_the_queue_is_read_line_by_line(stand_in_slurm):
    lines = ["12|RUNNING|None|u1", "", "nonsense", " 13_4|PENDING|(Dependency)|u2|x "]
    stand_in_slurm.says("squeue", "\n".join(lines))
    assert slurm_client.queue() == {
        "12": Queued("RUNNING", "None", "u1"),
        "13_4": Queued("PENDING", "(Dependency)", "u2|x"),
    }


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ("MaxJobCount = 10000\nMaxArraySize            = 1001\n", (1000, 10000)),
        ("MaxArraySize = 1001\n", None),
        ("xMaxArraySize = 1001\nMaxJobCount = 5\n", None),
    ],
)
def test_slurms_limits(stand_in_slurm, said, limits):
    assert slurm_client.limits() is None  # no answer
    stand_in_slurm.says("scontrol", said)
    assert slurm_client.limits() == limits


def test_a_job_goes_back_to_the_queue_also_where_that_kills_scontrol(stand_in_slurm):
    stand_in_slurm.says("scontrol", "")
    assert slurm_client.requeue("12_3")
    stand_in_slurm.says("scontrol", "no permission", status=1)
    assert not slurm_client.requeue("12_3")
    assert stand_in_slurm.called("scontrol") == ["requeue 12_3"] * 2
    (stand_in_slurm.folder / "scontrol").write_text("#!/bin/sh\nkill -KILL $$\n")
    assert slurm_client.requeue("12_3")
    (stand_in_slurm.folder / "scontrol").unlink()


def test_five_hundred_jobs_are_cancelled_at_once(stand_in_slurm):
    ids = [str(n) for n in range(1001)]
    slurm_client.end(ids)
    calls = [call.split() for call in stand_in_slurm.called("scancel")]
    assert calls == [ids[:500], ids[500:1000], ids[1000:]]
    slurm_client.end([])
    assert len(stand_in_slurm.called("scancel")) == 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("2:03", 123),
        ("1:02:03", 3723),
        ("2-01:02:03", 2 * 86400 + 3723),
        ("infinite", math.inf),
        ("UNLIMITED", math.inf),
    ],
)
def test_times_of_slurms(text, seconds):
    assert slurm_client._slurm_time(text) == seconds
