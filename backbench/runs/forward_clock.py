"""Measures how many images a second pass through the networks of this process."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# How long a batch took: seconds on a CPU, the events around it on a GPU
Taken = float | tuple[torch.Event, torch.Event]


class ForwardClock:
    """Measures images per second of each trunk, by its digest. A trunk's first batch pays for the
    set-up and is not counted. On a GPU only `rate` waits for the device."""

    KEPT = 50  # batches of a trunk

    def __init__(self) -> None:
        self._batches: dict[str, deque[tuple[int, Taken]]] = {}

    @contextmanager
    def around(self, digest: str, images: int, device: torch.device) -> Iterator[None]:
        """Time the forward pass of this many images inside."""
        taken: Taken
        if device.type == "cuda" and torch.cuda.is_available():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            taken = (start, end)
        else:
            begun = time.perf_counter()
            yield
            taken = time.perf_counter() - begun
        if digest in self._batches:
            self._batches[digest].append((images, taken))
        else:  # the trunk's first batch
            self._batches[digest] = deque(maxlen=self.KEPT)

    def rate(self, digest: str) -> float | None:
        """Return the images per second; None where no second batch was passed."""
        images = 0
        seconds = 0.0
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
