"""A real Slurm on loopback: munged, slurmctld and slurmd of Debian's packages in one private
folder, as children."""

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
from collections.abc import Callable, Iterator
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
    """Start the three daemons; SLURM_CONF points at them inside the block. Gives their folder."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    commands = _configure(folder)
    with _environment(SLURM_CONF=str(folder / "slurm.conf"), PATH=_path()):
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                daemons.append(_daemon(command, folder / "daemons.log"))
                time.sleep(0.3)
            _until(lambda: "idle" in _output("sinfo", "-h", "-o", "%T"), 30, "an idle node")
            yield folder
            # slurmstepd of a job that still runs would linger after its daemon
            _output("scancel", "--full", "-u", "root")
            _until(lambda: not _output("squeue", "-h", "-o", "%i").strip(), 30, "an empty queue")
        finally:
            _stop(daemons)
    shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> list[list[str]]:
    """Write what the daemons read; their commands, in the order of start.

    A requeued job starts again after cred_expire seconds: more than KillWait, or the node meets the
    job's last processes, calls it "Duplicate jobid" and is drained.
    """
    host = socket.gethostname().split(".")[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)  # munged refuses a key that others may read
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for i in range(2):
        (folder / f"fakegpu{i}").touch()
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/fakegpu[0-1]\n")
    conf = folder / "slurm.conf"
    ports = {"ctld_port": _free_port(), "slurmd_port": _free_port()}
    conf.write_text(CONF.format(host=host, folder=folder, **ports))
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munged += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
    munged += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    return [
        munged,
        ["slurmctld", "-D", "-c", "-f", str(conf)],
        ["slurmd", "-D", "-c", "-N", host, "-f", str(conf)],
    ]


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    old = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _daemon(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - nothing else runs in this process yet
        )


def _stop(daemons: list[subprocess.Popen[bytes]]) -> None:
    """The last one started ends first; all are told before any is waited for."""
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in reversed(daemons):
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()


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


def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)
