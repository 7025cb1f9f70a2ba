"""Keeps trained heads in RUN/heads.safetensors.

A head's logits mean nothing on another trunk, reading, image geometry or list of classes, and its
tensors show none of these. So a head is kept with all of them (`backbench.transfer.keeping.bound_to`),
and `load` refuses a head that is bound to anything else.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.records.origin import versions
from backbench.runs import atomic
from backbench.runs.folder import HEADS_FILE
from backbench.untrusted import jsons, printable, walking
from backbench.weights.weight_file import safetensors_of


@dataclass(frozen=True)
class KeptHead:
    """A linear head computes logits = features W^T + b; tokens are pooled to features first.

    With queries, each of them attends to the tokens, and slice j of the value matrix's rows maps what
    query j attended to onto slice j of the features. Without queries, the features are the mean of
    the tokens.
    """

    weight: Tensor  # (C, D) float32
    bias: Tensor  # (C,)
    temperature: float | None = None
    # The labels on which the temperature was fitted, in the words of the result rows. A head that
    # was trained on the hold-out, too, takes the temperature of its twin, which was not.
    temperature_from: str | None = None
    query: Tensor | None = None  # (Q, D)
    value: Tensor | None = None  # (D, D)

    def logits(self, features: Tensor) -> Tensor:
        """Map features (n, D) or tokens (n, T, D) to (n, C) float32, even of a bfloat16 trunk."""
        device = features.device
        features = features.float()
        if features.ndim == 3:
            features = self._pooled(features)
        return torch.addmm(self.bias.to(device), features, self.weight.to(device).T)

    def _pooled(self, tokens: Tensor) -> Tensor:
        """Pool tokens (n, T, D) to features (n, D)."""
        if self.query is None or self.value is None:
            return tokens.mean(1)
        query = self.query.to(tokens.device)
        value = self.value.to(tokens.device)
        attention = torch.softmax(query @ tokens.transpose(1, 2), 2)  # (n, Q, T)
        attended = attention @ tokens  # (n, Q, D)
        slices = value.view(len(query), -1, value.shape[1])  # (Q, D / Q, D)
        return torch.einsum("nqd,qsd->nqs", attended, slices).flatten(1)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it has, by their names."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }

    @property
    def digest(self) -> str:
        """The sha256 over the bytes of all tensors."""
        sha = hashlib.sha256(f"{tuple(self.weight.shape)}".encode())
        for tensor in self.tensors.values():
            sha.update(tensor.contiguous().view(-1).numpy().data)
        return sha.hexdigest()


def classes_digest(classes: Sequence[str]) -> str:
    """Return the sha256 of the class list, in the order of the labels."""
    return hashlib.sha256("\n".join(classes).encode()).hexdigest()


def keep(file: Path, name: str, head: KeptHead, about: Mapping[str, object]) -> None:
    """Add a head to the file, or replace the one of that name. `about` holds what it is bound to."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    if file.exists():
        tensors, metadata = _read(file)
    of_head = {
        "head": head.digest,
        "temperature": head.temperature,
        "temperature_from": head.temperature_from,
        "versions": versions(),
    }
    metadata[name] = json.dumps({**about, **of_head}, sort_keys=True)
    for key, tensor in head.tensors.items():
        # A fit may end with its weights by columns, which safetensors refuses.
        tensors[f"{name}/{key}"] = tensor.contiguous()
    with atomic.atomic_path(file) as temporary:
        save_file(tensors, temporary, metadata)


def load(
    folder: Path, asked: Mapping[str, object], width: int, classes: int
) -> KeptHead:
    """Return the head in or below `folder` that is bound to all of `asked`.

    `width` is the trunk's feature_dim. BadInput names what differs in the head that is nearest.
    """
    # 1. The files of the folder and its subfolders
    files = []
    if folder.is_file():
        files = [folder]
    elif folder.is_dir():
        below = walking.files(folder, follow=True)
        files = [file for file in below if file.name == HEADS_FILE]
    # 2. The heads that fit, by digest (the same head may be kept twice), and how far others are
    fitting: dict[str, KeptHead] = {}
    others: list[tuple[int, str]] = []
    for file in sorted(files):
        tensors, metadata = _read(file)
        for name, text in metadata.items():
            where = f"{file}: the head {printable.shown(name, 200)}"
            try:
                about = jsons.decode(text)
                differing = [key for key in asked if about.get(key) != asked[key]]
                if differing:
                    difference = f"{where} has another {', '.join(differing)}"
                    others.append((len(differing), difference))
                    continue
                head = KeptHead(
                    tensors[f"{name}/weight"],
                    tensors[f"{name}/bias"],
                    about["temperature"],
                    about["temperature_from"],
                    tensors.get(f"{name}/query"),
                    tensors.get(f"{name}/value"),
                )
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise BadInput(
                    f"{file}: damaged ({error!r:.80}); train the head again"
                ) from None
            _refuse_damaged(where, head, about.get("head"), (classes, width))
            fitting[head.digest] = head
    # 3. Exactly one
    if len(fitting) == 1:
        (head,) = fitting.values()
        return head
    if fitting:
        raise BadInput(
            f"{folder}: {len(fitting)} heads fit; give the run folder of one of them"
        )
    reason = f"{folder}: no {HEADS_FILE} in it"
    if others:
        _, reason = min(others)
    raise BadInput(
        f"{reason}; needed is one of {asked['protocol']} on the trunk"
        f" {str(asked['checkpoint'])[:12]}: `backbench linear` keeps it in its run"
    )


def _refuse_damaged(
    where: str, head: KeptHead, digest: object, shape: tuple[int, int]
) -> None:
    """Raise BadInput for tensors of another shape or type than asked for, and for other numbers than
    were kept. `shape` is (classes, feature_dim)."""
    _, width = shape
    shapes = {"weight": shape, "bias": shape[:1]}
    for name, tensor in head.tensors.items():
        own = tuple(tensor.shape)
        wanted = shapes.get(name, own)
        if own != wanted or tensor.dtype != torch.float32:
            raise BadInput(
                f"{where} has a {name} of {own} {tensor.dtype}, not {wanted} float32; train it again"
            )
    intact = head.digest == digest
    if head.temperature is not None and not isinstance(head.temperature, float):
        intact = False
    if (head.query is None) != (head.value is None):
        intact = False
    if head.query is not None and not _pools(head.query, head.value, width):
        intact = False
    for tensor in head.tensors.values():
        if not bool(torch.isfinite(tensor).all()):
            intact = False
    if not intact:
        raise BadInput(
            f"{where} does not match its digest; the file is damaged, train it again"
        )


def _pools(query: Tensor, value: Tensor | None, width: int) -> bool:
    """Return True where queries and values can pool tokens of that width."""
    if query.ndim != 2 or query.shape[1] != width:
        return False
    # The queries divide the rows of the square values among themselves.
    divides = len(query) > 0 and width % len(query) == 0
    return value is not None and tuple(value.shape) == (width, width) and divides


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata. BadInput if that is not possible."""
    from safetensors import SafetensorError

    try:
        return safetensors_of(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput(
            f"{file}: no readable heads ({str(error)[:80]}); remove it"
        ) from None
