"""What the tests of probes, finetuning and analysis share."""

from __future__ import annotations

import pytest
from support.interruptions import WatchedDecoder

from backbench.images import files


@pytest.fixture
def decoder(monkeypatch):
    watched = WatchedDecoder(files.decode)
    monkeypatch.setattr(files, "decode", watched)
    return watched
