"""Runs jobs on Slurm and submits arrays; no other file imports submitit.

How a killed job continues, from the signal to the next start:

1. Slurm sends SIGUSR2 (the time is nearly up, or preemption) or SIGTERM (the grace before a
   preemption, scancel). `SlurmTask._listen` hands it to the command, which saves and exits 75.
2. `attempt.decide` says what follows. "again": `SlurmTask._requeue` sends the job back to the queue
   under its number, so what waits for it goes on waiting. "stopped": `_await_end` first asks Slurm.
   Without scontrol, Slurm's own kill requeues the job, or the next attempt begins in it.
3. A lost node or `scontrol requeue` give no word. Slurm starts the job anew by itself (`requeue`
   in `_parameters`); `Attempt._begin` notes that the attempt before was killed.
4. The job starts: the same pickle, the same command, the same folder, whose state it continues
   (`backbench.pretrain.train.SavedState`).
5. Nothing started it: it is `stopped` by SIGTERM at the time limit, or after any time limit on a
   node without scontrol; `lost` after a kill -9 of this process. `launch run` submits it again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from backbench.errors import EXIT_PREEMPTED, BadInput, Failed
from backbench.launch import slurm_client
from backbench.launch.attempt import Attempt, Ending
from backbench.launch.clusters import Cluster, recorded_cluster
from backbench.launch.job import Job
from backbench.launch.plan import arrays
from backbench.launch.records import Ledger, Submission
from backbench.launch.view import Snapshot
from backbench.runs import atomic
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

# submitit counts the time limits that it lets a job continue after; ours are counted by `attempt.decide`
TIME_LIMITS = 1_000_000
# After SIGTERM, with the state saved, wait this long for Slurm to end the job, then go on in it:
# where Slurm can be asked, and where it cannot (longer than most graces before a preemption)
LOOK_S = 60.0
GRACE_S = 900.0
# Slurm looks at the clock once a minute, so its warning may come that much too early
CLOCK_S = 60.0
MEET_S = 180.0  # until task 0 begins; for half of it, it may wait for the job's lock
ADDRESS_FILE = (
    "address.json"  # where task 0 waits for the others; empty where it began nothing
)

# A signal that comes while Python still starts kills it, which Slurm takes for a failed job. This
# line of the job's script sends such a job back to the queue, if it still counts as running (after
# scancel it does not). Without scontrol it waits for Slurm's kill, which requeues the job.
# 138, 140, 143: srun's exit status for a task that died of SIGUSR1, SIGUSR2, SIGTERM.
EARLY_SIGNAL = (
    'BACKBENCH_JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}";'
    " trap 'case $? in 138|140|143) if ! command -v scontrol > /dev/null; then sleep 900;"
    ' elif scontrol show job "$BACKBENCH_JOB" | grep -q JobState=RUNNING; then'
    ' scontrol requeue "$BACKBENCH_JOB" && sleep 60; fi;; esac\' EXIT'
)


@dataclass
class SlurmTask(Attempt):
    """One task of a Slurm job, run by submitit. Task 0 keeps the status; the others run their rank,
    save at a signal and end. The outcome is "again" after SIGUSR2; after SIGTERM "stopped", or
    "cancelled" under our mark (`_await_end` asks Slurm what is meant). We never end the job: Slurm
    would call it failed and block what waits for it."""

    limit_s: float | None = None  # Slurm keeps it

    _began = 0.0  # by the monotonic clock: when Slurm started this process
    _got_usr2 = False  # the user's signal came: Slurm wants the place

    @classmethod
    def on(cls, cluster: Cluster, job: Job, ledger: Ledger) -> Self:
        task = super().on(cluster, job, ledger)
        resources = cluster.resources_for(job)
        task.tasks, task.limit_s = (
            resources.nodes * resources.tasks_per_node,
            resources.limit_s,
        )
        return task

    def __call__(self) -> str:
        """Run the job: submitit calls this in every task."""
        import submitit

        self._began = time.monotonic()
        environment = submitit.JobEnvironment()
        self.place = f"slurm:{environment.job_id}"
        self._listen()
        # Several tasks: the first finds a port, and alone keeps the status; the others follow
        if self.tasks > 1 and environment.global_rank:
            self._rank = environment.global_rank
            return self._follow()
        try:
            while (outcome := self.run()) != "done":
                if not self._begins_again_here(outcome):
                    reason = self.ledger.status(self.job).get("reason")
                    raise Failed(f"{self.job.name}: {outcome}: {reason}")
                self.__post_init__()  # as new: `run` counts the attempts by the status file
                self._listen()
        finally:
            if (
                self.tasks > 1 and self._child is None
            ):  # cancelled, say: the others need not wait
                with contextlib.suppress(OSError):
                    atomic.write_json(self._folder() / ADDRESS_FILE, {})
        return outcome

    def _listen(self) -> None:
        signal.signal(
            signal.SIGTERM, lambda *_: self.ask_to_stop("stopped", signal.SIGTERM)
        )
        # Instead of submitit's handler, which needs scontrol and ends the job without it
        signal.signal(signal.SIGUSR2, lambda *_: self._wanted_back())

    def _wanted_back(self) -> None:
        self._got_usr2 = True
        self.ask_to_stop("time limit" if self._late() else "preempted")

    def checkpoint(self) -> DelayedSubmission:
        """Hand submitit, at a signal before `__call__`, the job as it is: nothing has begun."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _late(self) -> bool:
        """Say whether SIGUSR2 is the warning before the time limit, by when the job began."""
        if self.limit_s is None:
            return False
        return time.monotonic() > self._began + self.limit_s - self.grace_s - CLOCK_S

    # The end of an attempt that is not done: everything is saved, the place is Slurm's

    def _begins_again_here(self, outcome: str) -> bool:
        """Say whether the next attempt begins in this very job; else Slurm ends or restarts it.
        That is for jobs of one task: where there are several, the others have ended."""
        if outcome not in ("stopped", "again"):
            return False
        late = self._late()
        how = self._status["attempts"][-1].get("how")
        # 1. With scontrol: back to the queue
        if outcome == "again" and self._requeue():
            return False
        # 2. Somebody wants the place: wait for what Slurm does about it
        if how in ("stopped", "preempted") and self._await_end():
            return False
        # 3. Nobody does: the signal was sent by hand, or the attempt failed
        if self.tasks > 1:
            self._requeue()
            return False
        return not late

    def _await_end(self) -> bool:
        """Wait until Slurm kills this process, ends or requeues the job (True), or does neither
        (False). After scancel, a requeue or a node failure it is COMPLETING: this process ends, as
        lingering beyond the new start would drain the node. In a grace before preemption it is
        RUNNING with a PreemptTime: it is requeued at once, which ends the grace early."""
        began = time.monotonic()
        while True:
            now = slurm_client.own_standing()
            if now == "ending":
                return True
            if (self._got_usr2 or now == "preempted") and self._requeue():
                return True
            # Without an answer, wait for as long as a grace may be
            if time.monotonic() - began > (GRACE_S if now is None else LOOK_S):
                return False
            time.sleep(1.0)

    def _requeue(self) -> bool:
        """Send the job back to the queue, which ends this process; False where that fails."""
        # Nothing is left to save, and a job that lingers beyond its requeue drains the node. So
        # the SIGTERM that the requeue brings ends this process at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not slurm_client.requeue_this():
            return False
        time.sleep(60)
        return True

    # Several tasks

    def _folder(self) -> Path:
        """Return the folder in which the tasks of this start of this job meet."""
        start = (
            f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        )
        return self.ledger.root / "meet" / f"{self.job.key}-{start}"

    def _start_child(self, lock: int | None = None) -> None:
        """Begin; task 0 first tells the others of a free port of its node, new in each start."""
        if self.tasks > 1 and self._rank == 0:
            # The system is asked for a free port, which is given back: nobody else takes it so soon
            one_node = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) == 1
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            host = "127.0.0.1" if one_node else socket.gethostname()
            address = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
            atomic.write_json(self._folder() / ADDRESS_FILE, address)
            self.env |= address
        super()._start_child(lock)

    def _environment(self) -> dict[str, str]:
        """Add Slurm's variables for the ranks of one job: they tell each its rank."""
        environment = super()._environment()
        if self.tasks > 1:
            for key, value in os.environ.items():
                if key.startswith("SLURM"):
                    environment[key] = value
        return environment

    def _follow(self) -> str:
        """Run a rank but the first: without status or retries; task 0 finds its failure in a file."""
        file = self._folder() / ADDRESS_FILE
        end = time.monotonic() + MEET_S
        while not file.exists():
            if time.monotonic() > end:
                raise Failed(
                    f"rank {self._rank}: task 0 did not begin within {MEET_S:.0f} s"
                )
            time.sleep(0.1)
        if not (address := json.loads(file.read_text())):
            return f"rank {self._rank}: task 0 had nothing to begin"
        self.env |= address
        self._start_child()
        code = self._wait()
        how, reason = (
            self._meaning(code) if code not in (0, EXIT_PREEMPTED) else ("", "")
        )
        if how in ("failed", "bad input"):
            failure = Ending(how, f"rank {self._rank}: {reason}")
            atomic.write_json(self._folder() / f"failed-{self._rank}", failure)
        return f"rank {self._rank}: exit {code}"

    def _sibling_failure(self) -> Ending | None:
        if self.tasks == 1 or self._rank:
            return None
        file = next(self._folder().glob("failed-*"), None)
        return None if file is None else Ending(*json.loads(file.read_text()))


