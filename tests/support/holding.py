"""`python holding.py FOLDER` holds FOLDER, with a forked child, until standard input ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from backbench.runs import lock


def holder(folder):
    """Start a process that holds `folder`, and wait until it does."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


if __name__ == "__main__":
    with lock.held(Path(sys.argv[1])):
        # As a data loader's worker, which has the parent's files open
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        print("held", flush=True)
        sys.stdin.read()
        os.kill(child, signal.SIGKILL)
