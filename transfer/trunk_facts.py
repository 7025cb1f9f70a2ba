"""What a comparison across trunks needs beside the score: size, cost of an image, speed."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch

from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint


class TrunkFacts(TypedDict):
    """`gflops`: billions of multiply-adds for one image of `side` pixels, as fvcore counts them
    (a ResNet-50 at 224: 4.1); None where the trunk cannot be counted."""

    reading: str
    parameters: int
    side: int
    gflops: float | None


def facts(checkpoint: Checkpoint, side: int) -> TrunkFacts:
    """Of a checkpoint's trunk, for images of side x side pixels."""
    parameters, gflops = _counted(checkpoint.arch, checkpoint.stem, checkpoint.reading, side)
    return {
        "reading": checkpoint.reading,
        "parameters": parameters,
        "side": side,
        "gflops": gflops,
    }


@functools.cache
def _counted(arch: str, stem: str, reading: str, side: int) -> tuple[int, float | None]:
    """Parameters, and billions of multiply-adds: on tensors without elements, so in no time."""
    from torch.utils.flop_counter import FlopCounterMode

    if arch.startswith(archs.LIVE):
        trunk = archs.build_trunk(arch, stem, reading).to("meta")
    else:
        with torch.device("meta"):
            trunk = archs.build_trunk(arch, stem, reading)
    parameters = sum(parameter.numel() for parameter in trunk.parameters())
    image = torch.empty(1, 3, side, side, device="meta")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            trunk.eval()(image)
    except Exception:  # whatever a stranger's module does without elements
        return parameters, None
    return parameters, round(counter.get_total_flops() / 2e9, 4)  # it counts both of a multiply-add


class ForwardClock:
    """How many images a second each trunk of this process has passed, by its digest.

    The first batch is not counted: it pays for what is set up once. On a GPU nothing waits before
    `rate` is asked for.
    """

    KEPT = 50  # batches

    def __init__(self) -> None:
        self._batches: dict[str, deque[tuple[int, float | tuple[torch.Event, torch.Event]]]] = {}

    @contextmanager
    def around(self, digest: str, images: int, device: torch.device) -> Iterator[None]:
        """Times one forward pass."""
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        if on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            taken: float | tuple[torch.Event, torch.Event] = (start, end)
        else:
            begun = time.perf_counter()
            yield
            taken = time.perf_counter() - begun
        if digest in self._batches:
            self._batches[digest].append((images, taken))
        else:
            self._batches[digest] = deque(maxlen=self.KEPT)

    def rate(self, digest: str) -> float | None:
        """Images a second; None where no second batch was passed."""
        images, seconds = 0, 0.0
        for count, taken in self._batches.get(digest, ()):
            if isinstance(taken, tuple):
                start, end = taken
                end.synchronize()
                seconds += start.elapsed_time(end) / 1000  # it is in milliseconds
            else:
                seconds += taken
            images += count
        return round(images / seconds, 1) if seconds else None


clock = ForwardClock()
