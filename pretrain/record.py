"""What a run tells as it goes on: the terms of its loss, rows of metrics.jsonl, the progress
line."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backbench.runs.run_progress import Progress
from backbench.runs.terminal import log
from pretrain import monitor
from pretrain.data import LoadedBatch
from pretrain.recipe import PretrainConfig

Terms = Mapping[str, Tensor]  # "loss" and what else a method logs, 0-dim


class RecentTerms:
    """The terms of the steps since the last row of metrics.jsonl, which will be their mean.

    They stay on the device, because reading one waits for all that was asked of it before. Part of
    the saved state, so that a row may span a restart.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, parts: Sequence[Terms], device: torch.device) -> None:
        """One step's terms: the mean over its micro-batches."""
        row = {}
        for name in parts[0]:
            row[name] = (
                torch.stack([terms[name] for terms in parts]).mean(0).to(device, non_blocking=True)
            )
        self.rows.append(row)

    def first_not_finite(self) -> int | None:
        """The place of the first loss that is infinite or nan; waits for the device."""
        # One read for all steps since the last row
        finite = torch.stack([row["loss"] for row in self.rows]).isfinite().tolist()
        return None if all(finite) else finite.index(False)

    def mean(self) -> dict[str, float]:
        """Of each term over the steps; waits for the device."""
        means = {}
        for name in self.rows[0]:
            means[name] = float(torch.stack([row[name].double() for row in self.rows]).mean())
        return means


class RunLog:
    """Rows and progress, where `rank` is 0; on other ranks nothing is written.

    A row is the mean of the terms since the last one, the features' statistics, and of the time
    since then images per second and the share that was spent waiting for batches.
    """

    def __init__(
        self,
        run: Path,
        config: PretrainConfig,
        *,
        step: int,
        last: int,
        rank: int,
        tensorboard: bool,
    ) -> None:
        self.metrics: monitor.MetricsWriter | None = None
        self.progress: Progress | None = None
        if rank == 0:
            self.metrics = monitor.MetricsWriter(run, from_step=step, tensorboard=tensorboard)
            self.progress = Progress(run, last, config.name, done=step)
        self.batch_size = config.batch_size
        self.shown: dict[str, float] = {}  # beside the progress, from the last row
        self.left_out: set[str] = set()
        self.since = time.monotonic()  # of the last row, without pauses
        self.waited, self.made = 0.0, 0  # since then: seconds waiting for batches, steps

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a batch."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training, so that the speed does not count it."""
        began = time.monotonic()
        yield
        # Time that is not training passes before the row's time begins
        self.since += time.monotonic() - began

    def warn_of_skipped(self, parts: Sequence[LoadedBatch]) -> None:
        """Each image that was left out is named once."""
        for part in parts:
            for line in part.skipped:
                if line not in self.left_out:
                    log.warning("left out: %s", line)
                    self.left_out.add(line)

    def step(
        self,
        recent: RecentTerms,
        features: monitor.Features,
        *,
        done: int,
        epoch: int,
        lr: float,
        row_due: bool,
    ) -> None:
        """`done` steps are made, the last of them in `epoch` and at `lr`.

        A row starts the terms anew.
        """
        self.made += 1
        if row_due:
            self._row(recent, features, done=done, epoch=epoch, lr=lr)
        if self.progress is not None:
            self.progress.advance(1, **self.shown)

    def _row(
        self, recent: RecentTerms, features: monitor.Features, *, done: int, epoch: int, lr: float
    ) -> None:
        if self.metrics is None:  # nothing is told by this rank
            recent.rows.clear()
            return
        # 1. What the steps came to: the only place that waits for the device.
        now = time.monotonic()
        means = recent.mean() | features.statistics()
        recent.rows.clear()
        # 2. How fast they were; the clock starts anew for the next row.
        speed = {
            "images_per_s": self.made * self.batch_size / (now - self.since),
            "waiting": self.waited / (now - self.since),
            "memory_gib": _peak_memory(),
        }
        self.since, self.waited, self.made = now, 0.0, 0
        # 3. What the progress line shows until then.
        self.shown = {
            "loss": means["loss"],
            "lr": lr,
            "img/s": speed["images_per_s"],
            "waiting": speed["waiting"],
        }
        # 4. Rows count steps from 0: the row after step number `done` is that of step done - 1.
        self.metrics.write(done - 1, epoch=epoch, lr=lr, **means, **speed)
        monitor.warn_if_collapsed(means, done)

    def knn(self, score: float | None, *, done: int, epoch: int) -> None:
        """The score after `done` steps, at the end of `epoch`; None where there is none."""
        if score is not None and self.metrics is not None:
            self.metrics.write(done - 1, epoch=epoch, knn=score)
            log.info("epoch %d: kNN %.2f%%", epoch + 1, score)


def _peak_memory() -> float:
    """The most that this process has held so far, in GiB: of the GPU, or of main memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
