"""Data and checkpoints that several tests share, made once a session."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads of parallel tests cost more than they give

import pytest

from backbench import embedded


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    """ROOT with the tiny embedded digits, scenes and lists; read it, do not write to it."""
    return embedded.build(tmp_path_factory.mktemp("data"), size="tiny")
