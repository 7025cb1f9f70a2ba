"""A real Slurm on loopback: Debian's munged, slurmctld and slurmd as children, in one folder."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from backbench.runs.state import die_with_parent

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "squeue",
    "scontrol",
    "sinfo",
    "scancel",
)

CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
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
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=3
MinJobAge={min_job_age}
MaxArraySize=2001
MaxJobCount={max_jobs}
GresTypes=gpu
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=4 RealMemory=8000 \
Gres=gpu:2 Features=loop State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=02:00:00 State=UP OverSubscribe=NO
PartitionName=long Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=grace Nodes=ALL MaxTime=02:00:00 State=UP GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=02:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """The reason why no Slurm can be started here; None where it can."""
    missing = [p for p in PROGRAMS if shutil.which(p, path=_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmctld and slurmd need root here"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def free_ports(count: int = 1) -> range:
    """So many free ports in a row."""
    while True:
        # The system picks the first one; another try where the next ones are taken
        with contextlib.ExitStack() as stack:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
            ports = range(first, first + count)
            try:
                for port in ports[1:]:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return ports


@contextlib.contextmanager
def running_slurm(
    nodes: int = 1, *, max_jobs: int = 20000, min_job_age: int = 300
) -> Iterator[Path]:
    """Start Slurm with nodes n1, n2, ... on this machine; gives its folder.

    Inside, SLURM_CONF and PATH lead Slurm's commands to it.
    """
    if reason := why_not():
        pytest.skip(f"no Slurm here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    commands = _configure(folder, nodes, max_jobs=max_jobs, min_job_age=min_job_age)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PATH", _path())
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                daemons.append(_daemon(command, folder / "daemons.log"))
                time.sleep(0.3)
            _until(_all_nodes_are_idle, 60, "nodes")
            yield folder
            # slurmstepd of a job that still runs would linger after its daemon.
            output("scancel", "--full", "-u", "root")
            _until(_queue_is_empty, 60, "an empty queue")
        finally:
            _stop(daemons)
    shutil.rmtree(folder, ignore_errors=True)


def _all_nodes_are_idle() -> bool:
    return set(output("sinfo", "-h", "-o", "%T").split()) == {"idle"}


def _queue_is_empty() -> bool:
    return not output("squeue", "-h", "-o", "%i").strip()


def _configure(folder: Path, nodes: int, **settings: int) -> list[list[str]]:
    """Write what the daemons read; their commands, in the order of their start.

    cred_expire must exceed KillWait. Otherwise a requeued job meets its last processes, is called
    "Duplicate jobid", and drains the node.
    """
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)  # munged refuses a key that others may read
    # 1. Folders and files that slurm.conf names
    (folder / "state").mkdir()
    names = [f"n{i}" for i in range(1, 1 + nodes)]
    for name in names:
        (folder / "spool" / name).mkdir(parents=True)
    for i in range(2):
        (folder / f"fakegpu{i}").touch()
    (folder / "gres.conf").write_text(
        f"AutoDetect=off\nName=gpu File={folder}/fakegpu[0-1]\n"
    )
    # 2. slurm.conf
    ctld_port = free_ports()[0]
    ports = free_ports(nodes)
    text = CONF.format(
        host=socket.gethostname().split(".")[0],
        folder=folder,
        ctld_port=ctld_port,
        names=f"n[1-{nodes}]",
        ports=f"[{ports[0]}-{ports[-1]}]",
        **settings,
    )
    conf = folder / "slurm.conf"
    conf.write_text(text)
    # 3. The commands
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
    slurmctld = ["slurmctld", "-D", "-c", "-f", str(conf)]
    slurmds = [["slurmd", "-D", "-c", "-N", name, "-f", str(conf)] for name in names]
    return [munged, slurmctld, *slurmds]


def _daemon(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            # A killed test run leaves no daemons behind. One thread runs, so this is safe.
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            start_new_session=True,
        )


def _stop(daemons: list[subprocess.Popen[bytes]]) -> None:
    """End the daemons, the last one started first; all are told before any is waited for."""
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in reversed(daemons):
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()


def why_drained(*, or_down: bool = False) -> str:
    """The reason why nodes take no more jobs, or nothing; they take them again afterwards."""
    reasons = []
    for line in set(output("sinfo", "-h", "-N", "-o", "%N|%T|%E").splitlines()):
        name, state, reason = line.split("|", 2)
        is_out = "drain" in state or (or_down and "down" in state)
        if is_out:
            reasons.append(f"{name}: {reason}")
            output("scontrol", "update", f"NodeName={name}", "State=RESUME")
    return "; ".join(reasons)


def output(*command: str) -> str:
    """What a command of Slurm's says; it may fail."""
    # A signal to a node that is down is sent again and again, on a loaded machine for over a minute
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout


def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)
