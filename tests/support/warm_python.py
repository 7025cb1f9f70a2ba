"""Short programs, each a fork of one Python that has imported what they need: to import torch takes
most of the time of a process of its own. `with warm_python("torch") as python: python.run(code)`.

A program begins in the folder and with the environment of whoever starts it, but what is read when the
modules are imported was read before."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass
class Forked:
    """A program that runs, in a process group of its own."""

    python: WarmPython
    pid: int
    stdout: IO[str]
    stderr: IO[str]

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

    def end(self):
        """(exit status, negative for a signal; the rest of what it said on stdout, and on stderr):
        nothing that it has started holds its pipes any more."""
        with self.stdout, self.stderr:
            out, err = self.stdout.read(), self.stderr.read()
        return self.python.ask(wait=self.pid), out, err


class WarmPython:
    def __init__(self, door):
        self.door = door

    def ask(self, files=(), **request):
        socket.send_fds(self.door, [json.dumps(request).encode()], files)
        return json.loads(self.door.recv(100))

    def start(self, code, *words):
        (out, out_there), (err, err_there) = os.pipe(), os.pipe()
        here = {"environment": dict(os.environ), "folder": str(Path.cwd())}
        words = [str(word) for word in words]
        pid = self.ask([out_there, err_there], code=code, words=words, **here)
        os.close(out_there)
        os.close(err_there)
        return Forked(self, pid, os.fdopen(out), os.fdopen(err))

    def run(self, code, *words):
        return self.start(code, *words).end()


@contextlib.contextmanager
def warm_python(*modules):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, str(there.fileno()), *modules],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=[there.fileno()],
    )
    there.close()
    with here:
        yield WarmPython(here)
    process.wait(60)


def _become(request, files):
    """The fork: a process like that of `python -c`."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    files = [os.open(os.devnull, os.O_RDONLY), *files]
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    sys.argv = ["-c", *request["words"]]
    # What it names stays until Python ends, as the names of a program do
    exec(request["code"], vars(sys.modules["__main__"]))
    sys.exit(0)


def _serve():
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a fork need not look at what is imported when it ends
    door = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, files, _, _ = socket.recv_fds(door, 1 << 18, 2)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            door.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            door.close()
            _become(request, files)
        for file in files:
            os.close(file)
        door.send(json.dumps(pid).encode())


if __name__ == "__main__":
    # As a script its folder would be a place to import from
    del sys.path[0]
    _serve()