# --- submission --------------------------------------------------------------------------------


def submit(
    ledger: Ledger,
    cluster: Cluster,
    grid: str,
    jobs: Sequence[Job],
    active: Mapping[str, str],
) -> int:
    """Submit a grid's jobs as arrays; return how many. `active`: job name -> number of those on
    Slurm already. Failed where Slurm takes only some; those run."""
    # For every array: on record, to Slurm, its numbers on record. A launcher that dies in between
    # leaves an array that the next one recognises (`Snapshot`) and completes (`adopt`).
    ids = dict(active)
    array_ids: list[str] = []
    went = 0  # jobs that Slurm has taken
    planned = list(arrays(cluster, _reachable(jobs, active)))
    sizes = [len(array.jobs) for array in planned]
    room = _room(cluster, sizes)
    for _, part, needs, after in planned:
        uid = uuid.uuid4().hex[:12]
        submission = Submission.to(cluster, grid, uid, part)
        # Single jobs that must succeed; whole arrays that should be over, well or not
        wait_for = [f"afterok:{ids[name]}" for name in needs if name in ids]
        wait_for += [f"afterany:{array_ids[earlier]}" for earlier in after]
        try:
            if went + len(part) > room:
                raise Failed(
                    f"Slurm's limit MaxJobCount leaves room for {room - went:.0f} jobs"
                )
            ledger.write_submission(submission)
            numbers = _sbatch(ledger, cluster, submission, ",".join(wait_for))
        except Failed as error:
            if not went and "limit" not in str(error).lower():
                raise
            later = "run this again later for the others"
            raise Failed(
                f"{error}; {went} of {sum(sizes)} jobs went: {later}"
            ) from None
        ledger.write_submission(replace(submission, ids=tuple(numbers)))
        went += len(part)
        ids |= {job.name: number for job, number in zip(part, numbers)}
        array_ids.append(numbers[0].split("_")[0])
    return len(array_ids)


