"""Takes what people have of a model (a file, a name, a module) as a Checkpoint, and keeps it in OUT."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.runs.folder import kept_checkpoint
from backbench.runs.terminal import log
from backbench.weights import header

if TYPE_CHECKING:
    from torch import nn

    from backbench.images.preprocess import Pixels
    from backbench.weights.checkpoint import Checkpoint

    Model = Checkpoint | nn.Module | str | Path

FILE = "checkpoint.safetensors"


def read_models(
    given: Model | Sequence[Model],
    *,
    name: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    encoder: str | None = None,
    pixels: Pixels | None = None,
) -> list[Checkpoint]:
    """Read one model or several, each set of weights once; `name` and the like describe them."""
    # A path and a module are no sequences, a text is one model
    several = isinstance(given, Sequence) and not isinstance(given, str)
    found: dict[str, Checkpoint] = {}
    files: list[object] = []
    for each in given if several else [given]:  # type: ignore[union-attr]
        one = checkpoint_of(each, encoder, pixels)  # type: ignore[arg-type]
        one = one.described(name or None, method, epochs)
        if one.digest in found:
            log.warning(
                f"{each}: the same weights as {found[one.digest].name}; measured once"
            )
        else:
            found[one.digest] = one
            files.append(each)
    if name:
        return list(found.values())
    from backbench.weights.shared_names import told_apart

    return told_apart(list(found.values()), files)


def checkpoint_of(
    given: Model, encoder: str | None, pixels: Pixels | None
) -> Checkpoint:
    """Turn a Checkpoint, a file or a module into a Checkpoint."""
    import torch

    from backbench.weights import importing
    from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint

    if isinstance(given, Checkpoint):
        found = given
    elif isinstance(given, str | Path):
        found = importing.read(Path(given), encoder=encoder)
    elif isinstance(given, torch.nn.Module):
        module = _unwrapped(given)
        found = importing.checkpoint_of(module, pixels) or _of_module(module, encoder)
    else:
        advice = ""
        if isinstance(given, Mapping):
            advice = "; load a state dict into its module, or write it with torch.save and give the file"
        raise BadInput(
            "expected a Checkpoint, torch module or path, not"
            f" {type(given).__name__}{advice}"
        )
    if pixels is None:
        if remark := found.provenance.get(PIXELS_FROM):
            log.info(f"{found.name}: {remark}")
        return found
    provenance = {
        key: value for key, value in found.provenance.items() if key != PIXELS_FROM
    }
    return found.replace(pixels=pixels, provenance=provenance)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile, DataParallel and the like are wrapped around."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        compiled = module._modules.get("_orig_mod")
        if compiled is not None:
            module = compiled
        elif isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        else:
            return module


def _of_module(module: nn.Module, encoder: str | None) -> Checkpoint:
    """Read the one trunk that the module's weights hold, as a file of them would be."""
    import torch

    from backbench.weights import importing

    kind = type(module)
    source = f"module {kind.__qualname__}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "module.pt"
        torch.save(module.state_dict(), file)
        try:
            found = importing.read(
                file, encoder=encoder, name=kind.__name__, method="module"
            )
        except BadInput as error:
            # The reader names a temporary file, which is gone by now
            said = str(error).replace(str(file), source)
            raise BadInput(
                f"{said}; a module of another kind is given as backbench.ModuleTrunk"
            ) from None
    return found.replace(provenance={**found.provenance, "source": source})


def file_in(out: Path, checkpoint: Checkpoint, *, alone: bool) -> Path:
    """Return the file below OUT that is to hold the weights, without writing it. The only
    checkpoint of a call is OUT/checkpoint.safetensors, unless another one has that name."""
    first = out / FILE
    if alone and (not first.exists() or header.digest(first) == checkpoint.digest):
        file = first
    else:
        file = kept_checkpoint(out, checkpoint.digest)
        if not checkpoint.family.lasting(checkpoint.arch) and first.exists():
            raise BadInput(
                f"{out}: holds results of other weights ({FILE}); choose another out; a module"
                " without `identity` is another one in every process"
            )
    if file.exists() and header.digest(file) != checkpoint.digest:
        raise BadInput(f"{file}: holds other weights than its name says; remove it")
    return file


@contextlib.contextmanager
def kept(out: Path, files: Mapping[Path, Checkpoint]) -> Iterator[None]:
    """Keep each checkpoint in its file below OUT while it is measured.

    A refusal before the first run folder leaves OUT as it was."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    before = set(out.iterdir()) if out.is_dir() else set()
    try:
        for file, checkpoint in files.items():
            if not file.exists():
                checkpoint.save(file)
        yield
    except BadInput:
        new = set(out.iterdir()) - before if out.is_dir() else set()
        # The rows in a run folder name the file of their weights
        if not any(each.is_dir() for each in new):
            for file in new & files.keys():
                file.unlink()
            for folder in made:
                with contextlib.suppress(OSError):  # somebody else writes there
                    folder.rmdir()
        raise
