"""The trunk of long runs of every verb."""

import pytest
from support.layouts import trunk_file


@pytest.fixture
def trunk(tmp_path):
    """A whole ResNet-18, for which a detector has a config."""
    return trunk_file(tmp_path / "trunk.safetensors", arch="resnet18")
