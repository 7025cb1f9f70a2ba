"""Says whether a trunk of a file is whole, and what keeps it from being so."""

import difflib
from collections.abc import Mapping, Sequence

from torch import Tensor

from backbench.errors import BadInput
from backbench.untrusted.printable import shown
from backbench.weights import archs
from backbench.weights.checkpoint import unusable
from backbench.weights.family import TrunkInFile, channels_advice, in_file
from backbench.weights.file_contents import IN_IMPORT, SAY_WHAT_IT_IS, FileContents
from backbench.weights.tensor_names import first_names, is_counter, is_statistic


def refuse_unless_whole(
    contents: FileContents, trunk: TrunkInFile, allow_missing_statistics: bool
) -> None:
    """Raise BadInput that names everything that keeps the trunk from being whole, and what may be
    meant."""
    found = problems(contents, trunk)
    if missing_statistics(trunk) == "all" and not allow_missing_statistics:
        raise BadInput(
            f"'{trunk.label}' has no batch-norm statistics (running_mean, running_var), so its"
            " frozen features would be noise; --allow-missing-statistics"
            f" {IN_IMPORT} takes it for finetuning"
        )
    wrong = []
    for what, keys in found.items():
        if keys:
            wrong.append(f"{len(keys)} {what}: {first_names(keys)}")
    if not wrong:
        return
    meant = ""
    if found["missing"]:
        # Suggest the file's own key that looks most like the first missing one. A key that a
        # trunk of another table has taken is not meant.
        taken = {key for trunk in contents.trunks for key in trunk.keys.values()}
        free = [key for _, key in contents.free() if key not in taken]
        close = difflib.get_close_matches(
            found["missing"][0], free[:5000], 1, cutoff=0.8
        )
        if close:
            meant = f" (is '{shown(close[0])}' meant?)"
    form = f"no known format{contents.hint()}"
    if contents.form is not None:
        form = f"format {contents.form.name}"
    advice = ""
    channels = _other_channels(contents, trunk)
    if channels is not None:
        advice = f"; {channels_advice(channels)}"
    elif found["of the wrong shape"]:
        told = archs.advice(contents.tables)
        advice = f"; {told}" if told else trunk.if_misshaped
    if not advice:
        advice = f"; {_next_step(found)}"
    raise BadInput(
        f"'{trunk.label}' is not a whole {trunk.arch} ({form}):"
        f" {'; '.join(wrong)}{meant}{advice}"
    )


def problems(contents: FileContents, trunk: TrunkInFile) -> dict[str, list[str]]:
    """Return the keys that keep the trunk from being whole, by what is wrong with them.

    All are the file's own keys, but for the `missing` ones.
    """
    if trunk.label in contents.problems:
        return contents.problems[trunk.label]
    shapes = trunk.shapes()
    tensors = contents.tables[trunk.table]
    # 1. Tensors that are there, but have another shape or cannot be computed with
    misshaped = []
    not_usable = []
    for ours, key in trunk.keys.items():
        tensor = tensors[key]
        if tuple(tensor.shape) != shapes[ours]:
            misshaped.append(f"{key} {tuple(tensor.shape)} instead of {shapes[ours]}")
        elif reason := _why_unusable(ours, tensor):
            not_usable.append(f"{key} ({reason})")
    # 2. Tensors that are not there
    missing = trunk.missing
    if missing_statistics(trunk) == "all":
        # `checkpoint` refuses or allows the lack of all statistics as a whole.
        missing = [key for key in missing if not is_statistic(key)]
    contents.problems[trunk.label] = {
        "missing": [trunk.prefix + trunk.name_in_file(key) for key in missing],
        "extra inside the trunk": list(trunk.extra),
        "of the wrong shape": misshaped,
        "not usable": not_usable + trunk.contradictions(tensors),
    }
    return contents.problems[trunk.label]


def _other_channels(contents: FileContents, trunk: TrunkInFile) -> int | None:
    """Return how many channels the first convolution takes, where that alone is not the trunk's."""
    shapes = trunk.shapes()
    tensors = contents.tables[trunk.table]
    for ours, key in trunk.keys.items():
        there = tuple(tensors[key].shape)
        wanted = shapes[ours]
        if there == wanted or len(there) != 4 or len(wanted) != 4:
            continue
        if wanted[1] == 3 and (there[0], *there[2:]) == (wanted[0], *wanted[2:]):
            return there[1]
    return None


def missing_statistics(trunk: TrunkInFile) -> str:
    """Return how many running means and variances the file lacks: 'all', 'some' or 'none'."""
    wanted = [key for key in trunk.shapes() if is_statistic(key)]
    absent = [key for key in wanted if key not in trunk.keys]
    if not absent:
        return "none"
    return "all" if len(absent) == len(wanted) else "some"


def _next_step(problems: Mapping[str, Sequence[str]]) -> str:
    """Say what to do about a trunk that is not whole."""
    if problems["missing"]:
        return "give the whole file, as its training wrote it"
    if problems["extra inside the trunk"] or problems["of the wrong shape"]:
        return f"it is another network: {SAY_WHAT_IT_IS}"
    if any("not finite" in problem for problem in problems["not usable"]):
        return "the training has diverged: give an earlier checkpoint of it"
    return "give the file as its training wrote it, in floating point"


def _why_unusable(name: str, tensor: Tensor) -> str:
    """Say why a tensor cannot be the trunk's `name`; empty where it can."""
    if not in_file(tensor):
        return "its elements are not all in the file"
    if is_counter(name):
        return ""
    if not tensor.is_floating_point():
        return str(tensor.dtype).removeprefix("torch.")
    return unusable(name, tensor)
