"""Submits arrays of jobs to Slurm through submitit, and records what Slurm soon forgets.

submitit pickles the tasks (`slurm_task.SlurmTask`), writes the script, calls sbatch, and starts
every task on its node. This file and slurm_task.py are the only ones that import it. What follows a
signal or a failure is not left to submitit, but decided by `attempt.decide`.
"""

import contextlib
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from backbench.errors import BadInput, Failed
from backbench.launch import slurm_client
from backbench.launch.clusters import Cluster, recorded_cluster
from backbench.launch.job import Job
from backbench.launch.plan import arrays
from backbench.launch.records import Ledger, Submission
from backbench.launch.slurm_task import EARLY_SIGNAL, SlurmTask
from backbench.launch.view import Snapshot
from backbench.runs import atomic
from backbench.runs.terminal import log

# submitit ends a job after so many time limits. `attempt.decide` counts them, so submitit shall not.
TIME_LIMITS = 1_000_000
# Words of sbatch that leave open whether Slurm took the array
_UNSURE = re.compile("timed? ?out|unable to contact|connect|communicat", re.IGNORECASE)


def submit(
    ledger: Ledger,
    cluster: Cluster,
    grid: str,
    jobs: Sequence[Job],
    active: Mapping[str, str],
) -> int:
    """Submit a grid's jobs as arrays; return how many arrays.

    `active` has the jobs that are on Slurm already: name -> Slurm's number. Raises Failed where
    Slurm takes only some of the arrays; those run.

    Each array takes three steps: it goes on record, to Slurm, and its numbers go on record. If this
    process dies in between, the next launcher recognises the array by its comment (`Snapshot`) and
    completes the record (`adopt`).
    """
    ids = dict(active)
    array_ids: list[str] = []
    submitted = 0  # jobs that Slurm has taken
    planned = list(arrays(cluster, _reachable(jobs, active)))
    sizes = [len(array.jobs) for array in planned]
    room = _room(cluster, sizes)
    for array in planned:
        uid = uuid.uuid4().hex[:12]
        submission = Submission.to(cluster, grid, uid, array.jobs)
        # It waits for single jobs that must succeed, and for whole arrays that must only be over.
        wait_for = [f"afterok:{ids[name]}" for name in array.needs if name in ids]
        wait_for += [f"afterany:{array_ids[earlier]}" for earlier in array.after]
        try:
            if submitted + len(array.jobs) > room:
                raise Failed(
                    f"Slurm's limit MaxJobCount leaves room for {room - submitted:.0f} jobs"
                )
            ledger.write_submission(submission)
            numbers = _sbatch(ledger, cluster, submission, ",".join(wait_for))
        except Failed as error:
            # Nothing was submitted, and not because of a limit: later it would fail, too
            if submitted == 0 and "limit" not in str(error).lower():
                raise
            raise Failed(
                f"{error}; {submitted} of {sum(sizes)} jobs went: run this again later for the"
                " others"
            ) from None
        ledger.write_submission(replace(submission, ids=tuple(numbers)))
        submitted += len(array.jobs)
        for job, number in zip(array.jobs, numbers):
            ids[job.name] = number
        array_ids.append(numbers[0].split("_")[0])
    return len(array_ids)


def _reachable(jobs: Sequence[Job], active: Mapping[str, str]) -> list[Job]:
    """Leave out the jobs that need one which this Slurm does not know and is not given now."""
    here: dict[str, Job] = {}
    for job in jobs:  # needs come earlier in the list
        elsewhere = [
            name for name in job.needs if name not in active and name not in here
        ]
        if elsewhere:
            log.info(
                f"left out: {job.name} waits for {elsewhere[0]}, which is not on this Slurm;"
                " run this again later"
            )
        else:
            here[job.name] = job
    return list(here.values())


def _room(cluster: Cluster, sizes: Sequence[int]) -> float:
    """Return how many jobs Slurm takes now; BadInput for an array that it never would take.

    sbatch itself would try for two minutes, in silence, and then not say why it failed.
    """
    limits = slurm_client.limits() if sizes else None
    if limits is None:
        return math.inf
    in_array, in_memory = limits
    largest = max(sizes)
    for most, name in ((in_array, "MaxArraySize"), (in_memory, "MaxJobCount")):
        if largest > most:
            raise BadInput(
                f"{cluster.file}: an array of {largest} jobs, and this Slurm takes at most"
                f" {most} ({name}); lower max_array"
            )
    # Jobs of all users count, and those that ended minutes ago.
    there = slurm_client.slurm("squeue", "-h", "-r", "-t", "all", "-o", "%i")
    return max(0, in_memory - len(there.split()))


