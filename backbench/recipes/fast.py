"""Lists the keys that `pretrain --fast` sets, and marks trunks trained so.

The papers' recipes have `reference` views and fp32, as their authors' code has. With `--fast` the
same crops of the same images come in the same order; views and network are computed in less time
(docs/fast.md). Only the recipe of a run tells whether it was fast."""

import json
from collections.abc import Mapping, Sequence

from backbench.errors import BadInput

KEYS: Mapping[str, str | bool] = {
    "views.pipeline": "fast",  # its colour and blur on the GPU, where there is one
    "precision": "bf16",
    "channels_last": True,
    "compile": "cuda",  # on a GPU only: elsewhere it takes minutes and gains nothing
}
SWITCH = "--fast"
WORD = "fast"  # beside a name and a verdict
# The key of a result's provenance that holds its trunk's recipe, a.b.c -> value
PRETRAINING = "pretraining"

# Values that are not the papers' and move a number by more than rounding. Layout and compilation
# only change the order of sums
_NOT_THE_LETTER: Mapping[str, Sequence[str]] = {
    "views.pipeline": ("fast",),
    "precision": ("tf32", "bf16", "fp16"),
}


def spelled() -> list[str]:
    """Write the keys as overrides: views.pipeline=fast."""
    out = []
    for key, value in KEYS.items():
        text = value if isinstance(value, str) else json.dumps(value)
        out.append(f"{key}={text}")
    return out


def overrides(
    recipe: Mapping[str, object], by_hand: Sequence[str], where: str
) -> list[str]:
    """Return the overrides of `--fast`, then those `by_hand`, which win.

    BadInput for a recipe that itself demands another precision, unless one was given by hand."""
    # The command line's --help needs the keys alone
    from backbench.recipes import config

    demanded = recipe.get("precision")
    chosen = config.apply_overrides({}, by_hand).get("precision")
    if demanded is not None and chosen is None and demanded != KEYS["precision"]:
        raise BadInput(
            f"{where}: the recipe demands precision {demanded}, and --fast computes in"
            f" {KEYS['precision']}; leave --fast out, or give precision=... by hand"
        )
    return [*spelled(), *by_hand]


def of_trunk(provenance: Mapping[str, object]) -> dict[str, object]:
    """Return the keys that a trunk's provenance adds to a result's, where they are known.

    "pretraining" is the flat recipe; "trained_on" lists datasets, as NAME or NAME:SPLIT."""
    from backbench.recipes import config, own_probe

    out: dict[str, object] = {}
    recipe = provenance.get("recipe")
    dataset = None
    if isinstance(recipe, Mapping):
        flat = config.flat(recipe)
        if flat:
            out[PRETRAINING] = flat
        dataset = own_probe.pretrained_on(recipe)
    trained_on = provenance.get("trained_on")
    if trained_on:
        out["trained_on"] = trained_on
    elif dataset:
        out["trained_on"] = [dataset]
    return out


def word(provenance: Mapping[str, object]) -> str:
    """Return the mark beside the verdict on a result, by its provenance.

    It is "fast"; or the keys in which the recipe differs from the papers' (precision=fp16); or ""
    where it does not, or no recipe is known."""
    keys = provenance.get(PRETRAINING)
    if not isinstance(keys, Mapping):
        return ""
    otherwise = {
        key: keys[key]
        for key, values in _NOT_THE_LETTER.items()
        if keys.get(key) in values
    }
    if otherwise == {key: KEYS[key] for key in _NOT_THE_LETTER}:
        return WORD
    return ", ".join(f"{key}={value}" for key, value in otherwise.items())
