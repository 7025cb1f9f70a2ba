"""Opens a weight file from elsewhere (torch zip, legacy torch, pickle, safetensors) as plain
values. Nothing in it is executed: torch's `weights_only` unpickler reads torch files, the
restricted one below other pickles. Both replace the classes in `STAND_INS`, known by name only, by
inert values. Every way in which a file can be broken is a BadInput of one line."""

import hashlib
import io
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from backbench.errors import BadInput
from backbench.untrusted import opening, pickles
from backbench.weights.family import Tree
from backbench.weights.header import FORMAT

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch before 1.6: its magic number, pickled
_NOT_WEIGHTS = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file: fetch it with `git lfs pull`",
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
    """Stands in for an object of a package that is not imported: takes anything, keeps nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


# Published files name these beside tensors and plain values. The names are all that is known of
# these packages.
_INERT = (
    "argparse.Namespace",  # arguments: facebookresearch/dino main_dino.py, timm, torchvision's references
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    # numpy scalars and arrays among the metrics that mmengine, VISSL and Lightning save
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *(
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.Float64DType",
        "numpy.dtypes.Float32DType",
    ),
    *("numpy.dtypes.Int64DType", "numpy.dtypes.Int32DType", "numpy.dtypes.BoolDType"),
    # mmengine's message hub
    *("mmengine.logging.history_buffer.HistoryBuffer", "builtins.getattr"),
    # hyper-parameters and callbacks in Lightning's files; solo-learn's are omegaconf's
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig"),
    *(
        "omegaconf.nodes.AnyNode",
        "omegaconf.base.Metadata",
        "omegaconf.base.ContainerMetadata",
    ),
    *("typing.Any", "builtins.dict", "builtins.list", "builtins.int", "builtins.float"),
    *("builtins.str", "builtins.bool"),
)
_DICTS = (
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "vissl.utils.hydra_config.AttrDict",  # the configuration in VISSL's files
)
STAND_INS: dict[str, Callable[..., object]] = {
    **dict.fromkeys(_INERT, Inert),
    **dict.fromkeys(_DICTS, dict),
    "collections.defaultdict": lambda *_: {},
}


@dataclass(frozen=True)
class Opened:
    """A file's content."""

    path: Path
    container: str  # torch zip | torch legacy | pickle | safetensors
    sha256: str
    size: int
    tree: Tree
    metadata: Mapping[str, str]  # safetensors only

    @property
    def own_tensors(self) -> dict[str, torch.Tensor] | None:
        """The tensors of one of our own Checkpoint files; None for any other file."""
        if self.metadata.get("format") != FORMAT or not isinstance(self.tree, dict):
            return None
        return self.tree


