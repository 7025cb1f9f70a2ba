"""Opens a weight file that somebody else wrote: torch zip, legacy torch, pickle or safetensors, as
plain values.

Nothing in the file is executed. torch files go through torch's `weights_only` unpickler, other
pickles through the restricted one below; both know the classes in `STAND_INS` by name only and
replace them by inert values. Every way in which a file can be broken is a BadInput of one line.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from backbench.errors import BadInput

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch before 1.6: its magic number, pickled
_NOT_WEIGHTS = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`",
    ),
    (b"<", "a web page, not weights: the download went wrong"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"\xfd7zXZ", "an xz archive: unpack it first"),
    (b"7z\xbc\xaf", "a 7-zip archive: unpack it first"),
    (b"\x89HDF", "an HDF5 file: Keras weights are not read"),
)
_CHUNK = 1 << 20


class Inert:
    """Stands in for an object of a package that is not imported: takes any arguments and any state,
    keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _empty_dict(*args: Any) -> dict[Any, Any]:
    return {}


# What the published files name beside tensors and plain values. The names are all that is known of
# these packages.
STAND_INS: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": Inert,  # the arguments: facebookresearch/dino main_dino.py, timm, torchvision's references
    "pathlib.PosixPath": Inert,
    "pathlib._local.PosixPath": Inert,
    "collections.defaultdict": _empty_dict,
    # numpy scalars and arrays among the metrics that mmengine, VISSL and Lightning save
    "numpy.core.multiarray.scalar": Inert,
    "numpy._core.multiarray.scalar": Inert,
    "numpy.core.multiarray._reconstruct": Inert,
    "numpy._core.multiarray._reconstruct": Inert,
    "numpy.ndarray": Inert,
    "numpy.dtype": Inert,
    **{
        f"numpy.dtypes.{kind}DType": Inert
        for kind in ("Float64", "Float32", "Int64", "Int32", "Bool")
    },
    # mmengine's message hub
    "mmengine.logging.history_buffer.HistoryBuffer": Inert,
    "builtins.getattr": Inert,
    # hyper-parameters and callbacks in Lightning's files; solo-learn's are omegaconf's
    "pytorch_lightning.utilities.parsing.AttributeDict": dict,
    "lightning_fabric.utilities.data.AttributeDict": dict,
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint": Inert,
    "omegaconf.dictconfig.DictConfig": Inert,
    "omegaconf.listconfig.ListConfig": Inert,
    "omegaconf.nodes.AnyNode": Inert,
    "omegaconf.base.Metadata": Inert,
    "omegaconf.base.ContainerMetadata": Inert,
    "typing.Any": Inert,
    "builtins.dict": Inert,
    "builtins.list": Inert,
    "builtins.int": Inert,
    "builtins.float": Inert,
    "builtins.str": Inert,
    "builtins.bool": Inert,
    # the configuration in VISSL's files
    "vissl.utils.hydra_config.AttrDict": dict,
}


@dataclass(frozen=True)
class Opened:
    """A file's content: `tree` is nested dicts and lists with tensors and plain values at the
    leaves."""

    path: Path
    container: str  # torch zip | torch legacy | pickle | safetensors
    sha256: str
    size: int
    tree: Any
    metadata: Mapping[str, str]  # safetensors only


def open_file(path: str | Path) -> Opened:
    """Read any weight file safely. Raises BadInput with one line that names the file and what is
    wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(
            f"{path}: {'is a folder, not a weight file' if path.is_dir() else 'no such file'}"
        )
    size = path.stat().st_size
    if size == 0:
        raise BadInput(f"{path}: the file is empty")
    try:
        with path.open("rb") as file:
            head = file.read(64)
        container, reader = _reader(path, head, size)
        metadata: Mapping[str, str] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if reader is _read_safetensors:
                tree, metadata = _read_safetensors(path)
            else:
                tree = reader(path)
        return Opened(path, container, file_sha256(path), size, tree, metadata)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except Exception as error:  # whatever a broken file provokes in torch, numpy or pickle
        raise BadInput(f"{path}: {_explain(error)}") from None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reader(path: Path, head: bytes, size: int) -> tuple[str, Callable[[Path], Any]]:
    for start, what in _NOT_WEIGHTS:
        if head.startswith(start):
            raise BadInput(what)
    if head.startswith(b"PK"):
        return "torch zip", _read_torch_zip
    if head.startswith(_LEGACY):
        return "torch legacy", _read_torch_legacy
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return "safetensors", _read_safetensors
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "big") < size:
        raise BadInput(
            "safetensors with a big-endian header; write it again on a little-endian machine"
        )
    return "pickle", _read_pickle


def _explain(error: Exception) -> str:
    """One line for whatever went wrong inside a reader."""
    text = " ".join(str(error).split())
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if named:
        return _refusal(named.group(1))
    if isinstance(error, pickle.UnpicklingError) and text.startswith("refused"):
        return text
    if (
        isinstance(error, EOFError | zipfile.BadZipFile | struct.error)
        or "central directory" in text
    ):
        return f"damaged or truncated ({text[:80] or type(error).__name__}); download it again"
    return f"not a readable weight file, damaged or truncated ({type(error).__name__}: {text[:80]})"


def _refusal(name: str) -> str:
    return f"refused: it names {name}, which is not on the list of harmless names; nothing was executed"


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _read_torch_zip(path: Path) -> Any:
    _check_zip(path)
    return _torch_load(path, mmap=True)


def _read_torch_legacy(path: Path) -> Any:
    with path.open("rb") as file:
        for _ in range(2):  # magic number, protocol version
            _unpickle(file)
        system = _unpickle(file)
    if isinstance(system, dict) and not system.get("little_endian", True):
        raise BadInput("written on a big-endian machine; write it again on a little-endian one")
    return _torch_load(path, mmap=False)


def _torch_load(path: Path, *, mmap: bool) -> Any:
    known: list[Any] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    with torch.serialization.safe_globals(known):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _check_zip(path: Path) -> None:
    """torch writes its zip uncompressed, so anything packed is not torch's; damaged records show in
    their CRC."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        names = [record.filename for record in records]
        if not any(name.endswith("data.pkl") for name in names):
            raise BadInput("a zip archive without data.pkl: not a torch checkpoint")
        if any(name.endswith("constants.pkl") for name in names):
            raise BadInput(
                "a TorchScript program, not a state dict; save model.state_dict() instead"
            )
        packed = [
            r.filename for r in records if r.compress_type != zipfile.ZIP_STORED or r.flag_bits & 1
        ]
        if packed or sum(record.file_size for record in records) > path.stat().st_size:
            what = f"record '{packed[0]}' is compressed" if packed else "its records overlap"
            raise BadInput(f"refused: {what}, which torch never writes (a zip bomb?)")
        for record in records:
            record.CRC = record.CRC or None  # type: ignore[assignment]  # torch writes 0 where it is told to skip CRCs
        for name in names:
            if name.endswith("/byteorder") and archive.read(name) != b"little":
                raise BadInput(
                    "written on a big-endian machine; write it again on a little-endian one"
                )
        for record in records:
            with archive.open(record) as file:
                while file.read(_CHUNK):
                    pass  # ZipFile compares the CRC at the end of the record