def _room(cluster: Cluster, sizes: Sequence[int]) -> float:
    """Return how many jobs Slurm takes now. BadInput for an array that it never would. sbatch
    itself would try for two minutes, in silence, and then not say why."""
    limits = slurm_client.limits() if sizes else None
    if limits is None:
        return math.inf
    in_array, in_memory = limits
    largest = max(sizes)
    for most, name in ((in_array, "MaxArraySize"), (in_memory, "MaxJobCount")):
        if largest > most:
            limit = f"this Slurm takes at most {most} ({name}); lower max_array"
            raise BadInput(f"{cluster.file}: an array of {largest} jobs, and {limit}")
    there = slurm_client.slurm("squeue", "-h", "-r", "-t", "all", "-o", "%i")
    return max(0, in_memory - len(there.split()))


def _reachable(jobs: Sequence[Job], active: Mapping[str, str]) -> list[Job]:
    """Leave out the jobs that need one which this Slurm does not know and is not given now."""
    here: dict[str, Job] = {}
    for job in jobs:  # needs come earlier in the list
        elsewhere = [
            name for name in job.needs if name not in active and name not in here
        ]
        if elsewhere:
            needed = f"{elsewhere[0]}, which is not on this Slurm"
            log.info(f"left out: {job.name} waits for {needed}; run this again later")
        else:
            here[job.name] = job
    return list(here.values())


# Words of sbatch that leave open whether the array was taken
_UNSURE = re.compile("timed? ?out|unable to contact|connect|communicat", re.IGNORECASE)


