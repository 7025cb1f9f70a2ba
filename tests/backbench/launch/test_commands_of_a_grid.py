"""A grid's commands are held to their verbs, each kind of them once."""

import argparse

from backbench.launch.job import Job
from backbench.launch.plan import CommandCheck


def job(number, *argv):
    return Job(name=f"job {number}", argv=argv, like="x", cells=())


def test_each_kind_of_command_is_looked_at_once(tmp_path):
    looked = []

    def parsed(argv):
        looked.append(argv)
        return argparse.Namespace(verb="semisup")

    line = CommandCheck(parsed, lambda args: None)
    jobs = [
        job(
            n,
            "semisup",
            f"{n}.safetensors",
            "--protocol",
            protocol,
            "--seed",
            f"{n}",
            "--out",
            f"{n}",
        )
        for n in range(50)
        for protocol in ("a", "b")
    ]
    jobs += [
        job(n, "pretrain", "r", f"optim.lr={lr}", f"seed={n}", "--out", f"{n}")
        for n in range(50)
        for lr in (1, 2, 3)
    ]
    jobs += [job(0, "detect", "--config-file", "x")]  # which looks for itself
    for _ in range(2):  # as --watch does
        line.refuse(jobs, "grid")
    assert len(looked) == 2 + 3
