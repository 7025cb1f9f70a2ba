"""The launcher on Slurm, through submitit: what a job runs there, and how arrays are submitted.

The only file that imports submitit.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, ClassVar, Self

from backbench.errors import EXIT_PREEMPTED, BadInput, Failed
from backbench.launch import slurm_client, stored
from backbench.launch.attempt import Attempt
from backbench.launch.caps import Caps
from backbench.launch.clusters import Cluster
from backbench.launch.job import Job
from backbench.launch.plan import arrays
from backbench.launch.records import Ledger, Submission, Target
from backbench.launch.verdict import Ending
from backbench.launch.view import Snapshot
from backbench.runs import atomic
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

# submitit counts the time limits that it lets a job continue after; ours are counted by `Attempt`
TIME_LIMITS = 1_000_000
# After SIGTERM, with the state saved: so long until a job that nobody ends goes on. By what Slurm
# says of it; and where it cannot be asked, longer than the grace before a preemption is as a rule.
LOOK_S = 60.0
GRACE_S = 900.0


# A signal that comes while Python still starts kills it: to Slurm a failed job, in the midst of a
# preemption's grace. This line of the job's script sends it back to the queue, where it still counts
# as running (after scancel it does not). Without scontrol it waits for Slurm's kill, which does that.
# 138, 140, 143: what srun says of a task that died of SIGUSR1, SIGUSR2, SIGTERM.
EARLY_SIGNAL = (
    'BACKBENCH_JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}";'
    " trap 'case $? in 138|140|143) if ! command -v scontrol > /dev/null; then sleep 900;"
    ' elif scontrol show job "$BACKBENCH_JOB" | grep -q JobState=RUNNING; then'
    ' scontrol requeue "$BACKBENCH_JOB" && sleep 60; fi;; esac\' EXIT'
)


@dataclass
class SlurmTask(Attempt):
    """One task of a Slurm job, run by submitit. Task 0 keeps the status; the others run their rank.

    What reaches task 0 from outside, and what follows:

        SIGUSR2   the time is nearly up (`signal_s` before it), or preemption where Slurm sends the
                  user's signal. The child saves, the outcome is "again".
        SIGTERM   the start of a grace before preemption, scancel, a node that is shut down. The
                  child saves, the outcome is "stopped", or "cancelled" under our mark. What Slurm
                  has in mind it says itself (`_await_end`); never is the job ended by us, which
                  would be a failed job to Slurm and block what waits for it.
        SIGKILL, a lost node, `scontrol requeue`   no word: the job starts anew, and its command
                  continues from its own files.

    "again", also after a failure with hope: the job is requeued (`scontrol requeue`), so that it
    keeps its number and what waits for it. A node without scontrol cannot: there the next attempt
    begins in the same job, as long as it has time. The other tasks save at a signal and end.
    """

    tasks: int = 1

    _began = 0.0  # by the monotonic clock: when Slurm started this process
    _told = False  # whether the user's signal came: Slurm wants the place

    watches_clock: ClassVar[bool] = False  # Slurm does

    @classmethod
    def on(cls, cluster: Cluster, job: Job, ledger: Ledger) -> Self:
        task = super().on(cluster, job, ledger)
        task.tasks = cluster.asks(job).tasks
        return task

    def __call__(self) -> str:
        """What submitit runs in every task of the job."""
        import submitit

        self._began = time.monotonic()
        environment = submitit.JobEnvironment()
        self.place = f"slurm:{environment.job_id}"
        self._rank = environment.global_rank if self.tasks > 1 else 0
        self._listen()
        # Several tasks: the first finds a port, and alone keeps the status; the others follow
        if self.tasks > 1:
            self._meet()
        if self._rank:
            return self._follow()
        while (outcome := self.run()) != "done":
            if not self._begins_again_here(outcome):
                reason = self.ledger.status(self.job).get("reason")
                raise Failed(f"{self.job.name}: {outcome}: {reason}")
            self.__post_init__()  # as new: `run` counts the attempts by the status file
            self._listen()
        return outcome

    def _listen(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.ask_to_stop("stopped", signal.SIGTERM))
        # Instead of submitit's handler, which needs scontrol and ends the job without it
        signal.signal(signal.SIGUSR2, self._on_users_signal)

    def _on_users_signal(self, *_: object) -> None:
        self._told = True
        self.ask_to_stop("time limit" if self._late() else "preempted")

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit at a signal before `__call__`: nothing has begun."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _late(self) -> bool:
        """Whether SIGUSR2 is the warning before the time limit, by when the job began.

        Slurm looks at the clock once a minute, so its signal may come that much too early.
        """
        if self.limit_s is None:
            return False
        return time.monotonic() > self._began + self.limit_s - self.grace_s - 60

    # The end of an attempt that is not done: everything is saved, the place is Slurm's

    def _begins_again_here(self, outcome: str) -> bool:
        """Whether the next attempt begins in this very job; else Slurm ends it or starts it anew.

        That is for jobs of one task: of several, the others have ended.
        """
        if outcome not in ("stopped", "again"):
            return False
        alone, late = self.tasks == 1, self._late()
        how = self._status["attempts"][-1].get("how")
        if outcome == "again" and self._requeue():
            return False
        # Somebody wants the place: without scontrol, Slurm's kill says so, and requeues the job
        if how in ("stopped", "preempted") and self._await_end():
            return False
        # Nobody did: the signal came by hand
        if not alone:
            self._requeue()
            return False
        return not late

    def _await_end(self) -> bool:
        """Wait until Slurm kills this process, or no longer counts the job as running (True).

        After scancel, a requeue or a node failure it is COMPLETING, and lingering beyond the
        job's new start would drain the node: this process ends. In a grace before preemption it is
        RUNNING with a PreemptTime: it is requeued at once, which ends the grace early. False where
        neither comes.
        """
        began = time.monotonic()
        while True:
            found = slurm_client.standing(slurm_client.own_number())
            if found is not None and not found.running:
                return True
            wanted = self._told or (found is not None and found.preempted)
            if wanted and self._requeue():
                return True
            # Who cannot ask must wait for as long as a grace may be
            if time.monotonic() - began > (GRACE_S if found is None else LOOK_S):
                return False
            time.sleep(1.0)

    def _requeue(self) -> bool:
        """`scontrol requeue`, and the end that it brings; False where it is not to be had."""
        # Nothing is left to save; and where a job lingers beyond its requeue, Slurm drains the
        # node. So SIGTERM, which the requeue brings, ends this process at once.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not slurm_client.requeue(slurm_client.own_number()):
            return False
        time.sleep(60)
        return True

    # Several tasks

    def _folder(self) -> Path:
        """Where the tasks of this start of this job meet."""
        start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        return self.ledger.root / "meet" / f"{self.job.key}-{start}"

    def _meet(self) -> None:
        """Agree on a free port of task 0's node; a requeued job finds one anew."""
        file = self._folder() / "address.json"
        # Found by asking the system for one and giving it back: nobody else takes it so soon
        if self._rank == 0:
            one_node = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) == 1
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            address = {"host": "127.0.0.1" if one_node else socket.gethostname(), "port": port}
            atomic.write_json(file, address)
        else:
            end = time.monotonic() + 120
            while not file.exists():
                if time.monotonic() > end:
                    raise Failed(f"rank {self._rank}: task 0 did not come up within 120 s")
                time.sleep(0.1)
            address = json.loads(file.read_text())
        self.env |= {"MASTER_ADDR": str(address["host"]), "MASTER_PORT": str(address["port"])}

    def _environment(self) -> dict[str, str]:
        """The ranks of one job see Slurm's variables: they tell which rank each of them is."""
        environment = super()._environment()
        if self.tasks > 1:
            for key, value in os.environ.items():
                if key.startswith("SLURM"):
                    environment[key] = value
        return environment

    def _follow(self) -> str:
        """A rank but the first: no status, no retries; a failure is left for task 0 to find."""
        self._start_child()
        code = self._wait()
        if code not in (0, EXIT_PREEMPTED):
            how, reason = self._meaning(code)
            if how in ("failed", "bad input"):
                failure = {"how": how, "reason": f"rank {self._rank}: {reason}"}
                atomic.write_json(self._folder() / f"failed-{self._rank}", failure)
        return f"rank {self._rank}: exit {code}"

    def _has_peers(self) -> bool:
        return self.tasks > 1

    def _sibling_failure(self) -> Ending | None:
        if self.tasks == 1 or self._rank:
            return None
        for file in self._folder().glob("failed-*"):
            failure = json.loads(file.read_text())
            return Ending(failure["how"], failure["reason"])
        return None


