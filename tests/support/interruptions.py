"""What ends a run in its middle, tied to what every run does: decode images."""

import signal


class Killed(BaseException):
    """Ends the process's work at once, past every handler."""


def kill():
    raise Killed


def terminate():
    signal.raise_signal(signal.SIGTERM)


class WatchedDecoder:
    """`image_list.decode` that notes its paths and calls `at[n]` before image n, from 1. It sees
    only what this process decodes, so runs have --workers 0."""

    def __init__(self, decode):
        self.decode, self.paths, self.at = decode, [], {}

    def __call__(self, path, **how):
        self.at.pop(len(self.paths) + 1, lambda: None)()
        self.paths.append(path)
        return self.decode(path, **how)


def until_done(run, deaths):
    """Call `run` again after each death, so many in all; returns what it returned."""
    for _ in range(deaths):
        try:
            run()
        except Killed:
            continue
        raise AssertionError(f"the run ended before it had died {deaths} times")
    return run()
