"""What Slurm's jobs are started from: pickles, also those that version 0.1 queued."""

from __future__ import annotations

import pickle
import subprocess
import sys

from backbench.launch.job import Job
from backbench.launch.slurm import SlurmTask

READ = """
import pickle, sys
task = pickle.load(sys.stdin.buffer)
print(type(task).__module__, type(task.job).__module__, task.job.name, task.tasks, task.grace_s)
"""


def read_elsewhere(data: bytes) -> list[str]:
    done = subprocess.run([sys.executable, "-c", READ], input=data, capture_output=True, check=True)
    return done.stdout.decode().split()


def test_new_and_old_pickles_are_read():
    """Version 0.1 wrote the same fields, of classes that stood in other files."""
    job = Job(name="x/y", argv=("linear",), like="linear", cells=("x/y",))
    task = SlurmTask(job=job, runs="/runs", tasks=2, grace_s=20.0)
    new = pickle.dumps(task, protocol=0)  # names in plain text
    assert b"cbackbench.launch.slurm\nSlurmTask\n" in new and b"cbackbench.launch.job\nJob\n" in new
    old = new.replace(b"backbench.launch.slurm\n", b"backbench.launch\n")
    old = old.replace(b"backbench.launch.job\n", b"backbench.grid\n")
    expected = ["backbench.launch.slurm", "backbench.launch.job", "x/y", "2", "20.0"]
    assert read_elsewhere(new) == read_elsewhere(old) == expected
