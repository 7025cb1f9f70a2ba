"""A Checkpoint is the one thing that pretraining hands on: a safetensors file, complete or refused."""

import dataclasses
import functools
import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.runs import atomic
from backbench.untrusted import jsons, printable
from backbench.weights import archs
from backbench.weights.family import NATIVE, PLAIN_STEMS, TrunkFamily
from backbench.weights.header import FORMAT
from backbench.weights.readings import POOLED
from backbench.weights.tensor_names import first_names, is_counter
from backbench.weights.trunk import Trunk
from backbench.weights.weight_file import safetensors_of

SCHEMA = 1
# Tensors in the file are named by these prefixes.
_TRUNK = "trunk."
_HEADS = "heads."
# A key of the provenance; its value is a remark that the pixels were assumed (`assumed_pixels`).
PIXELS_FROM = "pixels_from"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A Checkpoint holds a trunk's weights, how to use them, and where they come from.

    It is complete, or its constructor raises a BadInput that names the first keys that do not fit.
    """

    arch: str
    stem: str = "imagenet"
    method: str
    epochs: int | None = None
    # The trunk's float32 tensors and int64 counters; of a ResNet under torchvision's names without
    # fc (318 for a ResNet-50). A missing counter becomes 0; nothing else may be missing.
    state_dict: Mapping[str, Tensor]
    reading: str = ""  # which part of the trunk's output is the feature (`readings`)
    # Projectors and the like are kept, but never loaded into a trunk.
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    pixels: Pixels = field(default_factory=Pixels)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_texts(self)
        # 1. One trunk has one name
        family = archs.family_of(self.arch)
        arch, stem = family.canonical(self.arch, self.stem)
        family.refuse_pixels(arch, self.pixels)
        # 2. Building the trunk refuses a reading that it does not have
        default_reading = family.default_reading(arch)
        reading = self.reading or default_reading
        if reading != default_reading:
            family.blank(arch, stem, reading)
        # 3. The tensors are complete
        blank = family.tensors(arch, stem)
        tensors = fit_to_trunk(self.state_dict, blank, f"{arch} ({stem} stem)")
        heads = {key: t.detach().cpu().contiguous() for key, t in self.heads.items()}
        # The dataclass is frozen, so its fields can only be set like this.
        object.__setattr__(self, "arch", arch)
        object.__setattr__(self, "stem", stem)
        object.__setattr__(self, "reading", reading)
        object.__setattr__(self, "state_dict", tensors)
        object.__setattr__(self, "heads", heads)

    @functools.cached_property
    def family(self) -> TrunkFamily:
        """The kind of its trunk."""
        return archs.family_of(self.arch)

    @functools.cached_property
    def parameters(self) -> int:
        """The number of the trunk's trained values, from names and shapes alone."""
        # A parameter with two names counts once.
        parameters = {}
        for tensor in self.family.tensors(self.arch, self.stem).values():
            if isinstance(tensor, nn.Parameter):
                parameters[id(tensor)] = tensor
        return sum(parameter.numel() for parameter in parameters.values())

    @functools.cached_property
    def digest(self) -> str:
        """The sha256, 64 hex, over the sorted names, shapes and bytes of the float tensors.

        Everything else that changes the features is hashed, too: the name and reading of a trunk
        that is no ResNet, a stem that the tensors do not tell, and the mean, std and channel order
        of the pixels. ImageNet's pixels are left out, because most trunks have them: the digest is
        then over the tensors alone, and whoever has the file can compute it. It is computed once, as
        it never changes.
        """
        return self._digest_of_tensors()

    def _digest_of_tensors(self) -> str:
        first = "" if self.family.tensors_say_all else f"{self.arch} {self.reading}\n"
        if self.stem not in (NATIVE, *PLAIN_STEMS):
            first += f"stem {self.stem}\n"
        if self.pixels != Pixels():
            mean = tuple(map(float, self.pixels.mean))
            std = tuple(map(float, self.pixels.std))
            first += f"pixels {mean} {std} {self.pixels.order}\n"
        sha = hashlib.sha256(first.encode())
        for name, tensor in sorted(self.state_dict.items()):
            if tensor.is_floating_point():
                sha.update(f"{name} {tuple(tensor.shape)}\n".encode())
                sha.update(tensor.contiguous().view(-1).numpy().data)
        return sha.hexdigest()

    @property
    def trunk(self) -> str:
        """The trunk's name in result rows, with its reading where there is more than one."""
        return self.arch if self.reading == POOLED else f"{self.arch} {self.reading}"

    @property
    def name(self) -> str:
        """The row's name on the leaderboard: the recipe's, or what `import --name` said."""
        return str(self.provenance.get("name") or self.method)

    def backbone(self) -> Trunk:
        """Build the trunk with these weights, in training mode; call .eval() to use it frozen."""
        trunk = self.family.unfilled(self.arch, self.stem, self.reading)
        trunk.load_state_dict(dict(self.state_dict), strict=True)
        return trunk

    def blank(self) -> Trunk:
        """Return its trunk in eval() without elements, for widths, shapes and costs. Do not change
        it."""
        return self.family.blank(self.arch, self.stem, self.reading)

    def replace(self, **changes: Any) -> "Checkpoint":
        """Return the same checkpoint with these fields changed."""
        return dataclasses.replace(self, **changes)

    def described(
        self, name: str | None, method: str | None, epochs: int | None, **added: object
    ) -> "Checkpoint":
        """Return the same checkpoint with the name, method and epochs that are not None, and with
        `added` provenance."""
        if name is not None:
            added["name"] = name
        described = self.replace(
            method=self.method if method is None else method,
            epochs=self.epochs if epochs is None else epochs,
            provenance={**self.provenance, **added},
        )
        if "digest" in vars(self):
            # Nothing of this is hashed, and to hash is most of reading a file.
            vars(described)["digest"] = self.digest
        return described

    def about(self) -> dict[str, Any]:
        """Return everything but the tensors as plain values, for an exported file or beside it."""
        return self._about(self.digest)

    def _about(self, digest: str) -> dict[str, Any]:
        values = {
            "digest": digest,
            "name": self.name,
            "method": self.method,
            "arch": self.arch,
            "stem": self.stem,
            "epochs": self.epochs,
            "pixels": dataclasses.asdict(self.pixels),
            "provenance": dict(self.provenance),
        }
        if not self.family.tensors_say_all:
            values["reading"] = self.reading
        # Through JSON, so that tuples are lists here as they will be when the file is read
        return json.loads(json.dumps(values))

    def save(self, path: str | Path) -> None:
        """Write the file atomically. Its header has everything but the tensors, and the digest."""
        from safetensors.torch import save_file

        # `digest` was perhaps computed earlier, and the tensors may have changed since: the header
        # needs the digest of the bytes that are written now.
        about = self._about(self._digest_of_tensors()) | {"schema": SCHEMA}
        del about["name"]  # the provenance has it
        tensors = {}
        for key, tensor in self.state_dict.items():
            tensors[_TRUNK + key] = tensor.contiguous()
        for key, tensor in self.heads.items():
            tensors[_HEADS + key] = tensor.clone()
        metadata = {"format": FORMAT, "about": json.dumps(about, sort_keys=True)}
        with atomic.atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    @staticmethod
    def load(path: str | Path) -> "Checkpoint":
        """Read a file that `save` wrote. BadInput names the file and what is wrong."""
        from safetensors import SafetensorError

        path = Path(path)
        if not path.is_file():
            raise BadInput(f"{path}: no such checkpoint file")
        try:
            tensors, metadata = safetensors_of(path)
        except (SafetensorError, OSError, ValueError) as error:
            # What went wrong stands in the refusal below in place of the file's format.
            tensors = {}
            metadata = {"format": str(error)[:80]}
        if metadata.get("format") != FORMAT:
            kind = metadata.get("format", "safetensors")
            raise BadInput(
                f"{path}: not a backbench checkpoint ({kind});"
                f" `backbench import {shlex.quote(str(path))} --out X.safetensors` reads published"
                " formats"
            )
        return from_safetensors(path, tensors, metadata)


