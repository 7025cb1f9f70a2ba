"""A grid's commands are held to their verbs, each kind of them once."""

import argparse

from backbench.launch.job import Job
from backbench.launch.plan import CommandCheck


def job(command):
    return Job(name=command, argv=tuple(command.split()), like="x", cells=())


def test_each_kind_of_command_is_looked_at_once(tmp_path):
    looked = []

    def parsed(argv):
        looked.append(argv)
        return argparse.Namespace(verb="semisup")

    line = CommandCheck(parsed, lambda args: None)
    jobs = [job("detect --config-file x")]  # which looks for itself
    for n in range(50):
        for protocol in ("a", "b"):
            jobs.append(job(f"semisup {n}.pth --protocol {protocol} --seed {n} --out {n}"))
        for lr in (1, 2, 3):
            jobs.append(job(f"pretrain r optim.lr={lr} seed={n} --out {n}"))
    for _ in range(2):  # as --watch does
        line.refuse(jobs, "grid")
    assert len(looked) == 2 + 3
