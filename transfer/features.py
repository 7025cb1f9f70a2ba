"""Images -> features of frozen trunks, with a cache on disk that knows exactly what it holds.

Images are decoded once for any number of trunks. Features are float32 rows in the order of the image list. The cache is
$BACKBENCH_CACHE (default ~/.cache/backbench), at most $BACKBENCH_CACHE_GB (default 50) large; the least recently used
files go first. A file is named by the hash of a description of all that decides its content, carries that description
beside it, and is refused when the two disagree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from backbench.errors import BadInput, Failed, Preempted
from backbench.images.files import ArrayList, ImageList
from backbench.images.preprocess import Pixels, eval_geometry, normalise
from backbench.runs import atomic, distributed
from backbench.runs.folder import Progress
from backbench.runs.state import StopFlag
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.resnet import Trunk

Precision = Literal["fp32", "bf16"]


# Frozen trunks


def fold_batchnorm(trunk: Trunk) -> Trunk:
    """Merge every batch norm into the convolution before it, in place. Needs eval(); relative error about 1e-6."""
    trunk.conv1, trunk.bn1 = fuse_conv_bn_eval(trunk.conv1, trunk.bn1), nn.Identity()
    for stage in (trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4):
        for block in stage:
            for i in (1, 2, 3):
                if hasattr(block, f"conv{i}"):
                    conv, norm = getattr(block, f"conv{i}"), getattr(block, f"bn{i}")
                    setattr(block, f"conv{i}", fuse_conv_bn_eval(conv, norm))
                    setattr(block, f"bn{i}", nn.Identity())
            if block.downsample is not None:
                block.downsample = nn.Sequential(fuse_conv_bn_eval(*block.downsample))
    return trunk


@dataclass(frozen=True)
class Frozen:
    """A trunk for inference: eval(), batch norm folded, channels last, no gradients. `verify` guards it."""

    checkpoint: Checkpoint
    module: Trunk
    device: torch.device
    precision: Precision
    digest: str  # of the checkpoint
    state: str  # of the module as it was built

    @staticmethod
    def build(
        checkpoint: Checkpoint, *, device: torch.device, precision: Precision = "fp32"
    ) -> Frozen:
        module = fold_batchnorm(checkpoint.backbone().eval()).requires_grad_(False)
        module = module.to(device=device, memory_format=torch.channels_last)
        return Frozen(
            checkpoint, module, device, precision, checkpoint.digest, state_digest(module)
        )

    @property
    def dim(self) -> int:
        return self.module.feature_dim

    @property
    def pixels(self) -> Pixels:
        return self.checkpoint.pixels

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images (N, 3, H, W) -> features (N, dim) float32."""
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.module(images).float()

    def verify(self) -> None:
        """Raises Failed when a weight or buffer is not what it was at the start."""
        if self.module.training or state_digest(self.module) != self.state:
            raise Failed(
                f"the frozen trunk of '{self.checkpoint.name}' has changed; its results cannot be used"
            )


def state_digest(module: nn.Module) -> str:
    """sha256 over names and bytes of all parameters and buffers."""
    sha = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def forward_all(trunks: Sequence[Frozen], pixels: Tensor) -> list[Tensor]:
    """uint8 RGB (N, 3, H, W) -> features per trunk; trunks with the same statistics share the normalised images."""
    ready: dict[Pixels, Tensor] = {}
    out = []
    for trunk in trunks:
        if trunk.pixels not in ready:
            ready[trunk.pixels] = normalise(pixels, trunk.pixels)
        out.append(trunk(ready[trunk.pixels]))
    return out


# Loading


class Pictures(torch.utils.data.Dataset):
    """Item (key, index) of the sampler -> (uint8 (3, H, W), index); `view` makes a PIL image of the wanted size."""

    def __init__(self, images: ImageList, view: Callable[[Any, Any], Any]) -> None:
        self.images, self.view = images, view

    def __getitem__(self, item: tuple[Any, int]) -> tuple[Tensor, int]:
        key, index = item
        picture = np.asarray(self.view(self.images.open(index), key), dtype=np.uint8)
        return torch.from_numpy(picture.copy()).permute(2, 0, 1), index


