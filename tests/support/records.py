"""A result to write, and a process that writes many: `python records.py RUN FIRST_SEED COUNT`."""

import sys

from backbench.results import store
from backbench.results.store import Result


def a_result(**changes):
    base = {
        "checkpoint": "a" * 64,
        "name": "x",
        "method": "simclr",
        "arch": "resnet18",
        "epochs": 2,
        "task": "linear",
        "dataset": "digits",
        "split": "test",
        "metric": "top1",
        "value": 91.25,
        "ci95": (90.0, 92.5),
        "protocol": "linear-demo-v1",
    }
    return Result(**{**base, **changes})


if __name__ == "__main__":
    for i in range(int(sys.argv[3])):
        store.append(
            sys.argv[1], [a_result(seed=int(sys.argv[2]) * 1000 + i, chosen={"text": "x" * 2000})]
        )
