"""The line that every benchmark prints first: what it ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import torchvision


def describe() -> str:
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = torch.get_num_threads()
    return (
        f"{cpu}, {os.cpu_count()} cores, {threads} torch thread{'s' * (threads > 1)}{gpu}; "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    )
