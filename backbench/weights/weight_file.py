"""Opens a weight file from elsewhere (torch zip, legacy torch, pickle, safetensors) as plain values.

Nothing in it is executed: torch's `weights_only` unpickler reads torch files, and
`untrusted.pickles` reads other pickles. In torch files the classes that `STAND_INS` lists by name
become inert values; every other class is refused. However a file is broken, the error is a BadInput
of one line.
"""

import hashlib
import io
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from backbench.errors import BadInput
from backbench.untrusted import opening, pickles, printable
from backbench.weights import absent, shards
from backbench.weights.family import Tree
from backbench.weights.header import FORMAT

# A file of torch before 1.6 begins with its magic number, pickled.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_SAVE_IN_TORCH = (
    "only files of torch, safetensors and pickle are read: load the model where it is from, and write"
    " its state_dict() with torch.save or safetensors"
)
# First bytes of files that are often taken for weights -> what such a file is
_NOT_WEIGHTS = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file: fetch it with `git lfs pull`",
    ),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"\xfd7zXZ", "an xz archive: unpack it first"),
    (b"7z\xbc\xaf", "a 7-zip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive: unpack it first"),
    (b"Rar!", "a RAR archive: unpack it first"),
    (b"\x89HDF", f"an HDF5 file (Keras); {_SAVE_IN_TORCH}"),
    (b"\x93NUMPY", f"a numpy array; {_SAVE_IN_TORCH}"),
    (b"GGUF", f"a GGUF file; {_SAVE_IN_TORCH}"),
    (b"\x89PNG", "a picture, not weights; give the file of the weights"),
    (b"\xff\xd8\xff", "a picture, not weights; give the file of the weights"),
    (b"%PDF", "a PDF, not weights; give the file of the weights"),
)
# Ends of names -> what such a file is, where its first bytes do not tell
_NOT_TORCH = (
    (".onnx", "an ONNX file"),
    (".tflite", "a TensorFlow Lite file"),
    (".pb", "a TensorFlow file"),
    (".index", "a TensorFlow checkpoint"),
    (".data-00000-of-00001", "a TensorFlow checkpoint"),
    (".msgpack", "a Flax file"),
)
_CHUNK = 1 << 20  # bytes read at once
# Backbones have hundreds of tensors. Of very many names, the search for a trunk takes minutes.
_MOST_TENSORS = 20_000


