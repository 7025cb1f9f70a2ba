"""What a trunk costs, beside what it is worth: parameters, multiply-adds, images a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from backbench.results.store import Result


class TrunkCost(NamedTuple):
    """Of one checkpoint, at the largest of the image sizes that it was measured at.

    `gflops` are billions of multiply-adds an image; `images_per_second` is the last that was
    measured, on `hardware`. None where no row says it. With `detector`, `side` is the shorter
    one, `gflops` are those of the maps below the detector, and the speed is the whole detector's.
    """

    parameters: int
    side: int
    gflops: float | None
    images_per_second: float | None = None
    hardware: str | None = None
    detector: bool = False

    @property
    def text(self) -> str:
        """'11.2M parameters · 1.8 GFLOPs at 224 px · 35 images/s'"""
        parts = [f"{self.parameters / 1e6:.1f}M parameters"]
        if self.gflops is not None:
            parts.append(f"{self.gflops:.2g} GFLOPs at {self.side} px")
        if self.images_per_second is not None:
            parts.append(f"{self.images_per_second:.3g} images/s")
        return " · ".join(parts)


FIELDS = TrunkCost._fields[:-1]  # of a table


def of_result(result: Result) -> TrunkCost | None:
    """What one row says of its trunk; None where it says nothing, or nothing that could be true."""
    said = result.provenance.get("trunk")
    if not isinstance(said, Mapping):
        return None
    parameters, side, sides = (said.get(key) for key in ("parameters", "side", "sides"))
    detector = False
    if side is None and isinstance(sides, list) and sides:
        side, detector = min(sides, key=lambda s: s if type(s) is int else 0), True
    if type(parameters) is not int or type(side) is not int or parameters < 0 or side < 1:
        return None
    speed, hardware = _number(result.origin.get("images_per_second")), result.origin.get("hardware")
    return TrunkCost(
        parameters,
        side,
        _number(said.get("gflops")),
        speed,
        str(hardware) if speed is not None and hardware else None,
        detector,
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return float(value)


def of_results(results: Iterable[Result]) -> dict[str, TrunkCost]:
    """Checkpoint -> what its rows say; a speed is that of the last row that has one. What a detector
    says counts where nothing else does: its images have a size of their own."""
    out: dict[str, TrunkCost] = {}
    recorded: dict[str, float] = {}
    for result in results:
        if "trunk" not in result.provenance:  # most older rows
            continue
        new, digest = of_result(result), result.checkpoint
        if new is None:
            continue
        known = out.get(digest)
        if known is not None and _rank(new) < _rank(known):
            continue
        when = float(result.origin.get("recorded") or 0.0)
        if known is not None and _rank(new) == _rank(known):
            older = new.images_per_second is None or when < recorded[digest]
            if older and known.images_per_second is not None:
                continue
        out[digest], recorded[digest] = new, when
    return out


def _rank(cost: TrunkCost) -> tuple[bool, int]:
    """Of two costs of one checkpoint the greater stands for it."""
    return not cost.detector, cost.side