def from_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Checkpoint:
    """Make a Checkpoint of what one of our files holds. BadInput names the file and what is wrong."""
    trunk = {}
    heads = {}
    for key, tensor in tensors.items():
        if key.startswith(_TRUNK):
            trunk[key.removeprefix(_TRUNK)] = tensor
        elif key.startswith(_HEADS):
            heads[key.removeprefix(_HEADS)] = tensor
    try:
        about = jsons.decode(metadata["about"])
        schema = about["schema"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: its header is incomplete ({error!r:.100})") from None
    if schema != SCHEMA:
        raise BadInput(
            f"{path}: checkpoint schema {schema}; this version reads {SCHEMA}"
        )
    return from_about(path, about, state_dict=trunk, heads=heads)


def from_about(
    path: Path,
    about: Mapping[str, Any],
    *,
    state_dict: Mapping[str, Tensor],
    heads: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Make a Checkpoint from tensors and what `Checkpoint.about` wrote, digest included.

    BadInput names the file and what is wrong.
    """
    try:
        pixels = about["pixels"]
        checkpoint = Checkpoint(
            arch=about["arch"],
            stem=about["stem"],
            method=about["method"],
            epochs=about["epochs"],
            reading=about.get("reading", ""),
            state_dict=state_dict,
            heads=heads or {},
            pixels=Pixels(tuple(pixels["mean"]), tuple(pixels["std"]), pixels["order"]),
            provenance=about["provenance"],
        )
        recorded = about["digest"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: its header is incomplete ({error!r:.100})") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    if checkpoint.digest != recorded:
        raise BadInput(
            f"{path}: the weights do not match the digest in the header; the file is damaged"
        )
    return checkpoint


def assumed_pixels(arch: str, pixels: Pixels, source: str) -> str:
    """Return the remark on a checkpoint whose `source` does not tell the pixels of its training."""
    mean = "/".join(f"{value:g}" for value in pixels.mean)
    std = "/".join(f"{value:g}" for value in pixels.std)
    return (
        f"{source} does not say its pixels; taken are {arch}'s usual, mean {mean}, std {std}; where"
        " it was trained with others, `backbench import --pixels` or evaluate(pixels=...) says so"
    )


def _check_texts(checkpoint: Checkpoint) -> None:
    """Refuse names that are not text of one line, and epochs that are no count: a file's header may
    say anything."""
    texts = {"method": checkpoint.method, "name": checkpoint.provenance.get("name", "")}
    for field_name, text in texts.items():
        if text is None:
            continue
        if not isinstance(text, str):
            raise BadInput(
                f"the checkpoint's {field_name} is no text but {str(text)[:40]!r}"
            )
        control = printable.control_in(text)
        if control:
            raise BadInput(
                f"the checkpoint's {field_name} holds the control character {control}"
            )
    epochs = checkpoint.epochs
    # Not isinstance: True is an int, too
    if epochs is not None and (type(epochs) is not int or not 0 <= epochs < 10**9):
        raise BadInput(
            f"the checkpoint's epochs are {str(epochs)[:40]!r}, not a whole number"
        )


def fit_to_trunk(
    state_dict: Mapping[str, Tensor], blank: Mapping[str, Tensor], trunk: str
) -> dict[str, Tensor]:
    """Return a complete state dict, shaped like `blank`. BadInput names `trunk` and the misfits."""
    # 1. The names and shapes are those of the trunk
    shapes = {name: tuple(tensor.shape) for name, tensor in blank.items()}
    counters = {name for name in shapes if is_counter(name)}
    misshaped = []
    for name, shape in shapes.items():
        if name in state_dict and tuple(state_dict[name].shape) != shape:
            given = tuple(state_dict[name].shape)
            misshaped.append(f"{name} {given} instead of {shape}")
    wrong = {
        "missing": sorted(shapes.keys() - state_dict.keys() - counters),
        "not part of the trunk": sorted(state_dict.keys() - shapes.keys()),
        "of the wrong shape": misshaped,
    }
    for what, names in wrong.items():
        if names:
            raise BadInput(
                f"{trunk}: {len(names)} of {len(shapes)} tensors {what}: {first_names(names)}"
            )
    # 2. Each tensor, in the type that the trunk computes with
    out = {}
    for name, tensor in blank.items():
        if name in counters:
            # A counter says how many batches a norm has seen. Nothing is computed from it.
            value = state_dict.get(name, torch.zeros(())).to(torch.int64)
        elif not tensor.is_floating_point():
            # Some trunks compute with indices that are part of their state dict.
            value = state_dict[name].to(tensor.dtype)
        else:
            value = state_dict[name].to(torch.float32)
            if why := unusable(name, state_dict[name]):
                raise BadInput(
                    f"'{name}' cannot be used: {why}; damaged or diverged weights"
                )
        out[name] = value.detach().cpu().contiguous()
    return out


def unusable(name: str, tensor: Tensor) -> str:
    """Say why a tensor's numbers cannot be those of the trunk's `name`; empty where they can."""
    # torch cannot sum or compare float8.
    value = tensor.to(torch.float32)
    if not finite(value):
        return "beyond float32" if finite(tensor.to(torch.float64)) else "not finite"
    if name.endswith("running_var") and bool((value < 0).any()):
        return "negative"
    return ""


def finite(tensor: Tensor) -> bool:
    """Return True where every element is finite."""
    # Every nan and inf reaches the sum, which costs a fraction of isfinite. A finite tensor may
    # overflow the sum, so isfinite has the last word.
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