class Inert:
    """An inert object stands for one of a package that is not imported. It takes anything and keeps
    nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


# Published files name these beside tensors and plain values. Only their names are known here: the
# packages are not imported, and even `builtins.getattr` becomes an `Inert`.
_INERT = (
    # Arguments: facebookresearch/dino main_dino.py, timm, torchvision's references
    "argparse.Namespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    # numpy scalars and arrays among the metrics that mmengine, VISSL and Lightning save
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.Float64DType",
    "numpy.dtypes.Float32DType",
    "numpy.dtypes.Int64DType",
    "numpy.dtypes.Int32DType",
    "numpy.dtypes.BoolDType",
    # mmengine's message hub
    "mmengine.logging.history_buffer.HistoryBuffer",
    "builtins.getattr",
    # Hyper-parameters and callbacks in Lightning's files; solo-learn's are omegaconf's
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.nodes.AnyNode",
    "omegaconf.base.Metadata",
    "omegaconf.base.ContainerMetadata",
    "typing.Any",
    "builtins.dict",
    "builtins.list",
    "builtins.int",
    "builtins.float",
    "builtins.str",
    "builtins.bool",
)
_DICTS = (
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "vissl.utils.hydra_config.AttrDict",  # the configuration in VISSL's files
)
STAND_INS: dict[str, Callable[..., object]] = {
    **dict.fromkeys(_INERT, Inert),
    **dict.fromkeys(_DICTS, dict),
    # Its factory is never called.
    "collections.defaultdict": lambda *_: {},
}


@dataclass(frozen=True)
class Opened:
    """Holds the contents of an opened file."""

    path: Path
    container: str  # torch zip | torch legacy | pickle | safetensors
    sha256: str
    size: int  # bytes
    tree: Tree
    metadata: Mapping[str, str]  # empty but for safetensors

    @property
    def own_tensors(self) -> dict[str, torch.Tensor] | None:
        """The tensors of one of our own Checkpoint files; None for any other file."""
        if self.metadata.get("format") != FORMAT or not isinstance(self.tree, dict):
            return None
        return self.tree


def open_file(path: str | Path) -> Opened:
    """Read any weight file safely. BadInput names the file and what is wrong with it."""
    path = Path(path)
    if path.is_dir():
        raise BadInput(f"{path}: {_of_folder(path)}")
    if not path.is_file():
        raise BadInput(absent.refusal(path))
    size = path.stat().st_size
    if size == 0:
        raise BadInput(f"{path}: the file is empty; copy or download it again")
    if path.suffix in (".distcp", ".json"):
        piece = shards.of_file(path)
        if piece:
            raise BadInput(f"{path}: {piece}")
    tree: Tree
    metadata: Mapping[str, str] = {}
    container = ""
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
                _check_legacy(path)
                tree = _torch_load(path, mmap=False)
            else:
                with opening.open_regular(path) as file:
                    tree = pickles.read(file, array=torch.from_numpy)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Opened(path, container, sha256, size, tree, metadata)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except Exception as error:
        # A broken file may provoke any error in torch, numpy or pickle.
        reason = _explain(error)
        if container == "pickle" and not reason.startswith("refused"):
            reason = _no_pickle(path) or reason
        raise BadInput(f"{path}: {reason}") from None


def _of_folder(folder: Path) -> str:
    """Say what to give in place of a folder."""
    pieces = shards.of_folder(folder)
    if pieces:
        return pieces
    if (folder / "saved_model.pb").exists():
        return f"a TensorFlow model; {_SAVE_IN_TORCH}"
    files = [
        path for path in sorted(folder.iterdir()) if path.suffix in absent.SUFFIXES
    ]
    if not files:
        return f"is a folder without a weight file ({', '.join(absent.SUFFIXES)}); give the file"
    named = ", ".join(printable.shown(path.name, 60) for path in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"is a folder, not a weight file; give one of its files: {named}{more}"


def safetensors_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        count = len(file.keys())
        if count > _MOST_TENSORS:
            raise BadInput(
                f"holds {count:,} tensors, and a backbone has hundreds; write the trunk's tensors alone"
            )
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        return tensors, dict(file.metadata() or {})


def _container(path: Path, size: int) -> str:
    """Tell the kind of the file by its first bytes. BadInput for what holds no weights."""
    with path.open("rb") as file:
        head = file.read(512)
    for start, kind in _NOT_WEIGHTS:
        if head.startswith(start):
            raise BadInput(kind)
    # A safetensors file begins with its header's length in eight bytes, which may be a blank and a
    # "<" (15392); those of a text are never zero
    is_text = b"\0" not in head[:8]
    if is_text and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise BadInput(
            "a web page, not weights: the download went wrong; fetch the file to which the page links"
        )
    if head[257:262] == b"ustar":
        raise BadInput("a tar archive: unpack it first")
    if head.startswith(b"PK"):
        return "torch zip"
    if head.startswith(_LEGACY):
        return "torch legacy"
    # A safetensors file begins with the length of its header, 8 bytes, and the header's JSON.
    if head[8:9] == b"{":
        if int.from_bytes(head[:8], "little") < size:
            return "safetensors"
        if int.from_bytes(head[:8], "big") < size:
            raise BadInput(
                "safetensors with a big-endian header; write it again on a little-endian machine"
            )
    return "pickle"


def _no_pickle(path: Path) -> str:
    """Say what a file is that cannot be read as a pickle; empty for what may be a damaged one."""
    with path.open("rb") as file:
        head = file.read(512)
    # 1. By its name, or its first bytes: an ONNX model begins with its version and its producer
    for end, kind in _NOT_TORCH:
        if path.name.endswith(end):
            return f"{kind}; {_SAVE_IN_TORCH}"
    if head[:1] == b"\x08" and head[2:3] == b"\x12":
        return f"a protocol buffer (ONNX, TensorFlow); {_SAVE_IN_TORCH}"
    if head[4:8] == b"TFL3":
        return f"a TensorFlow Lite file; {_SAVE_IN_TORCH}"
    # 2. A text. Its last letter may have been cut
    text = head.decode("utf-8", "ignore").strip()
    if text and len(head) - len(text.encode()) < 64 and "\0" not in text:
        first_line = text.splitlines()[0]
        if first_line.isprintable():
            return (
                f"a text file, not weights (it begins with '{first_line[:60]}'); give the file of the"
                " weights"
            )
    return ""


def _explain(error: Exception) -> str:
    """Say in one line what went wrong inside a reader."""
    text = " ".join(str(error).split())
    # torch names the class it refuses so: "... unsupported GLOBAL posix.getcwd whose module ...".
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if named:
        return pickles.refusal(named.group(1)) + _of_class(named.group(1))
    # Our own refusal (untrusted/pickles.py) is a whole sentence already
    if isinstance(error, pickle.UnpicklingError) and text.startswith("refused"):
        refused = re.match(r"refused: it names ([\w.]+),", text)
        return text + _of_class(refused.group(1)) if refused else text
    name = type(error).__name__
    cut_off = isinstance(error, EOFError | zipfile.BadZipFile | struct.error)
    if cut_off or "central directory" in text:
        return f"damaged or truncated ({text[:80] or name}); download it again"
    return (
        f"not a readable weight file, damaged or truncated ({name}: {text[:80]});"
        " download it again, or write its state_dict() with torch.save"
    )


def _of_class(name: str) -> str:
    """Advise on a torch file that holds an object of a class of this name."""
    if name.startswith(("torch.distributed.", "torch.distributed_")):
        return (
            "; it holds one process's part of the weights: save them whole, with get_model_state_dict"
            " and StateDictOptions(full_state_dict=True), or full_tensor() of each"
        )
    package = name.partition(".")[0]
    is_class = name.rpartition(".")[2][:1].isupper()
    if is_class and package not in (*sys.stdlib_module_names, "numpy"):
        return (
            "; if it is a whole model, write model.state_dict() with torch.save instead"
        )
    return "; where you trust the file, load it where it is from, and write the tensors alone"


def _check_legacy(path: Path) -> None:
    """Refuse a legacy torch file of a big-endian machine, and one of too many steps."""
    with path.open("rb") as file:
        # Such a file is several pickles: the magic number, the protocol version, the writing system.
        pickles.load(file)
        pickles.load(file)
        system = pickles.load(file)
        pickles.walk_through(file)  # the tensors
    if isinstance(system, dict) and not system.get("little_endian", True):
        raise BadInput(
            "written on a big-endian machine; write it again on a little-endian one"
        )


def _torch_load(path: Path, *, mmap: bool) -> Tree:
    """Let torch read the file; for each name in `STAND_INS` it takes the stand-in."""
    known: list[Any] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    with torch.serialization.safe_globals(known):
        if path.suffix == ".safetensors":
            # By this end of a name torch takes any file for another format
            with path.open("rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _check_zip(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse a zip archive that torch cannot have written, or that is damaged."""
    records = archive.infolist()
    names = [record.filename for record in records]
    listings = [name for name in names if name.endswith("data.pkl")]
    if not listings:
        if any(name.endswith(".npy") for name in names):
            raise BadInput(f"a numpy archive; {_SAVE_IN_TORCH}")
        if any(name.endswith(("config.json", "model.weights.h5")) for name in names):
            raise BadInput(f"a Keras file; {_SAVE_IN_TORCH}")
        raise BadInput(
            "a zip archive without data.pkl: not a torch checkpoint; give the file of the weights, or"
            " unpack the one in it"
        )
    if any(name.endswith("constants.pkl") for name in names):
        raise BadInput(
            "a TorchScript program, not a state dict; save model.state_dict() instead"
            " (of CLIP, take the Hub's or OpenCLIP's file)"
        )
    # 1. No record is compressed or encrypted (bit 0 of the flags), and none overlaps another
    for record in records:
        if record.flag_bits & 1:
            raise BadInput(
                f"record '{record.filename}' is encrypted; unpack the archive with its password, and"
                " give the file of the weights"
            )
        if record.compress_type != zipfile.ZIP_STORED:
            raise BadInput(
                f"refused: record '{record.filename}' is compressed, which torch never writes"
                " (a zip bomb?)"
            )
    if sum(record.file_size for record in records) > size:
        raise BadInput(
            "refused: its records overlap, which torch never writes (a zip bomb?)"
        )
    # 2. The bytes lie in this machine's order, and are those that were written
    for record in records:
        # torch writes a CRC of 0 where it is told to skip CRCs. With None, ZipFile compares none.
        record.CRC = record.CRC or None  # type: ignore[assignment]
    for record in records:
        if record.filename.endswith("/byteorder") and archive.read(record) != b"little":
            raise BadInput(
                "written on a big-endian machine; write it again on a little-endian one"
            )
    for record in records:
        with archive.open(record) as file:
            # ZipFile compares the CRC at the end of the record.
            while file.read(_CHUNK):
                pass
    # 3. No storage that data.pkl names is longer than its record: torch believes data.pkl, and would
    # read on into the next record, or beyond the file
    folder = listings[0].removesuffix("data.pkl")
    sizes = {record.filename: record.file_size for record in records}
    listing = archive.read(listings[0])
    pickles.walk_through(io.BytesIO(listing))
    storages = _Storages(io.BytesIO(listing))
    storages.load()
    for key, wanted in storages.sizes:
        size_of_record = sizes.get(f"{folder}data/{key}")
        if size_of_record is None:
            raise BadInput(f"damaged: record data/{key} is missing; download it again")
        if size_of_record < wanted:
            raise BadInput(
                f"damaged: record data/{key} has {size_of_record} bytes, its tensor {wanted};"
                " download it again"
            )


