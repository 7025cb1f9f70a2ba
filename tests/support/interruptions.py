"""What ends a run in its middle, tied to what every run does: decode images."""

import signal


class Killed(BaseException):
    """Ends the process's work at once, past every handler."""


def kill():
    raise Killed


def terminate():
    signal.raise_signal(signal.SIGTERM)


class WatchedDecoder:
    """`image_list.decode` that notes its paths and calls `at[n]` before image n, from 1.

    It sees only what this process decodes, so runs have --workers 0.
    """

    def __init__(self, decode):
        self.decode = decode
        self.paths = []
        self.at = {}

    def __call__(self, path, **how):
        number = len(self.paths) + 1
        if number in self.at:
            end = self.at.pop(number)  # once: the next run goes past this image
            end()
        self.paths.append(path)
        return self.decode(path, **how)


def until_done(run, deaths):
    """Call `run` until it has died `deaths` times, and once more; returns what it returns."""
    for _ in range(deaths):
        try:
            run()
        except Killed:
            continue
        raise AssertionError(f"the run ended before it had died {deaths} times")
    return run()