def submit(ledger: Ledger, target: Target, jobs: Sequence[Job], active: Mapping[str, str]) -> int:
    """Submit the jobs as arrays; returns how many arrays.

    Each is on record before Slurm hears of it. `active`: name -> number of the jobs that are on
    Slurm already. Failed where Slurm takes only some of them: those run, the others are for later.
    """
    # For every array: on record, to Slurm, its numbers on record. A launcher that dies in between
    # leaves an array that the next one recognises (`Snapshot`) and completes (`adopt`).
    ids = dict(active)
    array_ids: list[str] = []
    went = 0
    made = list(arrays(target.cluster, _reachable(jobs, active)))
    sizes = [len(part) for part, _, _ in made]
    room = _room(target.cluster, sizes)
    caps = Caps.of(target, ledger.records(), active, sizes)
    for number, (part, needs, after) in enumerate(made):
        uid = uuid.uuid4().hex[:12]
        submission = replace(target.submission(uid, part), at_once=caps.at_once[number])
        # Single jobs that must succeed; whole arrays that should be over, well or not
        wait_for = [f"afterok:{ids[name]}" for name in needs if name in ids]
        wait_for += [f"afterany:{array_ids[earlier]}" for earlier in after]
        wait_for += [f"afterany:{array}" for array in caps.behind(number, array_ids)]
        try:
            if went + len(part) > room:
                raise Failed(f"Slurm's limit MaxJobCount leaves room for {room - went:.0f} jobs")
            ledger.write_submission(submission)
            numbers = _sbatch(ledger, target.cluster, submission, ",".join(wait_for))
        except Failed as error:
            if not went and "limit" not in str(error).lower():
                raise
            wanted = sum(len(array.jobs) for array in made)
            raise Failed(
                f"{error}; {went} of {wanted} jobs went: run this again later for the others"
            ) from None
        ledger.write_submission(replace(submission, ids=tuple(numbers)))
        went += len(part)
        ids |= {job.name: number for job, number in zip(part, numbers)}
        array_ids.append(numbers[0].split("_")[0])
    return len(array_ids)


