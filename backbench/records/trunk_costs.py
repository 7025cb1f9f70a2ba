"""The cost of a trunk, shown beside its numbers: parameters, multiply-adds, images a second."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from backbench.records.result_line import Result


class TrunkCost(NamedTuple):
    """The cost of one checkpoint's trunk, at the largest image size that it was measured at.

    For a trunk that was only measured below a detector, `side` is the shorter side of its images,
    `gflops` are those of the maps below the detector, and the speed is the whole detector's.
    """

    parameters: int
    side: int
    gflops: float | None  # billions of multiply-adds an image
    images_per_second: float | None = None  # the last that was measured, on `hardware`
    hardware: str | None = None
    detector: bool = False

    @property
    def text(self) -> str:
        """'11.2M parameters · 1.8 GFLOPs at 224 px · 35 images/s'"""
        parts = [f"{self.parameters / 1e6:.1f}M parameters"]
        if self.gflops is not None:
            parts.append(f"{plain(self.gflops, 2)} GFLOPs at {self.side} px")
        if self.images_per_second is not None:
            parts.append(f"{plain(self.images_per_second, 3)} images/s")
        return " · ".join(parts)

    @property
    def rank(self) -> tuple[bool, int]:
        """The sorting key among the costs of one checkpoint: the greatest stands for it."""
        return not self.detector, self.side


def plain(value: float, digits: int) -> str:
    """Return a number with so many significant digits, and never with an exponent: 0.0051, 35,
    1260."""
    if not value:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    behind = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:.{behind}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# The columns of a table: all but `detector`
FIELDS = TrunkCost._fields[:-1]


def of_result(result: Result) -> TrunkCost | None:
    """Return the cost that one row states; None where it states none."""
    trunk = result.facts.get("trunk")
    if not trunk or "parameters" not in trunk:
        return None
    side = trunk.get("side")
    is_detector = False
    if side is None and trunk.get("sides"):
        side = min(trunk["sides"])
        is_detector = True
    if side is None:
        return None
    # Hardware is that of the speed; without a speed it says nothing.
    speed = result.origin.get("images_per_second")
    hardware = None
    if speed is not None:
        hardware = result.origin.get("hardware") or None
    return TrunkCost(
        parameters=trunk["parameters"],
        side=side,
        gflops=trunk.get("gflops"),
        images_per_second=speed,
        hardware=hardware,
        detector=is_detector,
    )


def of_results(results: Iterable[Result]) -> dict[str, TrunkCost]:
    """Return checkpoint -> cost and last speed; costs below a detector only if there is no
    other."""
    costs: dict[str, TrunkCost] = {}
    by_time = sorted(results, key=lambda result: result.origin.get("recorded") or 0.0)
    for result in by_time:
        new = of_result(result)
        known = costs.get(result.checkpoint)
        if new is None:
            continue
        if known is not None and new.rank < known.rank:
            continue
        # Of equal rank, the last measured speed counts: one that states none keeps the known.
        states_none = new.images_per_second is None
        if known is not None and new.rank == known.rank and states_none:
            new = new._replace(
                images_per_second=known.images_per_second, hardware=known.hardware
            )
        costs[result.checkpoint] = new
    return costs
