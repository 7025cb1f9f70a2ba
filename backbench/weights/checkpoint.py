"""Checkpoint: the one thing that pretraining hands on. A safetensors file, complete or refused."""

import dataclasses
import functools
import hashlib
import json
import math
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
_TRUNK, _HEADS = "trunk.", "heads."
PIXELS_FROM = (
    "pixels_from"  # in the provenance: why nobody but the trunk's name says the pixels
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A Checkpoint holds a trunk's weights, how to use them, and where they come from. `state_dict`
    is float32 with int64 counters, under torchvision's names without fc (318 for a ResNet-50); a
    missing counter becomes 0, and nothing else may be missing. `heads` (projectors and the like)
    are kept, but never loaded into a trunk. BadInput names the first keys that do not fit."""

    arch: str
    stem: str = "imagenet"
    method: str
    epochs: int | None = None
    state_dict: Mapping[str, Tensor]
    reading: str = ""  # which part of the trunk's output is the feature (`readings`)
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    pixels: Pixels = field(default_factory=Pixels)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_texts(self)
        # One trunk has one name
        family = archs.family_of(self.arch)
        arch, stem = family.canonical(self.arch, self.stem)
        family.refuse_pixels(arch, self.pixels)
        object.__setattr__(self, "arch", arch)
        object.__setattr__(self, "stem", stem)
        object.__setattr__(
            self, "reading", self.reading or family.default_reading(arch)
        )
        if self.reading != family.default_reading(arch):
            family.blank(arch, stem, self.reading)  # refuses one that it has not
        blank = family.tensors(arch, stem)
        tensors = fit_to_trunk(self.state_dict, blank, f"{arch} ({stem} stem)")
        object.__setattr__(self, "state_dict", tensors)
        heads = {k: v.detach().cpu().contiguous() for k, v in self.heads.items()}
        object.__setattr__(self, "heads", heads)

    @functools.cached_property
    def family(self) -> TrunkFamily:
        """The kind of its trunk."""
        return archs.family_of(self.arch)

    @functools.cached_property
    def parameters(self) -> int:
        """How many numbers of the trunk are trained, known from its names and shapes."""
        # A parameter with two names counts once
        tensors = self.family.tensors(self.arch, self.stem).values()
        known = {
            id(tensor): tensor for tensor in tensors if isinstance(tensor, nn.Parameter)
        }
        return sum(tensor.numel() for tensor in known.values())

    @functools.cached_property
    def digest(self) -> str:
        """This is sha256, 64 hex, over the sorted names, shapes and bytes of the float tensors.

        All else that changes the features is hashed too: the name and reading of a trunk that is no
        ResNet, a stem that the tensors do not tell, and the statistics and order of the pixels.
        ImageNet's statistics are left out, as most trunks have them: such a digest is of the
        tensors alone, so whoever has the file can compute it. Computed once, as it never changes.
        """
        return self._digest_of_tensors()

    def _digest_of_tensors(self) -> str:
        first = "" if self.family.tensors_say_all else f"{self.arch} {self.reading}\n"
        if self.stem not in (NATIVE, *PLAIN_STEMS):
            first += f"stem {self.stem}\n"
        if self.pixels != Pixels():
            mean, std = (
                tuple(map(float, self.pixels.mean)),
                tuple(map(float, self.pixels.std)),
            )
            first += f"pixels {mean} {std} {self.pixels.order}\n"
        sha = hashlib.sha256(first.encode())
        for name, tensor in sorted(self.state_dict.items()):
            if tensor.is_floating_point():
                sha.update(f"{name} {tuple(tensor.shape)}\n".encode())
                sha.update(tensor.contiguous().numpy().tobytes())
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
        """The trunk with these weights, in training mode; call .eval() before using it frozen."""
        trunk = self.family.build(self.arch, self.stem, self.reading)
        trunk.load_state_dict(dict(self.state_dict), strict=True)
        return trunk

    def replace(self, **changes: Any) -> "Checkpoint":
        """The same with these fields changed."""
        return dataclasses.replace(self, **changes)

    def described(
        self, name: str | None, method: str | None, epochs: int | None, **added: object
    ) -> "Checkpoint":
        """The same under the name, method and epochs that are given, with `added` provenance."""
        added |= {} if name is None else {"name": name}
        return self.replace(
            method=self.method if method is None else method,
            epochs=self.epochs if epochs is None else epochs,
            provenance={**self.provenance, **added},
        )

    def about(self) -> dict[str, Any]:
        """Everything but the tensors as plain values, for an exported file or beside it."""
        values = {
            "digest": self.digest,
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
        return json.loads(json.dumps(values))

    def save(self, path: str | Path) -> None:
        """Write atomically; the header has all but the tensors, and the digest for `load`."""
        from safetensors.torch import save_file

        about = self.about() | {"schema": SCHEMA}
        del about["name"]  # the provenance has it
        # Computed from the bytes that are written: the tensors may have changed since
        about["digest"] = self._digest_of_tensors()
        tensors = {_TRUNK + k: v.contiguous() for k, v in self.state_dict.items()}
        tensors |= {_HEADS + k: v.clone() for k, v in self.heads.items()}
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
            tensors, metadata = {}, {"format": str(error)[:80]}
        if metadata.get("format") != FORMAT:
            kind = metadata.get("format", "safetensors")
            reader = (
                f"`backbench import {path} --out X.safetensors` reads published formats"
            )
            raise BadInput(f"{path}: not a backbench checkpoint ({kind}); {reader}")
        return from_safetensors(path, tensors, metadata)


def from_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Checkpoint:
    """Make a Checkpoint of what one of our files holds. BadInput names the file and what is wrong."""
    parts: dict[str, dict[str, Tensor]] = {_TRUNK: {}, _HEADS: {}}
    for key, tensor in tensors.items():
        for prefix, part in parts.items():
            if key.startswith(prefix):
                part[key.removeprefix(prefix)] = tensor
    # The header says everything, and the tensors make a whole trunk: the constructor sees to it
    try:
        about = jsons.decode(metadata["about"])
        schema = about["schema"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: its header is incomplete ({error!r:.100})") from None
    if schema != SCHEMA:
        raise BadInput(
            f"{path}: checkpoint schema {schema}; this version reads {SCHEMA}"
        )
    return from_about(path, about, state_dict=parts[_TRUNK], heads=parts[_HEADS])


def from_about(
    path: Path,
    about: Mapping[str, Any],
    *,
    state_dict: Mapping[str, Tensor],
    heads: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Make a Checkpoint from tensors and `about`. BadInput names the file and what is wrong."""
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
        differ = "the weights do not match the digest in the header"
        raise BadInput(f"{path}: {differ}; the file is damaged")
    return checkpoint


def assumed_pixels(arch: str, pixels: Pixels, source: str) -> str:
    """The remark for a checkpoint whose `source` does not say the pixels of its training."""
    mean, std = (
        "/".join(f"{value:g}" for value in each) for each in (pixels.mean, pixels.std)
    )
    return (
        f"{source} does not say its pixels; taken are {arch}'s usual, mean {mean}, std {std}; where"
        " it was trained with others, `backbench import --pixels` or evaluate(pixels=...) says so"
    )


def _check_texts(checkpoint: Checkpoint) -> None:
    """Refuse names that are not text of one line: a file's header may say anything."""
    said = {"method": checkpoint.method, "name": checkpoint.provenance.get("name", "")}
    for what, text in said.items():
        if text is not None and not isinstance(text, str):
            raise BadInput(f"the checkpoint's {what} is no text but {str(text)[:40]!r}")
        control = printable.control_in(text) if text else None
        if control:
            raise BadInput(
                f"the checkpoint's {what} holds the control character {control}"
            )
    epochs = checkpoint.epochs
    if epochs is not None and (type(epochs) is not int or not 0 <= epochs < 10**9):
        raise BadInput(
            f"the checkpoint's epochs are {str(epochs)[:40]!r}, not a whole number"
        )


def fit_to_trunk(
    state_dict: Mapping[str, Tensor], blank: Mapping[str, Tensor], trunk: str
) -> dict[str, Tensor]:
    """Return a complete state dict, shaped like `blank`. BadInput names `trunk` and the misfits."""
    wanted = {name: tuple(tensor.shape) for name, tensor in blank.items()}
    counters = {k for k in wanted if is_counter(k)}
    missing = sorted(wanted.keys() - state_dict.keys() - counters)
    extra = sorted(state_dict.keys() - wanted.keys())
    shapes = []
    for key, shape in wanted.items():
        if key in state_dict and tuple(state_dict[key].shape) != shape:
            shapes.append(f"{key} {tuple(state_dict[key].shape)} instead of {shape}")
    wrong = {
        "missing": missing,
        "not part of the trunk": extra,
        "of the wrong shape": shapes,
    }
    for what, names in wrong.items():
        if names:
            shown = first_names(names)
            raise BadInput(
                f"{trunk}: {len(names)} of {len(wanted)} tensors {what}: {shown}"
            )
    out = {}
    for key in wanted:
        if (
            key in counters
        ):  # how many batches a norm has seen; nothing is computed from it
            value = state_dict.get(key, torch.zeros((), dtype=torch.int64)).to(
                torch.int64
            )
        elif not blank[key].is_floating_point():  # an index that a trunk computes with
            value = state_dict[key].to(blank[key].dtype)
        else:
            value = state_dict[key].to(torch.float32)
            if why := unusable(key, state_dict[key]):
                raise BadInput(
                    f"'{key}' cannot be used: {why}; damaged or diverged weights"
                )
        out[key] = value.detach().cpu().contiguous()
    return out


def unusable(name: str, tensor: Tensor) -> str:
    """Why a tensor's numbers cannot be those of `name` in a trunk; empty where they can."""
    value = tensor.to(torch.float32)  # what torch can sum and compare, unlike float8
    if not finite(value):
        return "beyond float32" if finite(tensor.to(torch.float64)) else "not finite"
    return (
        "negative" if name.endswith("running_var") and bool((value < 0).any()) else ""
    )


def finite(tensor: Tensor) -> bool:
    """True where every element is finite."""
    # A sum carries every nan and inf at a fraction of isfinite's cost; a finite tensor may still
    # overflow it
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