def _sbatch(
    ledger: Ledger, cluster: Cluster, submission: Submission, dependency: str
) -> list[str]:
    """Submit one array; return Slurm's numbers, one per job. Failed where Slurm has none of it."""
    import submitit

    executor = submitit.SlurmExecutor(
        ledger.submitit(submission), max_num_timeout=TIME_LIMITS
    )
    executor.update_parameters(**_parameters(cluster, submission, dependency))
    tasks = [SlurmTask.on(cluster, job, ledger) for job in submission.jobs]
    errors = (
        submitit.core.utils.FailedJobError,
        submitit.core.utils.FailedSubmissionError,
    )
    try:
        with outside_of_any_job():
            return [job.job_id for job in executor.submit_array(tasks)]
    except errors as error:
        # sbatch's own words come last.
        words = str(error).strip().rpartition("\n")[2].strip()
    # sbatch failed. Slurm may have taken the array all the same, and only its answer was lost.
    snapshot = Snapshot(ledger)
    for numbered in snapshot.unnumbered:
        if numbered.uid == submission.uid:
            adopt(ledger, numbered, cluster)
            return list(numbered.ids)
    # Where nobody can tell yet, the record stays: the next launcher finds the array by its comment,
    # or submits its jobs again.
    if not snapshot.trouble and not _UNSURE.search(words):
        ledger.submission_file(submission).unlink(missing_ok=True)
    raise Failed(f"sbatch refused {submission.jobs[0].like}: {words}")


@contextlib.contextmanager
def outside_of_any_job() -> Iterator[None]:
    """Hide the Slurm job that this process may itself run in.

    sbatch hands its environment on. A job that inherits another one's number or memory is refused
    by srun, looks for that job's files, or sends that job back to the queue. SLURM_CONF stays, as
    it says which Slurm this is, and so do the user's own defaults (SBATCH_...)."""
    hidden = {}
    for key in list(os.environ):
        of_a_job = key.startswith(("SLURM", "SUBMITIT_", "PMI_", "PMIX_"))
        if of_a_job and key != "SLURM_CONF":
            hidden[key] = os.environ.pop(key)
    try:
        yield
    finally:
        os.environ.update(hidden)


def _parameters(
    cluster: Cluster, submission: Submission, dependency: str
) -> dict[str, object]:
    """Return sbatch's options in submitit's names, without those that nobody asked for."""
    resources = cluster.resources_for(submission.jobs[0])
    memory = None
    if resources.memory_gb:
        memory = f"{math.ceil(resources.memory_gb * 1024)}M"
    minutes = None
    if resources.hours:
        minutes = math.ceil(resources.hours * 60)
    parameters: dict[str, object] = {
        "job_name": f"backbench-{submission.grid}",
        # By its comment a launcher recognises an array that has no number on record yet.
        "comment": submission.uid,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "cpus_per_task": resources.cpus,
        # Since Slurm 22.05 srun does not take this over from sbatch.
        "srun_args": [f"--cpus-per-task={resources.cpus}"],
        "gpus_per_node": resources.gpus or None,
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "mem": memory,
        "time": minutes,
        # Slurm sends SIGUSR2 this long before the time limit.
        "signal_delay_s": int(cluster.grace_s(resources)),
        "array_parallelism": cluster.jobs,
        "setup": [*cluster.setup, EARLY_SIGNAL],
        "dependency": dependency or None,
        "stderr_to_stdout": True,
        "additional_parameters": {
            # Slurm may start the job anew: after a preemption, or when its node is lost.
            "requeue": True,
            # A job leaves the queue when one that it needs has failed.
            "kill-on-invalid-dep": "yes",
            **cluster.sbatch,
        },
    }
    return {key: value for key, value in parameters.items() if value is not None}


# Records that only a launcher that acts writes


def catch_up(ledger: Ledger, given: Cluster | None = None) -> Snapshot:
    """Take a snapshot and record what Slurm soon forgets. `given`: the command line's cluster."""
    snapshot = Snapshot(ledger)
    # 1. The numbers of arrays whose launcher died during sbatch
    for submission in snapshot.unnumbered:
        try:
            cluster = recorded_cluster(
                submission.cluster, submission.cluster_overrides, given
            )
        except BadInput as error:
            log.warning(f"array {submission.ids[0]}: {error}")
            continue
        adopt(ledger, submission, cluster)
    # 2. Who was cancelled: squeue shows it for some minutes only
    for name, record in snapshot.records.items():
        status = snapshot.status(name)
        if snapshot.states[name].name == "cancelled" and status["state"] != "cancelled":
            ledger.write_status(
                record.job, {**status, "state": "cancelled", "reason": None}
            )
    return snapshot


def adopt(ledger: Ledger, submission: Submission, cluster: Cluster) -> None:
    """Complete an array whose launcher died during sbatch, or was told that sbatch failed.

    The snapshot has found its numbers. submitit names the pickles after the jobs' numbers, which it
    knows only after sbatch, and a job waits for its pickle: those that are missing are made here.
    """
    import submitit

    folder = ledger.submitit(submission)
    for job_id, job in zip(submission.ids, submission.jobs):
        path = submitit.core.utils.JobPaths(folder, job_id=job_id).submitted_pickle
        if path.exists():
            continue
        task = SlurmTask.on(cluster, job, ledger)
        delayed = submitit.helpers.DelayedSubmission(task)
        delayed.set_timeout(math.ceil((task.limit_s or 300) / 60), TIME_LIMITS)
        with atomic.atomic_path(path) as temporary:
            delayed.dump(temporary)
    # The record comes last: a launcher that dies before loses nothing.
    ledger.write_submission(submission)
