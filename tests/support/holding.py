"""`python holding.py FOLDER`: at work, with a forked child, until standard input ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

from backbench.runs import lock


def holder(folder):
    """A process that holds `folder`, as soon as it does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, __file__, str(folder)], **pipes)
    assert process.stdout.readline() == "held\n"
    return process


if __name__ == "__main__":
    with lock.held(Path(sys.argv[1])):
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        print("held", flush=True)
        sys.stdin.read()
        os.kill(child, 9)
