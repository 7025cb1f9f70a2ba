"""Makes the request that measures one task, for grids and for `backbench evaluate` alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbench.errors import BadInput
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.options import Request
from backbench.requests.probe import LinearRequest, OodRequest


def measuring_request(
    verb: str,
    files: Sequence[Path],
    *,
    data: Path,
    out: Path,
    dataset: str | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    percent: int | None = None,
    lists: Path | None = None,
    engine: str = "auto",
    seed: int = 0,
    accelerator: str = "auto",
    workers: int | None = None,
) -> Request:
    """Make the request of a measuring verb for checkpoint `files`; most verbs take one of them.
    `recipe` is a protocol, or a detector's config; without one it is the verb's own. A detector's
    `dataset` is a folder of boxes; without one its config names its data."""
    if verb == "detect":
        # A detector's devices and loader are keys of its config
        return DetectRequest(
            config_file=recipe,
            dataset=dataset,
            engine=engine,  # type: ignore[arg-type]  # checked where it was read
            checkpoint=files[0],
            data=data,
            out=out,
            resume=True,
            seed=seed or None,  # 0 is the config's own
        )
    place: dict[str, Any] = {
        "data": data,
        "out": out,
        "seed": seed,
        "accelerator": accelerator,
        "workers": workers,
    }
    if verb == "analyze":
        if recipe is not None:
            place["recipe"] = recipe
        return AnalyzeRequest(checkpoints=tuple(files), dataset=str(dataset), **place)
    if recipe is not None:
        place |= {"protocol": recipe, "overrides": tuple(overrides)}
    if verb == "linear":
        return LinearRequest(checkpoints=tuple(files), datasets=str(dataset), **place)
    if verb == "ood":
        return OodRequest(checkpoints=tuple(files), datasets=str(dataset), **place)
    if verb == "semisup":
        return SemisupRequest(
            checkpoint=files[0],
            dataset=dataset,
            percent=percent,  # type: ignore[arg-type]  # 1 or 10 by its task's row
            lists=lists,
            **place,
        )
    if verb == "finetune":
        return FinetuneRequest(checkpoint=files[0], dataset=str(dataset), **place)
    raise BadInput(f"'{verb}' measures nothing")
