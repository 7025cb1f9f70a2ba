"""The names that `import backbench` offers."""

import importlib.metadata

import backbench


def test_every_name_is_there_and_listed():
    listed = dir(backbench)
    assert {"__version__", "load", "evaluate", "Checkpoint"} <= set(listed)
    for name in backbench.__all__:
        assert name in listed
        assert getattr(backbench, name) is not None
    assert backbench.__version__ == importlib.metadata.version("backbench")


def test_another_name_is_none():
    assert not hasattr(backbench, "no_such_name")