class _Storages(pickles.BoundedUnpickler):
    """Collects the storages of a data.pkl as (key, bytes). Classes become `_Anything`: torch's own
    reader judges them later."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.sizes: list[tuple[str, int]] = []

    def find_class(self, module: str, name: str) -> object:
        # The class of a storage becomes the size of its elements.
        return _ELEMENT_BYTES.get(name, _Anything)

    def persistent_load(self, pid: object) -> object:
        # ("storage", class, key, location, number of elements)
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise pickle.UnpicklingError(
                "refused: it refers to storage outside the file"
            )
        _, element_bytes, key, _, elements = pid
        if not (
            isinstance(element_bytes, int)
            and isinstance(key, str)
            and isinstance(elements, int)
        ):
            raise pickle.UnpicklingError(
                "damaged: a storage without type, name or size"
            )
        self.sizes.append((key, element_bytes * elements))
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

    # What pickle calls for the items of a list
    append = extend = __setstate__


# Class of a storage, as torch names it -> bytes of an element
_ELEMENT_BYTES = {
    "ByteStorage": 1,
    "CharStorage": 1,
    "BoolStorage": 1,
    "UntypedStorage": 1,
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "ShortStorage": 2,
    "FloatStorage": 4,
    "IntStorage": 4,
    "QInt32Storage": 4,
    "DoubleStorage": 8,
    "LongStorage": 8,
    "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
}
