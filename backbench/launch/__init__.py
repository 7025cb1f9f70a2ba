"""Grids of jobs: what is missing, where it runs, how it stands.

job                    one command, and how one sees that it is done
grid                   what is asked
subjects, expansion    its checkpoints and what makes them; all its jobs
clusters, slurm_client where jobs run; what Slurm's commands say
records                RUNS/.launch: submissions, statuses, logs, locks
view                   how every job stands at one moment (writes nothing)
plan, costs            what of a grid is missing, in which arrays, at what cost
attempt, verdict       one attempt at a job; what follows from how it and those before it ended
pool                   processes of this machine side by side
slurm, caps            the same on Slurm, through submitit; how many at a time over all arrays
verb                   `backbench launch run | status | retry | cancel`
"""

from __future__ import annotations

import sys


def __getattr__(name: str) -> object:
    """Slurm jobs that version 0.1 queued name their classes by where they stood then.

    That is here, and in backbench.grid. The pickle names this class first, so the other module is
    there when it comes to it.
    """
    if name != "SlurmTask":
        raise AttributeError(f"module 'backbench.launch' has no attribute '{name}'")
    from backbench.launch import job
    from backbench.launch.slurm import SlurmTask

    sys.modules.setdefault("backbench.grid", job)
    return SlurmTask