def loader(
    images: ImageList,
    view: Callable[[Any, Any], Any],
    batches: Sequence[Any] | Iterator[Any],
    *,
    workers: int,
) -> torch.utils.data.DataLoader:
    """Batches of (uint8 (N, 3, H, W), indices (N,)); `batches` yields lists of (key, index) for `view` and the list."""
    return torch.utils.data.DataLoader(
        Pictures(images, view),
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_one_thread,
    )


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def default_workers(devices: int = 1) -> int:
    """Loader processes per device: the cores that are left, at most 12."""
    cores = len(os.sched_getaffinity(0)) // max(1, devices)
    return min(12, max(1, cores - 1))


# The cache


def fingerprint(images: ImageList) -> str:
    """sha256 over paths and what the file system says about the files (size, time of change), or over the pixels."""
    sha = hashlib.sha256("\n".join(images.paths).encode())
    if isinstance(images, ArrayList):
        sha.update(images.pixels.tobytes())
    else:
        for i in range(len(images)):
            try:
                about = images.file(i).stat()
            except FileNotFoundError:
                raise BadInput(f"{images.file(i)}: no such image file") from None
            sha.update(f"{about.st_size} {about.st_mtime_ns}\n".encode())
    return sha.hexdigest()


@dataclass(frozen=True)
class Store:
    """The cache folder. `description` dicts go in, rows of features come out."""

    folder: Path
    limit: int  # bytes

    @staticmethod
    def default() -> Store:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = Path(os.environ.get("BACKBENCH_CACHE") or Path(home) / "backbench")
        return Store(
            folder / "features", int(float(os.environ.get("BACKBENCH_CACHE_GB", "50")) * 1e9)
        )

    def path(self, description: Mapping[str, Any]) -> Path:
        text = json.dumps(description, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npy"

    def open(self, description: Mapping[str, Any]) -> Tensor | None:
        """The rows, mapped from disk, or None when they are not there. Raises BadInput for a file of something else."""
        path = self.path(description)
        about = path.with_suffix(".json")
        if not path.exists() or not about.exists():
            return None
        found = json.loads(about.read_text())
        differing = sorted(
            k
            for k in {*found["description"], *description}
            if found["description"].get(k) != description.get(k)
        )
        if differing:
            raise BadInput(
                f"{path}: features of another {', '.join(differing)} than asked for; remove the file"
            )
        rows = np.load(path, mmap_mode="c")
        if list(rows.shape) != found["shape"] or _file_digest(path) != found["sha256"]:
            raise BadInput(f"{path}: the cached features are damaged; remove the file")
        os.utime(path)
        return torch.from_numpy(rows)

    def finish(self, description: Mapping[str, Any], part: Path) -> None:
        """Make the complete `part` file the entry of `description`. The .json comes last: without it there is none."""
        path = self.path(description)
        shape = list(np.load(part, mmap_mode="r").shape)
        about = {"description": dict(description), "shape": shape, "sha256": _file_digest(part)}
        part.replace(path)
        atomic.write_json(path.with_suffix(".json"), about)

    def make_room(self, size: int, keep: set[Path]) -> None:
        """Remove the least recently used entries until `size` more bytes fit."""
        if size > self.limit:
            need, have = f"{size / 1e9:.1f}", f"{self.limit / 1e9:.1f}"
            raise BadInput(
                f"{self.folder}: the features need {need} GB, the cache may have {have}; set BACKBENCH_CACHE_GB"
            )
        entries = sorted(
            (p for p in self.folder.glob("*.npy") if p not in keep), key=lambda p: p.stat().st_mtime
        )
        used = sum(p.stat().st_size for p in self.folder.glob("*.npy"))
        for path in entries:
            if used + size <= self.limit:
                return
            used -= path.stat().st_size
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(trunk: Frozen, images: str, geometry: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides the features, up to rounding. `images` is the list's fingerprint."""
    return {
        "checkpoint": trunk.digest,
        "arch": trunk.checkpoint.arch,
        "stem": trunk.checkpoint.stem,
        "pixels": json.loads(json.dumps(dataclasses.asdict(trunk.pixels))),
        "images": images,
        "geometry": dict(geometry),
        "precision": trunk.precision,
        "device": trunk.device.type,
        "torch": torch.__version__.split("+")[0],
    }


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Features of image lists by several trunks at once. `geometry` holds the arguments of preprocess.eval_geometry."""

    trunks: Sequence[Frozen]
    geometry: Mapping[str, Any]
    store: Store
    workers: int = 0
    batch: int = 256
    run: Path | None = None  # where progress is reported
    stop: StopFlag | None = None

    def __call__(self, images: ImageList, what: str = "features") -> list[Tensor]:
        """(N, dim) per trunk. What the cache has is taken from it; the rest is computed in one pass over the images,
        each rank a share of every batch, and can be stopped and continued at any batch."""
        of_images = fingerprint(images)
        described = [describe(trunk, of_images, self.geometry) for trunk in self.trunks]
        paths = [self.store.path(d) for d in described]
        self.store.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as locks:
            if distributed.rank() == 0:
                for path in sorted(
                    set(paths)
                ):  # sorted: two runs that want the same cannot wait for one another
                    file = locks.enter_context(path.with_suffix(".lock").open("w"))
                    fcntl.flock(file, fcntl.LOCK_EX)
            there = torch.tensor(
                [path.with_suffix(".json").exists() for path in paths], dtype=torch.int32
            )
            there = distributed.broadcast(
                there.to(self.trunks[0].device)
            )  # rank 0 has looked with the lock in hand
            todo = [i for i, yes in enumerate(there.tolist()) if not yes]
            if todo:
                self._compute(todo, described, images, what)
            found = [self.store.open(d) for d in described]
        out = [rows for rows in found if rows is not None]
        assert len(out) == len(self.trunks), "features that were just written are gone"
        return out

    def _compute(
        self, todo: list[int], described: list[dict[str, Any]], images: ImageList, what: str
    ) -> None:
        trunks, count, batch = [self.trunks[i] for i in todo], len(images), self.batch
        main, device = distributed.rank() == 0, trunks[0].device
        world, rank = distributed.world_size(), distributed.rank()
        parts = [self.store.path(described[i]).with_suffix(".part") for i in todo]
        names = sorted(part.name for part in parts)
        marker = parts[0].with_suffix(".rows.json")
        rows: list[np.memmap] = []
        first = 0
        if main:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, KeyError):
                begun = json.loads(marker.read_text())
                first = (
                    int(begun["rows"])
                    if begun["parts"] == names and all(p.exists() for p in parts)
                    else 0
                )
            if not first:
                keep = {self.store.path(d) for d in described}
                self.store.make_room(sum(count * t.dim * 4 for t in trunks), keep)
            for trunk, part in zip(trunks, parts):
                shape = None if first else (count, trunk.dim)
                mode: Any = "r+" if first else "w+"
                rows.append(
                    np.lib.format.open_memmap(part, mode=mode, dtype=np.float32, shape=shape)
                )
        first = int(distributed.broadcast(torch.tensor([first], device=device)).item())
        progress = Progress(self.run if main else None, count, what, unit="image", done=first)
        geometric = eval_geometry(**self.geometry)

        def shares() -> Iterator[list[tuple[None, int]]]:
            for begin in range(first, count, batch):
                share = -(-(min(begin + batch, count) - begin) // world)
                mine = range(begin + rank * share, begin + (rank + 1) * share)
                yield [
                    (None, min(i, count - 1)) for i in mine
                ]  # the last share is padded, and cut below

        pictures = loader(
            images, lambda picture, _: geometric(picture), list(shares()), workers=self.workers
        )
        saved = first
        for begin, (pixels, _) in zip(range(first, count, batch), pictures):
            end = min(begin + batch, count)
            features = forward_all(trunks, pixels.to(device, non_blocking=True))
            features = [distributed.gather_without_gradient(f)[: end - begin] for f in features]
            for part_rows, feature in zip(rows, features):
                part_rows[begin:end] = feature.cpu().numpy()
            stopping = stopping_together(self.stop, device)
            if main:
                progress.advance(end - begin)
            if main and end < count and (stopping or end - saved >= 20 * batch):
                for part_rows in rows:
                    part_rows.flush()
                atomic.write_json(marker, {"rows": end, "parts": names})
                saved = end
            if stopping and end < count:
                raise Preempted(
                    f"stopped by {stopping} after {end} of {count} images; the same command continues"
                )
        for part_rows in rows:
            part_rows.flush()
        rows.clear()
        if main:
            for i, part in zip(todo, parts):
                self.store.finish(described[i], part)
            marker.unlink(missing_ok=True)
        self._meet()

    def _meet(self) -> None:
        distributed.broadcast(torch.zeros(1, device=self.trunks[0].device))


def stopping_together(stop: StopFlag | None, device: torch.device) -> str | None:
    """The signal's name on all ranks as soon as one of them has it."""
    asked = stop.requested if stop is not None else None
    if distributed.world_size() == 1:
        return asked
    flag = torch.tensor([1.0 if asked else 0.0], device=device)
    torch.distributed.all_reduce(flag)
    return (asked or "a signal") if flag.item() else None
