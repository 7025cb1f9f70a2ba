"""--eval-only: a trained detector scored again, with its own rows where it is another evaluation.

What only its scoring reads -- the file that it is scored on, sizes and thresholds of testing -- may
be another than in its training: that evaluation is a run of its own in a folder below the trained
one's, so the numbers of the two stay apart and both are on the board.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from backbench.errors import BadInput
from backbench.runs.folder import RUN_FILE
from detection.run import FINAL_FILE, DetectionRun

FOLDER = "evaluations"
SCORING = ("DATASETS.TEST", "TEST.")  # how the keys begin that only scoring reads
IMAGES = ("train_images", "val_images")  # of an identity: what the images hold
TRAINING = "TEST.PRECISE_BN."  # of those, what belongs to the training


def evaluation(run: DetectionRun, identity: Mapping[str, object]) -> DetectionRun:
    """Choose the folder of this evaluation: the trained run's own if nothing differs, else a folder
    below it. Raises BadInput if there is no detector, or another training's."""
    if not (run.out / FINAL_FILE).exists():
        file = run.out / FINAL_FILE
        raise BadInput(f"{file}: no trained detector to evaluate; run without --eval-only first")
    now = json.loads(json.dumps(identity))
    then = _trained(run.out)
    if then is None or then == now or _training(then) != _training(now):
        return run  # and the folder says what differs, if anything does
    named = {key: value for key, value in now.items() if key not in IMAGES}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
    name = f"{str(now['val']).split(':')[0]}-{digest[:8]}"
    return replace(run, out=run.out / FOLDER / name, trained=run.out)


def _trained(out: Path) -> dict[str, object] | None:
    """The identity of the run that made the detector; None where its folder does not say."""
    try:
        return dict(json.loads((out / RUN_FILE).read_text())["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _training(identity: Mapping[str, object]) -> dict[str, object]:
    """The part of an identity that decides the detector itself."""
    out = {k: v for k, v in identity.items() if k not in ("config", "val", "val_images")}
    config, keys = identity.get("config"), {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        scoring = key.startswith(SCORING) and not key.startswith(TRAINING)
        if not scoring and not key.endswith("_TEST"):
            keys[key] = value
    return out | {"config": keys}
