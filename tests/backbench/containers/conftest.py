"""What tests of tables share."""

import pytest
from support.containers import scan_here


@pytest.fixture
def scanned_here(monkeypatch):
    """Let no table have a process of its own that scans it."""
    scan_here(monkeypatch)
