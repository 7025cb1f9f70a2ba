"""Lightning is imported as if torchmetrics were missing, and others find that where it is."""

import importlib
import sys

import pytest

from backbench.parallel import lightning


def test_a_package_is_missing_inside_and_there_afterwards(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rarely_needed.py").write_text("VALUE = 7\n")
    with lightning._as_if_missing("rarely_needed"), pytest.raises(ImportError):
        importlib.import_module("rarely_needed")
    assert importlib.import_module("rarely_needed").VALUE == 7
    # What somebody uses already is not taken away
    with lightning._as_if_missing("rarely_needed"):
        assert importlib.import_module("rarely_needed").VALUE == 7
    assert sys.modules.pop("rarely_needed").VALUE == 7


def test_an_import_that_fails_leaves_the_package_there(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "seldom_needed.py").write_text("VALUE = 8\n")
    with pytest.raises(OSError), lightning._as_if_missing("seldom_needed"):
        raise OSError("damaged")
    assert importlib.import_module("seldom_needed").VALUE == 8
    del sys.modules["seldom_needed"]
