"""Says what may be meant by a verb or an option that backbench does not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Set

# Verbs of other programs, and words for what these verbs do
VERBS = {
    "benchmark": "evaluate",
    "convert": "import` or `backbench export",
    "eval": "evaluate",
    "detection": "detect",
    "features": "analyze",
    "measure": "evaluate",
    "probe": "linear",
    "score": "evaluate",
    "segment": "evaluate MODEL segmentation/voc2012",
    "show": "inspect",
    "test": "evaluate",
    "train": "pretrain",
}
# Options of other programs: what is said here, where a verb has it. -j is looked up as --j
OPTIONS = {
    "--ckpt": "MODEL",
    "--checkpoint": "MODEL",
    "--checkpoint-path": "MODEL",
    "--model": "MODEL",
    "--model-path": "MODEL",
    "--pretrained": "MODEL",
    "--weights": "MODEL",
    "--cpu": "--accelerator cpu",
    "--cuda": "--accelerator cuda",
    "--device": "--accelerator",
    "--gpu": "--accelerator cuda",
    "--gpus": "--devices",
    "--num-gpus": "--devices",
    "--nproc-per-node": "--devices",
    "--data-dir": "--data",
    "--data-path": "--data",
    "--data-root": "--data",
    "--root": "--data",
    "--output": "--out",
    "--output-dir": "--out",
    "--save-dir": "--out",
    "--image-size": "--size",
    "--img-size": "--size",
    "--input-size": "--size",
    "--resolution": "--size",
    "--j": "--workers",
    "--o": "--out",
    "--num-workers": "--workers",
    "--task": "TASK",
    "--tasks": "TASK",
}
# The fields that take such words
WITHOUT_FLAG = {
    "MODEL": {"words", "checkpoints", "checkpoint", "file"},
    "TASK": {"words"},
}
# Options of other programs that are keys of a protocol or a recipe here. A length is not among them:
# it is `epochs` of a pretraining, `length.default.epochs` of a probe
KEYS = {
    "--b": "batch_size",
    "--batch-size": "batch_size",
    "--bs": "batch_size",
    "--k": "k",
    "--learning-rate": "lr",
    "--lr": "lr",
    "--momentum": "momentum",
    "--optimizer": "optimizer",
    "--temperature": "temperature",
    "--wd": "weight_decay",
    "--weight-decay": "weight_decay",
}


def for_verb(word: str, verbs: Collection[str]) -> str:
    """Return what may be meant by `word`, which is none of the `verbs` of `backbench`; "" where
    nothing is near."""
    # Imported here: a line without a mistake is parsed without the tasks
    from backbench import tasks

    said = word.lower()
    if said in verbs:
        return f"did you mean `backbench {said}`?"
    if said in VERBS:
        return f"did you mean `backbench {VERBS[said]}`?"
    if said in tasks.TASKS:
        return (
            f"it is a task: `backbench evaluate MODEL {said} --data FOLDER --out RUNS`"
        )
    close = difflib.get_close_matches(said, verbs, n=1)
    return f"did you mean `backbench {close[0]}`?" if close else ""


def for_option(
    word: str, *, flags: Collection[str], bare: Set[str], changes: bool
) -> str:
    """Return what may be meant by the option `word`; "" where nothing is near.

    The verb that does not have it has `flags`, and words without a flag that the fields `bare` take.
    Where it takes `changes`, k=5 is one of them."""
    flag, _, value = word.partition("=")
    said = "--" + flag.lstrip("-").replace("_", "-").lower()
    if said in flags:
        return f"{flag}: did you mean {said}?"
    meant = OPTIONS.get(said, "")
    if meant.partition(" ")[0] in flags:
        return f"{flag} is {meant} here"
    if bare & WITHOUT_FLAG.get(meant, set()):
        return f"a {meant} stands without {flag} before it"
    if said in KEYS:
        key = KEYS[said]
        if changes:
            return f"{flag} is a key here: {key}={value or 'VALUE'}"
        if "words" in bare:
            return f"{flag} is a protocol's key: `backbench linear MODEL --protocol NAME {key}=VALUE`"
    # Without the dashes, which all of them share
    close = difflib.get_close_matches(said[2:], [each[2:] for each in flags], n=1)
    return f"{flag}: did you mean --{close[0]}?" if close else ""
