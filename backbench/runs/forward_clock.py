"""Measures how many images a second pass through the networks of this process."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ForwardClock:
    """Measures images per second of each trunk, by its digest. The first batch, which pays for the
    set-up, is not counted. On a GPU nothing waits but `rate`."""

    KEPT = 50  # batches

    def __init__(self) -> None:
        self._batches: dict[
            str, deque[tuple[int, float | tuple[torch.Event, torch.Event]]]
        ] = {}

    @contextmanager
    def around(self, digest: str, images: int, device: torch.device) -> Iterator[None]:
        """Times one forward pass."""
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        if on_gpu:
            start, end = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
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