def open_file(path: str | Path) -> Opened:
    """Read any weight file safely. BadInput names the file and what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        said = "is a folder, not a weight file" if path.is_dir() else "no such file"
        raise BadInput(f"{path}: {said}")
    size = path.stat().st_size
    if size == 0:
        raise BadInput(f"{path}: the file is empty")
    tree: Tree
    metadata: Mapping[str, str] = {}
    try:
        container = _container(path, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if container == "safetensors":
                tree, metadata = safetensors_of(path)
            elif container == "torch zip":
                with zipfile.ZipFile(path) as archive:
                    _check_zip(archive, size)
                tree = _torch_load(path, mmap=True)
            elif container == "torch legacy":
                _check_byte_order(path)
                tree = _torch_load(path, mmap=False)
            else:
                with opening.open_regular(path) as file:
                    tree = pickles.read(file, array=torch.from_numpy)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Opened(path, container, sha256, size, tree, metadata)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except (
        Exception
    ) as error:  # whatever a broken file provokes in torch, numpy or pickle
        raise BadInput(f"{path}: {_explain(error)}") from None


def safetensors_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, dict(file.metadata() or {})


def _container(path: Path, size: int) -> str:
    """The kind of the file, by its first bytes. BadInput for what holds no weights."""
    with path.open("rb") as file:
        head = file.read(64)
    for start, what in _NOT_WEIGHTS:
        if head.startswith(start):
            raise BadInput(what)
    if head.startswith(b"PK"):
        return "torch zip"
    if head.startswith(_LEGACY):
        return "torch legacy"
    if head[8:9] == b"{":  # after the length of a header
        if int.from_bytes(head[:8], "little") < size:
            return "safetensors"
        if int.from_bytes(head[:8], "big") < size:
            raise BadInput(
                "safetensors with a big-endian header; write it again on a little-endian machine"
            )
    return "pickle"


def _explain(error: Exception) -> str:
    """One line for whatever went wrong inside a reader."""
    text = " ".join(str(error).split())
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if named:
        return pickles.refusal(named.group(1))
    if isinstance(error, pickle.UnpicklingError) and text.startswith("refused"):
        return text
    cut_off = isinstance(error, EOFError | zipfile.BadZipFile | struct.error)
    if cut_off or "central directory" in text:
        return f"damaged or truncated ({text[:80] or type(error).__name__}); download it again"
    return f"not a readable weight file, damaged or truncated ({type(error).__name__}: {text[:80]})"


def _check_byte_order(path: Path) -> None:
    with path.open("rb") as file:
        for _ in range(2):  # magic number, protocol version
            pickles.load(file)
        system = pickles.load(file)
    if isinstance(system, dict) and not system.get("little_endian", True):
        raise BadInput(
            "written on a big-endian machine; write it again on a little-endian one"
        )


def _torch_load(path: Path, *, mmap: bool) -> Tree:
    known: list[Any] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    with torch.serialization.safe_globals(known):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _check_zip(archive: zipfile.ZipFile, size: int) -> None:
    """torch writes its zip uncompressed: what is packed is not torch's; a CRC shows damage."""
    records = archive.infolist()
    names = [record.filename for record in records]
    listings = [name for name in names if name.endswith("data.pkl")]
    if not listings:
        raise BadInput("a zip archive without data.pkl: not a torch checkpoint")
    if any(name.endswith("constants.pkl") for name in names):
        clip = "(of CLIP, take the Hub's or OpenCLIP's file)"
        raise BadInput(
            f"a TorchScript program, not a state dict; save model.state_dict() instead {clip}"
        )
    # 1. Nothing is packed, and the records do not overlap
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            why = "is compressed, which torch never writes (a zip bomb?)"
            raise BadInput(f"refused: record '{record.filename}' {why}")
    if sum(record.file_size for record in records) > size:
        raise BadInput(
            "refused: its records overlap, which torch never writes (a zip bomb?)"
        )
    # 2. Its bytes lie as on this machine, and are those that were written
    for record in records:
        record.CRC = record.CRC or None  # type: ignore[assignment]  # torch writes 0 where it is told to skip CRCs
    for record in records:
        if record.filename.endswith("/byteorder") and archive.read(record) != b"little":
            raise BadInput(
                "written on a big-endian machine; write it again on a little-endian one"
            )
    for record in records:
        with archive.open(record) as file:
            while file.read(_CHUNK):
                pass  # ZipFile compares the CRC at the end of the record
    # 3. Every storage that data.pkl names is as long as its record: torch believes the former and
    # would read on into the next record, or beyond the file
    folder = listings[0].removesuffix("data.pkl")
    there = {record.filename: record.file_size for record in records}
    storages = _Storages(io.BytesIO(archive.read(listings[0])))
    storages.load()
    for key, wanted in storages.sizes:
        has = there.get(f"{folder}data/{key}")
        if has is None:
            raise BadInput(f"damaged: record data/{key} is missing; download it again")
        if has < wanted:
            raise BadInput(
                f"damaged: record data/{key} has {has} bytes, its tensor {wanted}; download it again"
            )


class _Storages(pickles.BoundedUnpickler):
    """Collects a data.pkl's storages as (key, bytes); torch's own reader judges the rest later."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.sizes: list[tuple[str, int]] = []

    def find_class(self, module: str, name: str) -> object:
        return _ELEMENT.get(name, _Anything)

    def persistent_load(self, pid: object) -> object:
        # ("storage", type, key, location, number of elements)
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise pickle.UnpicklingError(
                "refused: it refers to storage outside the file"
            )
        _, kind, key, _, elements = pid
        if not (
            isinstance(kind, int) and isinstance(key, str) and isinstance(elements, int)
        ):
            raise pickle.UnpicklingError(
                "damaged: a storage without type, name or size"
            )
        self.sizes.append((key, kind * elements))
        return _Anything()


class _Anything(dict[object, object]):
    """Takes whatever a pickle does to an object of a class that is not imported."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Anything":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __setstate__(self, state: object) -> None:
        pass

    append = extend = __setstate__


# Bytes of an element, by what torch calls the class of a storage
_ELEMENT = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "UntypedStorage"), 1),
    **dict.fromkeys(
        ("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1
    ),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