def _room(cluster: Cluster, sizes: Sequence[int]) -> float:
    """How many jobs Slurm takes now. BadInput for an array that it never would.

    sbatch itself would try for two minutes, in silence, and then not say why.
    """
    known = slurm_client.limits() if sizes else None
    if known is None:
        return math.inf
    largest = max(sizes)
    for most, name in ((known.array, "MaxArraySize"), (known.jobs, "MaxJobCount")):
        if largest > most:
            raise BadInput(
                f"{cluster.file}: an array of {largest} jobs, and this Slurm takes at most {most}"
                f" ({name}); lower max_array"
            )
    return max(0, known.jobs - slurm_client.jobs_in_memory())


def _reachable(jobs: Sequence[Job], active: Mapping[str, str]) -> list[Job]:
    """Without the jobs that need one which this Slurm does not know and is not given now."""
    here: dict[str, Job] = {}
    for job in jobs:  # needs come earlier in the list
        elsewhere = [name for name in job.needs if name not in active and name not in here]
        if elsewhere:
            log.info(
                f"left out: {job.name} waits for {elsewhere[0]}, which is not on this Slurm; run"
                " this again later"
            )
        else:
            here[job.name] = job
    return list(here.values())


def _sbatch(ledger: Ledger, cluster: Cluster, submission: Submission, dependency: str) -> list[str]:
    """One array; Slurm's numbers, one per job."""
    import submitit

    executor = submitit.SlurmExecutor(ledger.submitit(submission), max_num_timeout=TIME_LIMITS)
    executor.update_parameters(**_parameters(cluster, submission, dependency))
    try:
        jobs = executor.submit_array(_tasks(ledger, cluster, submission))
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        said = str(error).strip().splitlines()[-1:] or [""]  # sbatch's own words come last
        return _in_spite_of(said[0].strip(), ledger, cluster, submission)
    return [job.job_id for job in jobs]


# Of what sbatch says, what leaves open whether the array was taken
_UNSURE = re.compile("timed? ?out|unable to contact|connect|communicat", re.IGNORECASE)


