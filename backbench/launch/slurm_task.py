"""The part of the launcher that runs on a node: one task of a Slurm job, and how the job comes back.

This is how a killed job continues, from the signal to the next start:

1. Slurm sends a signal. SIGUSR2 says that the time is nearly up, or that the job is preempted.
   SIGTERM begins the grace before a preemption, or comes from scancel. The handler (`_listen`)
   hands it to the command, which saves its state and exits 75.
2. `attempt.decide` says what follows. After SIGUSR2 that is "again": the job sends itself back to
   the queue (`_requeue`) and keeps its number, so whatever waits for it goes on waiting. After
   SIGTERM it is "stopped", and `_await_end` first asks Slurm what it wants. On a node without
   scontrol nobody can be asked or told: Slurm's own kill requeues the job, or the next attempt
   begins inside it.
3. A lost node and `scontrol requeue` send no signal. Slurm starts the job anew by itself (`requeue`
   in `slurm._parameters`), and `Attempt._begin` notes that the attempt before was killed.
4. The job starts: with the same pickle, the same command and the same folder, whose state the
   command continues (`backbench.pretrain.train.SavedState`).
5. Some jobs are started by nothing of this. A job is left `stopped` by SIGTERM at the time limit,
   or by any time limit on a node without scontrol, and `lost` by a kill -9 of this process.
   `launch run` submits both again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from backbench.errors import EXIT_PREEMPTED, Failed
from backbench.launch import slurm_client
from backbench.launch.attempt import Attempt, Ending
from backbench.launch.clusters import Cluster
from backbench.launch.job import Job
from backbench.launch.records import Ledger
from backbench.runs import atomic

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

# After SIGTERM, with its state saved, a job waits for Slurm to end it, and then goes on. It waits
# ANSWERED_S seconds where Slurm can be asked, and GRACE_S where it cannot: longer than most graces
# before a preemption.
ANSWERED_S = 60.0
GRACE_S = 900.0
# Slurm looks at the clock once a minute, so its warning may come this much too early.
CLOCK_S = 60.0
# How long the other tasks wait for task 0 to begin; for half of it, it may wait for the job's lock.
MEET_S = 180.0
# Where task 0 waits for the others; an empty address says that it had nothing to begin.
ADDRESS_FILE = "address.json"

# A signal that comes while Python still starts kills the task, which Slurm takes for a failed job.
# These lines of the job's script send such a job back to the queue. 138, 140 and 143 are srun's exit
# status for a task that died of SIGUSR1, SIGUSR2 and SIGTERM. After scancel the job does not count
# as running, and stays ended. Without scontrol the script waits for Slurm's kill, which requeues it.
# A number that another job has left in the environment is not this job's JobId: that job is let be.
EARLY_SIGNAL = """\
backbench_early_signal() {
  case $? in 138|140|143) ;; *) return ;; esac
  if ! command -v scontrol > /dev/null; then sleep 900; return; fi
  local job=$SLURM_JOB_ID
  if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
  local shown; shown=$(scontrol show job "$job")
  if [[ $shown == "JobId=$SLURM_JOB_ID "* && $shown == *JobState=RUNNING* ]]; then
    scontrol requeue "$job" && sleep 60
  fi
}
trap backbench_early_signal EXIT"""


@dataclass
class SlurmTask(Attempt):
    """One task of a Slurm job, which submitit pickles, and calls on the node.

    Task 0 makes the attempt and keeps the job's status. The other tasks run their rank of the
    command, save at a signal, and end. A task never ends its job because it was told to stop:
    Slurm would call the job failed, and remove what waits for it.
    """

    limit_s: float | None = None  # the job's time limit, which Slurm keeps

    # What a task learns on its node. This outlives the attempts that it makes.
    _number = ""  # Slurm's, of the job
    _began = 0.0  # when Slurm started this process, by the monotonic clock
    _got_usr2 = False  # Slurm wants the place, or the time is nearly up

    @classmethod
    def on(cls, cluster: Cluster, job: Job, ledger: Ledger) -> Self:
        task = super().on(cluster, job, ledger)
        resources = cluster.resources_for(job)
        task.tasks = resources.nodes * resources.tasks_per_node
        task.limit_s = resources.limit_s
        return task

    def __call__(self) -> str:
        """Run the job: submitit calls this in every task."""
        import submitit

        self._began = time.monotonic()
        environment = submitit.JobEnvironment()
        # This is 12_3 in an array. SLURM_JOB_ID is 12 in the last job of an array, by which Slurm
        # means all of its jobs: a requeue of that would stop this job's neighbours.
        self._number = environment.job_id
        self.place = f"slurm:{self._number}"
        self._listen()
        if self.tasks > 1 and environment.global_rank > 0:
            self._rank = environment.global_rank
            return self._follow()
        try:
            while True:
                outcome = self.run()
                if outcome == "done":
                    return outcome
                if not self._begins_again_here(outcome):
                    reason = self.ledger.status(self.job).get("reason")
                    raise Failed(f"{self.job.name}: {outcome}: {reason}")
                # `run` knows of the attempts before by the status file.
                self._reset()
                self._listen()
        finally:
            if self.tasks > 1 and self._child is None:
                # Nothing was begun, as in a cancelled job: the other tasks need not wait.
                with contextlib.suppress(OSError):
                    atomic.write_json(self._folder() / ADDRESS_FILE, {})

    def checkpoint(self) -> DelayedSubmission:
        """Return what submitit shall start next time: the task as it is.

        submitit asks at a signal that comes before `__call__`, when nothing has begun.
        """
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    # Signals

    def _listen(self) -> None:
        signal.signal(
            signal.SIGTERM, lambda *_: self.ask_to_stop("stopped", signal.SIGTERM)
        )
        # In place of submitit's handler, which needs scontrol and ends the job without it
        signal.signal(signal.SIGUSR2, lambda *_: self._on_usr2())

    def _on_usr2(self) -> None:
        self._got_usr2 = True
        self.ask_to_stop("time limit" if self._late() else "preempted")

    def _late(self) -> bool:
        """Say whether SIGUSR2, if it came now, would be the warning before the time limit."""
        if self.limit_s is None:
            return False
        return time.monotonic() > self._began + self.limit_s - self.grace_s - CLOCK_S

    # The end of an attempt that is not done: its state is saved, and the place is Slurm's

    def _begins_again_here(self, outcome: str) -> bool:
        """Say whether the next attempt begins inside this very job.

        If not, this process ends, and Slurm ends or restarts the job. Only a job of one task begins
        again by itself: where there are several, the others have ended.
        """
        if outcome not in ("stopped", "again"):
            return False
        late = self._late()
        how = self._status["attempts"][-1].get("how")
        # 1. With scontrol the job goes back to the queue.
        if outcome == "again" and self._requeue():
            return False
        # 2. Somebody wants the place: wait for what Slurm does about that.
        if how in ("stopped", "preempted") and self._await_end():
            return False
        # 3. Nobody does: the signal was sent by hand, or the attempt failed.
        if self.tasks > 1:
            self._requeue()
            return False
        return not late

    def _await_end(self) -> bool:
        """Wait until Slurm ends or requeues the job (True), or does neither for long (False)."""
        began = time.monotonic()
        while True:
            standing = slurm_client.standing(self._number)
            # After scancel, a requeue or a node failure the job is COMPLETING. This process must
            # end now: one that lingers beyond the job's new start would drain the node.
            if standing == "ending":
                return True
            # In the grace before a preemption the job is RUNNING with a PreemptTime. A requeue
            # frees the node before the grace is over.
            is_wanted = self._got_usr2 or standing == "preempted"
            if is_wanted and self._requeue():
                return True
            # Without an answer from Slurm, wait for as long as a grace may be.
            patience_s = GRACE_S if standing is None else ANSWERED_S
            if time.monotonic() - began > patience_s:
                return False
            time.sleep(1.0)

    def _requeue(self) -> bool:
        """Send the job back to the queue, which ends this process; False where that fails."""
        # Nothing is left to save, and a job that lingers beyond its requeue drains the node. So the
        # SIGTERM that the requeue brings shall end this process at once.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not slurm_client.requeue(self._number):
            return False
        time.sleep(60)
        return True

    # Several tasks: task 0 leads, the others follow

    def _folder(self) -> Path:
        """Return the folder in which the tasks of this start of this job meet."""
        number = os.environ["SLURM_JOB_ID"]
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        return self.ledger.root / "meet" / f"{self.job.key}-{number}-{restarts}"

    def _start_child(self, lock: int | None = None) -> None:
        """Start the command; task 0 first tells the others of a free port of its node."""
        if self.tasks > 1 and self._rank == 0:
            # Each start has a port of its own. The system is asked for a free one, which is given
            # back at once: nobody else takes it so soon.
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            one_node = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) == 1
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
        """Run another rank than the first, without status and retries.

        What it fails with, it leaves in a file, where task 0 finds it (`_sibling_failure`).
        """
        # 1. Wait for task 0 to say where it is.
        file = self._folder() / ADDRESS_FILE
        end = time.monotonic() + MEET_S
        while not file.exists():
            if time.monotonic() > end:
                raise Failed(
                    f"rank {self._rank}: task 0 did not begin within {MEET_S:.0f} s"
                )
            time.sleep(0.1)
        address = json.loads(file.read_text())
        if not address:
            return f"rank {self._rank}: task 0 had nothing to begin"
        # 2. Run the rank.
        self.env |= address
        self._start_child()
        exit_status = self._wait()
        # 3. Tell task 0 of a failure of its own; a lost peer is none.
        if exit_status not in (0, EXIT_PREEMPTED):
            how, reason = self._meaning(exit_status)
            if how in ("failed", "bad input"):
                failure = Ending(how, f"rank {self._rank}: {reason}")
                atomic.write_json(self._folder() / f"failed-{self._rank}", failure)
        return f"rank {self._rank}: exit {exit_status}"

    def _sibling_failure(self) -> Ending | None:
        if self.tasks == 1 or self._rank > 0:
            return None
        for file in self._folder().glob("failed-*"):
            return Ending(*json.loads(file.read_text()))
        return None