def _sbatch(
    ledger: Ledger, cluster: Cluster, submission: Submission, dependency: str
) -> list[str]:
    """Submit one array; returns Slurm's numbers, one per job. Failed where Slurm has none of it."""
    import submitit

    executor = submitit.SlurmExecutor(
        ledger.submitit(submission), max_num_timeout=TIME_LIMITS
    )
    executor.update_parameters(**_parameters(cluster, submission, dependency))
    try:
        jobs = executor.submit_array(
            [SlurmTask.on(cluster, j, ledger) for j in submission.jobs]
        )
    except (
        submitit.core.utils.FailedJobError,
        submitit.core.utils.FailedSubmissionError,
    ) as error:
        words = (
            str(error).strip().rpartition("\n")[2].strip()
        )  # sbatch's own words come last
    else:
        return [job.job_id for job in jobs]
    # sbatch failed. Slurm may have taken the array all the same, and only its answer was lost
    snapshot = Snapshot(ledger)
    for numbered in snapshot.unnumbered:
        if numbered.uid == submission.uid:
            adopt(ledger, numbered, cluster)
            return list(numbered.ids)
    # The record stays where nobody can tell yet: the next launcher finds the array by its comment,
    # or submits its jobs again
    if not snapshot.trouble and not _UNSURE.search(words):
        ledger.submission_file(submission).unlink(missing_ok=True)
    raise Failed(f"sbatch refused {submission.jobs[0].like}: {words}")


def _parameters(
    cluster: Cluster, submission: Submission, dependency: str
) -> dict[str, object]:
    """Return sbatch's options in submitit's names, without those that nobody asked for."""
    resources = cluster.resources_for(submission.jobs[0])
    parameters: dict[str, object] = {
        "job_name": f"backbench-{submission.grid}",
        "comment": submission.uid,  # by which a launcher recognises an array that has no number yet
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "cpus_per_task": resources.cpus,
        # From Slurm 22.05 on, srun no longer takes over sbatch's
        "srun_args": [f"--cpus-per-task={resources.cpus}"],
        "gpus_per_node": resources.gpus or None,
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "mem": f"{math.ceil(resources.memory_gb * 1024)}M"
        if resources.memory_gb
        else None,
        "time": math.ceil(resources.hours * 60) if resources.hours else None,
        "signal_delay_s": int(cluster.grace_s(resources)),
        "array_parallelism": cluster.jobs,
        "setup": [*cluster.setup, EARLY_SIGNAL],
        "dependency": dependency or None,
        "stderr_to_stdout": True,
        "additional_parameters": {
            "requeue": True,
            "kill-on-invalid-dep": "yes",
            **cluster.sbatch,
        },
    }
    return {key: value for key, value in parameters.items() if value is not None}


# --- records that only a launcher that acts writes ---------------------------------------------


def catch_up(ledger: Ledger, given: Cluster | None = None) -> Snapshot:
    """Take a snapshot and record what Slurm soon forgets. `given`: the command line's cluster."""
    snapshot = Snapshot(ledger)
    for submission in snapshot.unnumbered:
        try:
            cluster = recorded_cluster(
                submission.cluster, submission.cluster_overrides, given
            )
        except BadInput as error:
            log.warning(f"array {submission.ids[0]}: {error}")
        else:
            adopt(ledger, submission, cluster)
    # Who was cancelled: squeue shows it for some minutes only
    for name, record in snapshot.records.items():
        status = snapshot.status(name)
        if snapshot.states[name].name == "cancelled" and status["state"] != "cancelled":
            ledger.write_status(
                record.job, {**status, "state": "cancelled", "reason": None}
            )
    return snapshot


def adopt(ledger: Ledger, submission: Submission, cluster: Cluster) -> None:
    """Complete the record of an array whose launcher died during sbatch; the snapshot found its
    numbers by the comment. submitit moves its pickles to the jobs' numbers only after sbatch: jobs
    wait for those that are missing, so they are made anew. The record comes last: a launcher that
    dies before loses nothing."""
    import submitit

    folder = ledger.submitit(submission)
    for job_id, job in zip(submission.ids, submission.jobs):
        path = submitit.core.utils.JobPaths(folder, job_id=job_id).submitted_pickle
        if not path.exists():
            task = SlurmTask.on(cluster, job, ledger)
            delayed = submitit.helpers.DelayedSubmission(task)
            delayed.set_timeout(math.ceil((task.limit_s or 300) / 60), TIME_LIMITS)
            with atomic.atomic_path(path) as temporary:
                delayed.dump(temporary)
    ledger.write_submission(submission)
