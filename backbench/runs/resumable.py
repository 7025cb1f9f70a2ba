"""Steps of a run that a signal may stop at any of them, and that the same command continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.errors import Preempted

if TYPE_CHECKING:
    from backbench.parallel.distributed import Agreement
    from backbench.runs.run_progress import Progress
    from backbench.runs.state import StopFlag


@dataclass
class ResumableSteps:
    """Yields the steps that are left, and between two of them does what every long loop must do:

        steps = ResumableSteps(first, total, progress=..., save=..., due=..., ...)
        for step in steps:
            loss = ...  # the loop's own work stands where it is
            steps.show(loss=loss)

    After each step the ranks vote, the progress is shown, the state is saved where that is due,
    and a signal saves it and raises Preempted. All ranks iterate alike, since a vote is an
    exchange among them; one of them may break only where all do."""

    first: int  # units that an earlier run has made
    total: int  # units of the whole run
    _: KW_ONLY
    stop: StopFlag | None
    agreement: Agreement
    progress: Progress | None  # rank 0's; None on the others
    # save(done) makes a new run start at `done`. All ranks call it after the same step.
    save: Callable[[int], None]
    # due(done, age): is it time to save, `age` seconds after the last state?
    due: Callable[[int, float], bool]
    size: int = 1  # units of a step: the images of a batch, where a loop counts images
    place: str = (
        "at step {done} of {total}"  # where a stop leaves the run, in its message
    )
    run: Path | None = None  # the folder that the message names
    shown: dict[str, float] = field(default_factory=dict)

    def show(self, **values: float) -> None:
        """Show these beside the progress, until others are given."""
        self.shown = values

    def __iter__(self) -> Iterator[int]:
        saved = time.monotonic()
        for step in range(self.first, self.total, self.size):
            yield step
            done = min(step + self.size, self.total)

            # 1. The vote. A signal reaches one rank, and the ranks' clocks differ: what one of them
            #    finds, all do after the same step.
            signalled = self.stop is not None and self.stop.requested is not None
            due = self.due(done, time.monotonic() - saved)
            stopping, due = self.agreement.any(signalled, due)

            # 2. The progress
            if self.progress is not None:
                self.progress.advance(done - step, **self.shown)

            # 3. The state. A signal saves it after the last step too, as what follows the loop may
            #    take long and be stopped as well.
            if stopping or due:
                self.save(done)
                saved = time.monotonic()

            # 4. The stop. After the last step there is nothing to stop.
            if stopping and done < self.total:
                self._leave(done)

    def _leave(self, done: int) -> None:
        # No rank ends before rank 0 has saved, as launchers kill all ranks as soon as one has
        # ended. Each rank waits in this exchange until all have come to it.
        self.agreement.any(True)
        signal = "a signal to another process"
        if self.stop is not None and self.stop.requested is not None:
            signal = self.stop.requested
        place = self.place.format(done=done, total=self.total)
        named = "" if self.run is None else f"{self.run}: "
        raise Preempted(
            f"{named}stopped by {signal} {place}; the same command continues"
        )
