"""Says what a file holds beside its trunk: the trunk's heads, and what is left behind."""

from torch import Tensor

from backbench.untrusted.printable import shown
from backbench.weights.family import TrunkInFile, in_file
from backbench.weights.file_contents import FileContents
from backbench.weights.tensor_names import unwrapped


def heads(contents: FileContents, trunk: TrunkInFile) -> dict[str, Tensor]:
    """Copy those tensors of the trunk's classifier, projector and predictor that the file holds."""
    table = contents.tables[trunk.table]
    copied = {}
    for key, name in _names_of_heads(contents, trunk).items():
        copied[name] = table[key].detach().clone()
    return copied


def _names_of_heads(contents: FileContents, trunk: TrunkInFile) -> dict[str, str]:
    """Return key in the file -> name, for what is kept beside the trunk. A classifier has the
    names of the trunk's own library."""
    table = contents.tables[trunk.table]
    prefixes = []
    for other in contents.trunks:
        if other is not trunk and other.prefix and other.table == trunk.table:
            prefixes.append(other.prefix)
    names = {}
    for key in trunk.head_keys(table, tuple(prefixes)):
        names[key] = unwrapped(key)
    names |= trunk.classifier(table)
    return {key: name for key, name in names.items() if in_file(table[key])}


def left_behind(contents: FileContents, trunk: TrunkInFile) -> list[str]:
    """Say what the file holds that goes in neither as the trunk nor as its head."""
    out = []
    for name, alike in contents.encoders.items():
        if trunk not in alike:
            out.append(f"the encoder {shown(name)}")
    kept = {(trunk.table, key) for key in _names_of_heads(contents, trunk)}
    for group in _grouped(contents, kept):
        example = shown(str(group["example"]), 150)
        out.append(f"{group['group']}: {group['tensors']} ({example})")
    return out


def leftovers(contents: FileContents) -> list[dict[str, str | int]]:
    """Count the tensors outside the trunks, grouped by purpose, with an example of each group."""
    return _grouped(contents, set())


def _grouped(
    contents: FileContents, kept: set[tuple[str, str]]
) -> list[dict[str, str | int]]:
    """Group the tensors outside the trunks, without those that are `kept`."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for table, key in contents.free():
        if (table, key) in kept:
            continue
        name = f"{table}: {key}" if table else key
        elements = (contents.tables | contents.dropped)[table][key].numel()
        groups.setdefault(_purpose(table, key), []).append((name, elements))
    out: list[dict[str, str | int]] = []
    for purpose, tensors in sorted(groups.items()):
        row: dict[str, str | int] = {
            "group": purpose,
            "tensors": len(tensors),
            "elements": sum(elements for _, elements in tensors),
            "example": tensors[0][0],
        }
        out.append(row)
    return out


# Purpose -> parts of a name that tell it; the first that fits counts.
_PURPOSES = (
    ("queue", ("queue", "memory_bank", "feature_bank")),
    ("detector", ("rpn.", "roi_head", "fpn", "proposal_", "bbox_head", "mask_head")),
    ("predictor", ("predict",)),
    ("prototypes", ("prototype", "center", "last_layer")),
    ("classifier", ("classifier", "linear_", "cls_head")),
    ("another network", ("patch_embed", "blocks.", "pos_embed", "cls_token")),
    ("projector", ("proj", "fc.", "head", "neck", "mlp", "g.", "bn.")),
)
# One layer alone, right behind the trunk: MoCo v1's projector has the name of torchvision's classifier.
_ONE_LAYER = ("fc.weight", "fc.bias", "head.weight", "head.bias")


def _purpose(table: str, key: str) -> str:
    """Guess the purpose of a tensor outside the trunk by its name."""
    if any(part in table.lower() for part in ("optim", "scheduler", "scaler", "amp")):
        return "optimiser"
    name = unwrapped(key).lower()
    if name in _ONE_LAYER:
        return "classifier or projector"
    for purpose, parts in _PURPOSES:
        if any(part in name for part in parts):
            return purpose
    return "other"