def _in_spite_of(words: str, ledger: Ledger, cluster: Cluster, submission: Submission) -> list[str]:
    """Slurm's numbers of an array that it took although sbatch failed: its answer was lost.

    Failed where it has none. The record stays where nobody can tell yet: the next launcher finds
    the array by its comment, or submits its jobs again.
    """
    snapshot = Snapshot(ledger)
    for found in snapshot.unnumbered:
        if found.uid == submission.uid:
            adopt(ledger, found, cluster)
            return list(found.ids)
    if not snapshot.trouble and not _UNSURE.search(words):
        ledger.drop_submission(submission)
    raise Failed(f"sbatch refused {submission.jobs[0].like}: {words}")


def _parameters(cluster: Cluster, submission: Submission, dependency: str) -> dict[str, object]:
    """What submitit calls sbatch's options; what is not asked for is left out."""
    asked = cluster.asks(submission.jobs[0])
    parameters: dict[str, object] = {
        "job_name": f"backbench-{submission.grid}",
        "comment": submission.uid,  # by which a launcher recognises an array that has no number yet
        "nodes": asked.nodes,
        "ntasks_per_node": asked.tasks_per_node,
        "cpus_per_task": asked.cpus,
        # From Slurm 22.05 on, srun no longer takes over sbatch's
        "srun_args": [f"--cpus-per-task={asked.cpus}"],
        "gpus_per_node": asked.gpus or None,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "mem": f"{math.ceil(asked.memory_gb * 1024)}M" if asked.memory_gb else None,
        "time": math.ceil(asked.hours * 60) if asked.hours else None,
        "signal_delay_s": int(cluster.grace_s(asked)),
        "array_parallelism": submission.at_once or cluster.jobs,
        "setup": [*cluster.setup, EARLY_SIGNAL],
        "dependency": dependency or None,
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True, "kill-on-invalid-dep": "yes", **cluster.sbatch},
    }
    return {key: value for key, value in parameters.items() if value is not None}


def _tasks(ledger: Ledger, cluster: Cluster, submission: Submission) -> list[SlurmTask]:
    return [SlurmTask.on(cluster, job, ledger) for job in submission.jobs]


# What only whoever acts may write down


def catch_up(ledger: Ledger, given: Target | None = None) -> Snapshot:
    """A look, and on record afterwards what Slurm will have forgotten in some minutes.

    `given` is the cluster of the command line.
    """
    snapshot = Snapshot(ledger)
    for submission in snapshot.unnumbered:
        was, overrides = submission.cluster, submission.cluster_overrides
        told = (given.cluster, given.overrides) if given else (None, ())
        try:
            cluster, _ = stored.cluster_of(was, overrides, *told)
        except BadInput as error:
            log.warning(f"array {submission.ids[0]}: {error}")
        else:
            adopt(ledger, submission, cluster)
    settle(snapshot)
    return snapshot


def adopt(ledger: Ledger, submission: Submission, cluster: Cluster) -> None:
    """Bring an array on record whose launcher died during sbatch.

    1. Slurm has the array, the record has no numbers: the look found them by the comment.
    2. submitit moves its pickles to the jobs' numbers only after sbatch: where it did not come to
       that, the jobs wait for them, and get them made anew.
    3. Then the record is completed; a launcher that dies before that has lost nothing either.
    """
    import submitit

    folder = ledger.submitit(submission)
    for job_id, task in zip(submission.ids, _tasks(ledger, cluster, submission)):
        path = submitit.core.utils.JobPaths(folder, job_id=job_id).submitted_pickle
        if not path.exists():
            delayed = submitit.helpers.DelayedSubmission(task)
            delayed.set_timeout(math.ceil((task.limit_s or 300) / 60), TIME_LIMITS)
            with atomic.atomic_path(path) as temporary:
                delayed.dump(temporary)
    ledger.write_submission(submission)


def settle(snapshot: Snapshot) -> None:
    """Write down that jobs were cancelled, by whomever: squeue tells it for some minutes only."""
    for name, record in snapshot.records.items():
        status = snapshot.status(name)
        if snapshot.state(name).name == "cancelled" and status["state"] != "cancelled":
            status = {**status, "state": "cancelled", "reason": None}
            snapshot.ledger.write_status(record.job, status)