# --- pickles that are not torch's: Detectron2's model files, which hold numpy arrays ---

_DTYPES = re.compile(r"([<|=]?)([fiub])([1248])$")


class _DType:
    """numpy's dtype as its pickle describes it."""

    def __init__(self, name: Any, *args: Any) -> None:
        self.name, self.order = (
            (name.decode("latin1") if isinstance(name, bytes) else str(name)),
            "<",
        )

    def __setstate__(self, state: Any) -> None:
        self.order = str(state[1])

    def to_numpy(self) -> np.dtype:
        if self.order == ">" or self.name.startswith(">"):
            raise BadInput("holds big-endian arrays; write it again on a little-endian machine")
        if not (self.name == "bool" or _DTYPES.match(self.name)):
            raise BadInput(f"refused: holds arrays of dtype '{self.name[:20]}', not numbers")
        return np.dtype(self.name)


class _Array:
    """numpy's array as its pickle describes it; `value` checks sizes before anything is
    allocated."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> Tensor:
        if not (isinstance(self.state, tuple) and len(self.state) == 5):
            raise BadInput("damaged: an array without content")
        # The bytes go as soon as they are copied
        (_, shape, dtype, fortran, data), self.state = (
            self.state,
            None,
        )
        return _array(data, dtype, shape, "F" if fortran else "C")


def _array(data: Any, dtype: Any, shape: Any, order: str) -> Tensor:
    if not isinstance(dtype, _DType) or not isinstance(shape, tuple):
        raise BadInput("damaged: an array without shape or dtype")
    data = data.encode("latin1") if isinstance(data, str) else data  # python 2's pickles
    if isinstance(data, list):
        raise BadInput("refused: holds arrays of python objects, not numbers")
    kind = dtype.to_numpy()
    if len(data) != math.prod(shape) * kind.itemsize:
        raise BadInput(f"damaged: an array of shape {shape} has {len(data)} bytes")
    array = np.frombuffer(data, dtype=kind).reshape(shape, order="F" if order == "F" else "C")
    return torch.from_numpy(np.array(array, order="C"))


class _Frombuffer:
    """What pickle protocol 5 writes for an array that lies in one piece."""

    def __init__(self, data: Any, dtype: Any, shape: Any, order: Any) -> None:
        self.arguments = (data, dtype, shape, str(order))

    def value(self) -> Tensor:
        arguments, self.arguments = self.arguments, (b"", None, None, "C")
        return _array(*arguments)


class _Scalar:
    def __init__(self, dtype: Any, data: Any = b"") -> None:
        self.arguments = (data, dtype, (), "C")

    def value(self) -> Any:
        return _array(*self.arguments).item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """`_codecs.encode`, with which protocol 2 writes bytes."""
    return str(text).encode("latin1" if encoding == "latin1" else "ascii")


_NUMPY: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _encode,
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _Scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _Frombuffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    """Plain values and numpy arrays; every other global is refused by name, and no function of the
    file's is called."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _NUMPY:
            return _NUMPY[full]
        raise pickle.UnpicklingError(_refusal(full))

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("refused: it refers to storage outside the file")


def _unpickle(file: BinaryIO) -> Any:
    """The next pickle in the file. A first pass checks that every length it claims is really
    there."""
    start = file.tell()
    for _ in pickletools.genops(file):
        pass
    file.seek(start)
    return _Unpickler(file).load()


def _read_pickle(path: Path) -> Any:
    with path.open("rb") as file:
        return _materialise(_unpickle(file), {}, 0)


def _materialise(value: Any, done: dict[int, tuple[Any, Any]], depth: int) -> Any:
    """Arrays for their descriptions. `done` (by id) makes what is referred to many times be visited
    once."""
    if depth > 20:
        raise BadInput("refused: nested more than 20 levels deep")
    if not isinstance(value, dict | list | tuple | _Array | _Frombuffer | _Scalar):
        return value
    if id(value) not in done:
        out: Any
        if isinstance(value, _Array | _Frombuffer | _Scalar):
            out = value.value()
        elif isinstance(value, dict):
            out = {k: _materialise(v, done, depth + 1) for k, v in value.items()}
        else:
            out = [_materialise(v, done, depth + 1) for v in value]
        done[id(value)] = value, out
    return done[id(value)][1]
