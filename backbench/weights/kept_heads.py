"""RUN/heads.safetensors keeps trained heads. A head's logits mean nothing on another trunk,
reading, image geometry or list of classes, and its tensors show none of these: so `load` asks for a
head by all of them (`backbench.transfer.keeping.bound_to`) and refuses every other."""

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
    """A linear head computes logits = features W^T + b. Tokens are pooled first: Q queries are over
    the tokens, and query j reads slice j of the values; without queries their mean is taken."""

    weight: Tensor  # (C, D) float32
    bias: Tensor  # (C,)
    temperature: float | None = None
    # Which labels the temperature was fitted on, as the rows say it: a head that saw the hold-out
    # takes that of its twin, which did not
    temperature_from: str | None = None
    query: Tensor | None = None  # (Q, D)
    value: Tensor | None = None  # (D, D)

    def logits(self, features: Tensor) -> Tensor:
        """Map features (n, D) or tokens (n, T, D) to (n, C) float32, even of a bfloat16 trunk."""
        device, features = features.device, features.float()
        if features.ndim == 3:
            features = self._pooled(features)
        return torch.addmm(self.bias.to(device), features, self.weight.to(device).T)

    def _pooled(self, tokens: Tensor) -> Tensor:
        if self.query is None or self.value is None:
            return tokens.mean(1)
        query, value = self.query.to(tokens.device), self.value.to(tokens.device)
        pooled = torch.softmax(query @ tokens.transpose(1, 2), 2) @ tokens  # (n, Q, D)
        slices = value.view(len(query), -1, value.shape[1])
        return torch.einsum("nqd,qsd->nqs", pooled, slices).flatten(1)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that it has, by their names."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }

    @property
    def digest(self) -> str:
        """sha256 over the bytes of all tensors."""
        sha = hashlib.sha256(f"{tuple(self.weight.shape)}".encode())
        for tensor in self.tensors.values():
            sha.update(tensor.contiguous().numpy().tobytes())
        return sha.hexdigest()


def classes_digest(classes: Sequence[str]) -> str:
    """sha256 of the class list, in the order of the labels."""
    return hashlib.sha256("\n".join(classes).encode()).hexdigest()


def keep(file: Path, name: str, head: KeptHead, about: Mapping[str, object]) -> None:
    """Add a head to the file, or replace the one of that name. `about` holds what it is bound to."""
    from safetensors.torch import save_file

    tensors, metadata = _read(file) if file.exists() else ({}, {})
    of_head = {
        "head": head.digest,
        "temperature": head.temperature,
        "temperature_from": head.temperature_from,
        "versions": versions(),
    }
    metadata[name] = json.dumps({**about, **of_head}, sort_keys=True)
    # A fit may end with its weights by columns, which safetensors refuses
    tensors |= {
        f"{name}/{key}": tensor.contiguous() for key, tensor in head.tensors.items()
    }
    with atomic.atomic_path(file) as temporary:
        save_file(tensors, temporary, metadata)


def load(
    folder: Path, asked: Mapping[str, object], width: int, classes: int
) -> KeptHead:
    """Return the head in or below `folder` bound to all of `asked`. BadInput names what differs."""
    files = [folder] if folder.is_file() else []
    if folder.is_dir():
        files = [
            file
            for file in walking.files(folder, follow=True)
            if file.name == HEADS_FILE
        ]
    fitting: dict[str, KeptHead] = {}
    nearest: list[tuple[int, str]] = []
    for file in sorted(files):
        tensors, metadata = _read(file)
        for name, text in metadata.items():
            try:
                about = jsons.decode(text)
                differing = [key for key in asked if about.get(key) != asked[key]]
                where = f"{file}: the head {printable.shown(name, 200)}"
                if differing:
                    nearest.append(
                        (len(differing), f"{where} has another {', '.join(differing)}")
                    )
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
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if fitting:
        raise BadInput(
            f"{folder}: {len(fitting)} heads fit; give the run folder of one of them"
        )
    why = min(nearest)[1] if nearest else f"{folder}: no {HEADS_FILE} in it"
    need = f"needed is one of {asked['protocol']} on the trunk {str(asked['checkpoint'])[:12]}"
    raise BadInput(f"{why}; {need}: `backbench linear` keeps it in its run")


def _refuse_damaged(
    where: str, head: KeptHead, digest: object, shape: tuple[int, int]
) -> None:
    """BadInput for tensors of another shape or type than they must have, and for other numbers."""
    weight, bias = head.weight, head.bias
    types = {tensor.dtype for tensor in head.tensors.values()}
    if (
        tuple(weight.shape) != shape
        or tuple(bias.shape) != shape[:1]
        or types != {torch.float32}
    ):
        raise BadInput(
            f"{where} is {tuple(weight.shape)} {weight.dtype}, not {shape} float32"
        )
    fits = head.temperature is None or isinstance(head.temperature, float)
    if head.query is not None and head.value is not None:
        # The queries divide the rows of the square values among themselves
        queries, width = tuple(head.query.shape), shape[1]
        fits = (
            fits
            and queries[1:] == (width,)
            and queries[0] > 0
            and width % queries[0] == 0
        )
        fits = fits and tuple(head.value.shape) == (width, width)
    fits = fits and (head.query is None) == (head.value is None)
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in head.tensors.values())
    if not fits or head.digest != digest or not finite:
        raise BadInput(
            f"{where} does not match its digest; the file is damaged, train it again"
        )


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError

    try:
        return safetensors_of(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput(
            f"{file}: no readable heads ({str(error)[:80]}); remove it"
        ) from None
