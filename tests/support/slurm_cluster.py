"""A real Slurm on loopback: munged, slurmctld and slurmd of Debian's packages in one private folder, as children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sinfo", "scancel")

CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
KillWait=3
MinJobAge=300
MaxArraySize=2001
MaxJobCount=20000
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=8000 Gres=gpu:2 Features=loop State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=02:00:00 State=UP OverSubscribe=NO
PartitionName=long Nodes={host} MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_not() -> str | None:
    """The reason why no Slurm can be started here; None where it can."""
    missing = [p for p in PROGRAMS if shutil.which(p, path=_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmctld and slurmd need root here"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def running_slurm() -> Iterator[Path]:
    """Start the three daemons; SLURM_CONF points at them inside the block. Gives their folder.

    A requeued job starts again after cred_expire seconds: more than KillWait, or the node meets the job's last
    processes, calls it "Duplicate jobid" and is drained.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    host = socket.gethostname().split(".")[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for i in range(2):
        (folder / f"fakegpu{i}").touch()
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/fakegpu[0-1]\n")
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(host=host, folder=folder, ctld_port=_free_port(), slurmd_port=_free_port())
    )
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
    ]
    munged += [
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
    commands = [
        munged,
        ["slurmctld", "-D", "-c", "-f", str(conf)],
        ["slurmd", "-D", "-c", "-N", host, "-f", str(conf)],
    ]
    old = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    os.environ |= {"SLURM_CONF": str(conf), "PATH": _path()}
    daemons = []
    with (folder / "daemons.log").open("wb") as log:
        try:
            for command in commands:
                daemon = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,  # noqa: PLW1509 - nothing else runs in this process yet
                )
                daemons.append(daemon)
                time.sleep(0.3)
            _until(lambda: "idle" in _output("sinfo", "-h", "-o", "%T"), 30, "an idle node")
            yield folder
            _output("scancel", "--full", "-u", "root")
            _until(lambda: not _output("squeue", "-h", "-o", "%i").strip(), 30, "an empty queue")
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in reversed(daemons):
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
            for name, value in old.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    shutil.rmtree(folder, ignore_errors=True)


def why_drained() -> str:
    """The reason why the node takes no more jobs, or nothing; it takes them again afterwards."""
    if "drain" not in _output("sinfo", "-h", "-o", "%T"):
        return ""
    reason = _output("sinfo", "-h", "-o", "%E").strip()
    _output("scontrol", "update", f"NodeName={socket.gethostname().split('.')[0]}", "State=RESUME")
    return reason


def _die_with_parent() -> None:
    """Linux: a killed test run leaves no daemons behind."""
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout


def _until(condition, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)
