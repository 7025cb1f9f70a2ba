"""`all_jobs` of a cluster: how many jobs of a grid run at a time, over all of its arrays.

Slurm limits each array for itself, when it is submitted. So the number is shared out among the
arrays that may run side by side, by their sizes, and what is left over waits behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backbench.launch.records import Record, Target


@dataclass(frozen=True)
class Caps:
    """Of the arrays that are about to be submitted, in their order."""

    at_once: list[int | None]  # jobs of each at a time; None: the cluster's own `jobs`
    lanes: int  # so many arrays side by side
    first: list[str]  # arrays on Slurm that must be over before any of these

    @classmethod
    def of(
        cls,
        target: Target,
        records: Mapping[str, Record],
        active: Mapping[str, str],
        sizes: Sequence[int],
    ) -> Caps:
        """`active`: name -> Slurm's number of the jobs that are there now."""
        most, each = target.cluster.all_jobs, target.cluster.jobs
        if most is None or not sizes:
            return cls([None] * len(sizes), lanes=max(1, len(sizes)), first=[])
        # 1. What the grid's earlier arrays may still take
        left: Counter[str] = Counter()
        share: dict[str, int] = {}
        for name, number in active.items():
            submission = records[name].submission
            if submission.grid == target.grid:
                array = number.split("_")[0]
                left[array] += 1
                share[array] = submission.at_once or each
        free = most - sum(min(count, share[array]) for array, count in left.items())
        # 2. Where that is everything, the new ones come after them
        first = sorted(left) if free < 1 else []
        free = most if first else free
        # 3. The rest by size; arrays beyond it stand behind others, one by one in each lane
        lanes = min(free, len(sizes))
        if lanes < len(sizes):
            return cls([1] * len(sizes), lanes, first)
        spare = free - lanes
        shares = [1 + spare * size // sum(sizes) for size in sizes]
        return cls([min(each, share) for share in shares], lanes, first)

    def behind(self, number: int, array_ids: Sequence[str]) -> list[str]:
        """The arrays after whose end array `number` may start; `array_ids` of those before it."""
        if number < self.lanes:
            return self.first
        return [array_ids[number - self.lanes]]
