"""Lists the keys that `pretrain --fast` sets, and marks trunks trained so. The papers' recipes have
`reference` views and fp32, as their authors' code has. With `--fast` the same crops of the same
images come in the same order; views and network are computed in less time (docs/fast.md). Only the
recipe of a run tells whether it was fast."""

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
PRETRAINING = (
    "pretraining"  # in a result's provenance: its trunk's recipe, a.b.c -> value
)

# Values that are not the papers' and move a number by more than rounding. Layout and compilation
# only change the order of sums
_NOT_THE_LETTER: Mapping[str, Sequence[str]] = {
    "views.pipeline": ("fast",),
    "precision": ("tf32", "bf16", "fp16"),
}


def spelled() -> list[str]:
    """The keys as overrides: views.pipeline=fast."""
    return [
        f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in KEYS.items()
    ]


def overrides(
    recipe: Mapping[str, object], by_hand: Sequence[str], where: str
) -> list[str]:
    """Return the overrides of `--fast`, then those `by_hand`, which win. BadInput for a recipe that
    itself demands another precision, unless one was given by hand."""
    from backbench.recipes import (
        config,
    )  # the command line's --help needs the keys alone

    demanded = recipe.get("precision")
    chosen = config.apply_overrides({}, by_hand).get("precision")
    if demanded is not None and chosen is None and demanded != KEYS["precision"]:
        computed = f"and --fast computes in {KEYS['precision']}"
        both = f"the recipe demands precision {demanded}, {computed}"
        raise BadInput(
            f"{where}: {both}; leave --fast out, or give precision=... by hand"
        )
    return [*spelled(), *by_hand]


def of_trunk(provenance: Mapping[str, object]) -> dict[str, object]:
    """Return what is known of "pretraining" (a flat recipe) and "trained_on" (NAME, NAME:SPLIT)."""
    from backbench.recipes import config, own_probe

    recipe = provenance.get("recipe")
    found = config.flat(recipe) if isinstance(recipe, Mapping) else {}
    out: dict[str, object] = {PRETRAINING: found} if found else {}
    dataset = own_probe.pretrained_on(recipe) if isinstance(recipe, Mapping) else None
    if names := provenance.get("trained_on") or ([dataset] if dataset else []):
        out["trained_on"] = names
    return out


def word(provenance: Mapping[str, object]) -> str:
    """Return the mark beside a verdict, by a provenance with `of_trunk`: "fast"; or the keys in
    which the recipe differs from the papers (precision=fp16); or "", also where none is known."""
    keys = provenance.get(PRETRAINING)
    if not isinstance(keys, Mapping):
        return ""
    otherwise = {
        k: keys[k] for k, values in _NOT_THE_LETTER.items() if keys.get(k) in values
    }
    if otherwise == {key: KEYS[key] for key in _NOT_THE_LETTER}:
        return WORD
    return ", ".join(f"{key}={value}" for key, value in otherwise.items())
