"""Data and checkpoints that several tests share, made once a session.

The process that hands tests to the workers reads this file too, and they wait for it: torch is
imported in the fixtures."""

import atexit
import gc
import itertools
import os

# Spinning threads of parallel tests cost more than they give
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from support.warm_python import warm_python

from backbench.datasets import embedded
from backbench.errors import EXIT_BAD_INPUT

COUNT = itertools.count()


def pytest_collection_modifyitems(items):
    """Rooms with long files go first, so that two workers end at about the same time."""
    rooms = ["transfer", "pretrain", "detection", "weights", "weather"]
    items.sort(
        key=lambda item: (
            rooms.index(room)
            if (room := item.path.parent.name) in rooms
            else len(rooms)
        )
    )


def pytest_configure():
    """Collect no garbage until the first test.

    What imports and collection make stays to the end, and looking at it again and again takes a third
    of the time."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# Some extension modules report what is alive at the very end as a leak. Not before: pytest looks for
# garbage ten times when it ends, and what was there before the first test is none.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    """ROOT with the tiny embedded digits, scenes and lists; read it, do not write to it."""
    return embedded.build(tmp_path_factory.mktemp("data"), size="tiny")


@pytest.fixture(scope="session")
def python():
    """Runs programs as forks of one Python that has imported torch: for tests of what a process does,
    and not of how it starts."""
    with warm_python("backbench.parallel.loading", "backbench.runs.ending") as python:
        yield python


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory, monkeypatch):
    """Features of the tests stay in their own folder.

    Most tests compute none, so for a test without `tmp_path` no folder is made, only named."""
    if "tmp_path" in request.fixturenames:
        own = request.getfixturevalue("tmp_path")
    else:
        own = tmp_path_factory.getbasetemp() / f"of test {next(COUNT)}"
    monkeypatch.setenv("BACKBENCH_CACHE", str(own / "cache"))


@pytest.fixture
def trees(tmp_path, monkeypatch):
    from support.layouts import Trees

    return Trees(tmp_path / "data", monkeypatch)


@pytest.fixture
def trunk(tmp_path):
    from support.layouts import trunk_file

    return trunk_file(tmp_path / "trunk.safetensors")


@pytest.fixture
def two_trunks(tmp_path):
    from support.layouts import trunk_file

    return [trunk_file(tmp_path / f"trunk{i}.safetensors", seed=i) for i in (1, 2)]


@pytest.fixture
def bad_input(capsys):
    """bad_input(status, *words): a command has ended with 2 and these words on stderr, once."""

    def check(status, *words):
        said = capsys.readouterr().err
        assert status == EXIT_BAD_INPUT, said
        for word in words:
            assert word in said
        return said

    return check
