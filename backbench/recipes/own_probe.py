"""Finds the linear probe that belongs to a checkpoint's method: `--protocol own`.

The methods' own learning rates differ by three orders of magnitude (LORAC 1.2, MoCo and JCL 30), so
one protocol for all would measure the protocol. A pretraining recipe names its own probe (`probe:`,
dataset -> recipe under configs/transfer); for other checkpoints the method decides."""

from collections.abc import Mapping

from backbench.errors import BadInput
from backbench.recipes import config
from backbench.untrusted import printable

# In place of a protocol: the checkpoint's own. In place of a dataset: what it was pretrained on
OWN = "own"
# For any other method: all rates of one grid, of which held-out images choose
ANY_METHOD = {"imagenet": "imagenet_grid"}

# LORAC 6.1, 6.2
_LORAC = {
    "imagenet": "imagenet_lorac",
    "imagenet100": "imagenet100_lorac",
}
# LORAC 6.1, 6.2
_MOCO = {
    "imagenet": "imagenet_moco",
    "imagenet100": "imagenet100_moco",
}
# JCL 4.1, appendix D
_JCL = {
    "imagenet": "imagenet_moco",
    "imagenet100": "imagenet100_jcl",
}
# MIO 3.3
_MIO = {
    "cifar10": "mio_cifar",
    "cifar100": "mio_cifar",
    "stl10": "mio_stl10",
}
# ARB 4.1
_ARB = {
    "imagenet": "imagenet_arb",
    "imagenet100": "imagenet_arb",
    "cifar10": "arb_cifar",
    "cifar100": "arb_cifar",
}
_CLLR = {
    "cifar10": "cllr_cifar",
    "stl10": "cllr_stl10",
    "imagenet100": "cllr_imagenet100",
}
BY_METHOD: Mapping[str, Mapping[str, str]] = {
    "lorac": _LORAC,
    "moco_m": _LORAC,
    "swav": _LORAC,
    "moco": _MOCO,
    "jcl": _JCL,
    "mio": _MIO,
    "arb": _ARB,
    "barlow_twins": _ARB,
    "cllr": _CLLR,
}


def of_recipe(
    recipe: Mapping[str, object], dataset: str, file: str | None = None
) -> str | None:
    """Return the protocol that a pretraining recipe, as plain values, has for a dataset.

    A recipe that was read from the checkpoint `file` may be a stranger's. BadInput where it names
    a file: it must not choose among the reader's own."""
    named = recipe.get("probe")
    if isinstance(named, Mapping) and dataset in named:
        found = str(named[dataset])
        if file is not None and found not in config.recipe_names("transfer"):
            raise BadInput(
                f"{file}: its probe, '{printable.shown(found)}', is no name under configs/transfer;"
                " give a file of yours by hand, --protocol FILE"
            )
        return found
    method = recipe.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    return _of_method(str(name), dataset)


def of_checkpoint(
    name: str, method: str, provenance: Mapping[str, object], dataset: str
) -> str:
    """Return the protocol of a checkpoint for a dataset. BadInput where there is none."""
    recipe = provenance.get("recipe")
    found = _of_method(method, dataset)
    if isinstance(recipe, Mapping):
        found = of_recipe(recipe, dataset, name) or found
    if found is None:
        raise BadInput(
            f"{name}: neither its recipe nor its method '{method}' has a probe of its own for"
            f" {dataset}; give --protocol NAME"
        )
    return found


def pretrained_on(recipe: Mapping[str, object] | None) -> str | None:
    """Return the dataset that a pretraining recipe, as plain values, names; None where it does not."""
    data = None if recipe is None else recipe.get("data")
    dataset = data.get("dataset") if isinstance(data, Mapping) else None
    return None if dataset is None else printable.shown(str(dataset))


def _of_method(method: str, dataset: str) -> str | None:
    return BY_METHOD.get(method, {}).get(dataset) or ANY_METHOD.get(dataset)
