"""Names of tensors: batch norms' buffers, wrappers' prefixes, Detectron2's names, and their printing."""

import re
from collections.abc import Iterable

from backbench.untrusted.printable import shown


def is_counter(name: str) -> bool:
    """Return True for a batch norm's number of batches, which nothing is computed from."""
    return name.endswith("num_batches_tracked")


def is_statistic(name: str) -> bool:
    """Return True for a batch norm's running mean or variance."""
    return name.endswith(("running_mean", "running_var"))


# What wrappers add to the names of the modules inside them: DistributedDataParallel and averaged
# models, torch.compile, activation checkpointing, FSDP (its older name, too), Lightning Fabric
_WRAPPER = (
    r"(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_fpw_module"
    r"|_forward_module)\."
)
_AROUND = re.compile(rf"^(?:{_WRAPPER})+")
_INSIDE = re.compile(rf"(?<=\.)(?:{_WRAPPER})+")


def unwrapped(key: str) -> str:
    """Return the key without what wrappers of the whole model put before it."""
    return _AROUND.sub("", key)


def without_wrapped_parts(key: str) -> str:
    """Return the key without what wrappers of the model's parts put into it:
    layer1.0._orig_mod.conv1.weight becomes layer1.0.conv1.weight. What stands before it stays."""
    around = _AROUND.match(key)
    start = around.end() if around else 0
    return key[:start] + _INSIDE.sub("", key[start:])


def detectron2_name(key: str) -> str:
    """Translate torchvision's name to Detectron2's, layer1.0.bn2.weight to res2.0.conv2.norm.weight
    (detectron2/modeling/backbone/resnet.py)."""
    parts = key.split(".")
    if parts[0] == "conv1":
        return f"stem.{key}"
    if parts[0] == "bn1":
        return f"stem.conv1.norm.{parts[1]}"
    stage, block, part, *rest = parts
    if part == "downsample":
        # downsample.0 is the convolution, downsample.1 the norm.
        number, *rest = rest
        name = "shortcut" if number == "0" else "shortcut.norm"
    else:
        # A norm belongs to the convolution that it follows.
        name = re.sub(r"^bn(\d)$", r"conv\1.norm", part)
    return ".".join([f"res{int(stage[-1]) + 1}", block, name, *rest])


def first_names(items: Iterable[str], count: int = 3) -> str:
    """List the first names as text: 'a, b, c and 7 more'."""
    listed = [shown(item, 150) for item in items]
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more
