"""Finds the images in Parquet, Arrow and LMDB files, in a process of its own.

A crafted file may kill the libraries that know these formats, so `scan` starts this file as a
program, which writes tables and never reads an image for anybody. `scan` distrusts the tables."""

import contextlib
import io
import itertools
import os
import pickletools
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from backbench.containers.parquet_pages import codec_of, spans_of
from backbench.containers.spans import bare_span, mark_of, read_span
from backbench.containers.tables import Row, Table
from backbench.errors import BadInput
from backbench.images.image_list import is_image
from backbench.runs.state import die_with_parent
from backbench.untrusted import jsons, opening, pickles, printable

MEMORY = 4 * opening.GIGABYTE  # of address space, beside the mapped file
SECONDS = 600  # for one file
AT_ONCE = 8  # files for one process
LABEL_COLUMNS = ("label", "labels", "cls")
NAME_COLUMNS = ("file_name", "filename", "image_id")  # of known datasets' tables
PROOF = 64  # rows of each file that are compared with what pyarrow reads
PACKAGES = {"parquet": "pyarrow", "arrow": "pyarrow", "lmdb": "lmdb"}


def scan(
    kind: str, files: Sequence[Path], labels: Sequence[str] = ()
) -> Iterator[Table]:
    """Yield the tables of files of one kind. BadInput names the first that cannot be scanned.

    `labels` are the columns that may hold the labels; without any, the file's schema tells."""
    for begin in range(0, len(files), AT_ONCE):
        part = files[begin : begin + AT_ONCE]
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, "-P", "-m", __name__, kind, folder]
            program.append(",".join(labels))
            wait = SECONDS * len(part)
            try:
                ended = subprocess.run(
                    [*program, *(str(file) for file in part)],
                    capture_output=True,
                    timeout=wait,
                    check=False,
                )
                why = "its reader died" if ended.returncode < 0 else "its reader failed"
            except subprocess.TimeoutExpired:
                why = f"its reader took more than {wait} s"
            for number, file in enumerate(part):
                refusal = Path(folder) / f"{number}.txt"
                if refusal.exists():
                    text = opening.read_bytes(refusal, most=2000)
                    why = printable.shown(text.decode(errors="replace"), 300)
                try:
                    size = file.stat().st_size
                    table = Table.loaded(Path(folder) / f"{number}.npz", size)
                except Exception:  # none, or one that the dying process left
                    raise BadInput(
                        f"{file}: not readable as {kind} ({why}); get or write it anew"
                    ) from None
                yield table


# In the process of its own


def main(kind: str, folder: str, labels: str, files: Sequence[str]) -> None:
    """Bind this process to its parent and to its limits, and write the tables."""
    die_with_parent()
    limit = MEMORY + max(Path(file).stat().st_size for file in files)
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    write_tables(kind, folder, labels, files)


def write_tables(kind: str, folder: str, labels: str, files: Sequence[str]) -> None:
    """Write the table of each file, or why there is none, until one fails."""
    scan_file = {"parquet": scan_parquet, "arrow": scan_arrow, "lmdb": scan_lmdb}[kind]
    for number, file in enumerate(files):
        try:
            wanted = tuple(name for name in labels.split(",") if name)
            table = scan_file(Path(file), wanted)
            (Path(folder) / f"{number}.npz").write_bytes(table.dumped())
        except Exception as error:
            if isinstance(error, ImportError):
                package = PACKAGES[kind]
                said = f"the package {package} is missing: pip install 'backbench[containers]'"
            else:
                text = " ".join(str(error).split()) or type(error).__name__
                said = printable.shown(text, 250)
            (Path(folder) / f"{number}.txt").write_text(said)
            return


class _Columns(NamedTuple):
    """The columns of a table of images."""

    image: str
    struct: (
        bool  # whether an image is a struct of bytes and path; otherwise it is bytes
    )
    label: str | None
    classes: list[str]  # names by label; empty where the file states none
    name: str | None = None  # texts that name the images, where the struct does not
    texts: bool = False  # whether a label is the name of its class


def _columns(schema: Any, wanted: Sequence[str]) -> _Columns:
    """Find the columns by the schema, and by the Hub's description in it.

    ValueError names the columns that are there, where one of images or of `wanted` labels is not."""
    import pyarrow as pa

    # 1. The images: a column called image or img comes before others, then the name decides
    images = []
    numbers = []
    for field in schema:
        struct = pa.types.is_struct(field.type)
        binary = pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
        if binary or (struct and "bytes" in {below.name for below in field.type}):
            images.append((field.name not in ("image", "img"), field.name, struct))
        if pa.types.is_integer(field.type):
            numbers.append(field.name)
    if not images:
        raise ValueError(
            "no column of images, as `image: struct<bytes, path>`; its columns are"
            f" {', '.join(schema.names)}"
        )
    _, image, is_struct = min(images)
    # 2. The names of classes, as the Hub writes them
    features: dict[str, Any] = {}
    text = (schema.metadata or {}).get(b"huggingface")
    if text:
        features = jsons.decode(text)["info"]["features"]
    classes = {}
    for name, about in features.items():
        if isinstance(about, dict) and about.get("_type") == "ClassLabel":
            # A class is a folder: SUN397 calls one "/a/abbey"
            classes[name] = [
                str(each).replace("/", "_") for each in about.get("names") or []
            ]
    # 3. The labels
    for label in wanted or ("label", *classes, "labels", "cls"):
        if label in numbers:
            names = classes.get(label, [])
            return _Columns(image, is_struct, label, names, _named_by(schema, wanted))
    for label in wanted or LABEL_COLUMNS:
        if label in schema.names and _is_text(schema.field(label).type):
            named = _named_by(schema, wanted)
            return _Columns(image, is_struct, label, [], named, texts=True)
    if wanted:
        raise ValueError(
            f"no column of numbers or names called {' or '.join(wanted)}, the labels; its columns"
            f" are {', '.join(schema.names)}"
        )
    return _Columns(image, is_struct, None, [])


def _is_text(kind: Any) -> bool:
    """Return True for texts as the libraries write them: Polars' are large, pandas' categories are
    a dictionary."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _label_of(stated: Any, columns: _Columns, place: dict[str, int]) -> int:
    """Return the label that a row states; -1 for none. `place` numbers the texts as they come."""
    if stated is None:
        return -1
    if not columns.texts:
        return int(stated)
    if not stated.strip():
        return -1
    return place.setdefault(stated.replace("/", "_"), len(place))


def _named_by(schema: Any, wanted: Sequence[str]) -> str | None:
    """Return the column of texts that names the images of a known dataset, which has `wanted`."""
    import pyarrow as pa

    if not wanted:
        return None
    for name in NAME_COLUMNS:
        if name in schema.names and pa.types.is_string(schema.field(name).type):
            return name
    return None


def _name_of(path: object, row: int, file: Path) -> str:
    """Return the name of an image: the file name that its row keeps, or its place."""
    if not isinstance(path, str) or not path:
        return f"{file.stem}-{row:07}.jpg"
    if path.startswith("/"):
        # A path of the machine that wrote it says nothing of the class
        return path.rpartition("/")[2]
    return path.removeprefix("./")


def scan_parquet(file: Path, labels: Sequence[str] = ()) -> Table:
    """Scan a Parquet file of any writer whose images lie plain or in a dictionary."""
    import pyarrow.parquet as pq

    rows: list[Row] = []
    place: dict[str, int] = {}
    with opening.open_regular(file) as raw:
        about = pq.ParquetFile(raw)
        columns = _columns(about.schema_arrow, labels)
        column = f"{columns.image}.bytes" if columns.struct else columns.image
        index = next(i for i, c in enumerate(about.schema) if c.path == column)
        levels = about.schema.column(index).max_definition_level
        if about.schema.column(index).max_repetition_level:
            raise ValueError("a column of lists of images")
        wanted = []
        if columns.struct:
            wanted.append(f"{columns.image}.path")
        if columns.label is not None:
            wanted.append(columns.label)
        if columns.name is not None:
            wanted.append(columns.name)
        meta = about.metadata
        codec = ""
        for group in range(meta.num_row_groups):
            chunk = meta.row_group(group).column(index)
            codec = codec_of(chunk)
            spans = list(spans_of(raw.fileno(), chunk, levels))
            texts: list[dict[str, Any]] = [{}] * len(spans)
            if wanted:
                texts = about.read_row_group(group, columns=wanted).to_pylist()
            if len(texts) != len(spans):
                raise ValueError(f"{len(spans)} images in {len(texts)} rows")
            for text, span in zip(texts, spans):
                path = None
                if columns.struct:
                    path = (text.get(columns.image) or {}).get("path")
                if not path and columns.name is not None and text[columns.name]:
                    # Abyssinian_1, Abyssinian_1.jpg
                    path = f"{text[columns.name].removesuffix('.jpg')}.jpg"
                stated = None if columns.label is None else text[columns.label]
                label = _label_of(stated, columns, place)
                rows.append((_name_of(path, len(rows), file), label, span))
        _prove(about, file, column, rows)
    note = f"{meta.num_row_groups} row groups, {codec}, written by {meta.created_by}"
    classes = list(place) if columns.texts else columns.classes
    said = [printable.shown(note, 100)]
    return Table.of(rows, classes, said, by_text=columns.texts)


def _prove(about: Any, file: Path, column: str, rows: Sequence[Row]) -> None:
    """Compare some rows of one row group, drawn by the file's name, with what pyarrow reads."""
    draw = random.Random(file.name)
    group = draw.randrange(max(1, about.metadata.num_row_groups))
    begin = sum(about.metadata.row_group(i).num_rows for i in range(group))
    if not rows:
        return
    table = about.read_row_group(group, columns=[column]).column(0)
    if "." in column:
        table = table.combine_chunks().field("bytes")
    mark = mark_of(file)
    for row in draw.sample(range(len(table)), min(PROOF, len(table))):
        _, _, span = rows[begin + row]
        own = read_span(str(file), mark, span, f"row {begin + row}")
        if own != table[row].as_py():
            raise ValueError(f"row {begin + row} has other bytes than pyarrow reads")


def scan_arrow(file: Path, labels: Sequence[str] = ()) -> Table:
    """Scan a file of the library `datasets`: Arrow's stream or file format, not packed."""
    import pyarrow as pa

    mapped = pa.memory_map(str(file))
    whole = mapped.read_buffer()
    try:
        reader = pa.ipc.open_stream(pa.BufferReader(whole))
        batches = iter(reader)
    except pa.ArrowInvalid:
        reader = pa.ipc.open_file(pa.BufferReader(whole))
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    columns = _columns(reader.schema, labels)
    rows: list[Row] = []
    place: dict[str, int] = {}
    for batch in batches:
        batch.validate()
        images = batch.column(columns.image)
        paths = None
        if isinstance(images, pa.ExtensionArray):
            images = images.storage
        if columns.struct:
            names = [field.name for field in images.type]
            below = dict(zip(names, images.flatten()))
            images = below["bytes"]
            paths = below.get("path")
        stated_labels = batch.column(columns.label) if columns.label else None
        if images.null_count:
            raise ValueError("the images are not in it (null bytes)")
        # A binary array is offsets (N + 1,) and the bytes between them
        wide = {pa.binary(): "<i4", pa.large_binary(): "<i8"}.get(images.type)
        if wide is None:
            raise ValueError(f"images of Arrow's type {images.type}")
        _, offsets, values = images.buffers()
        ends = np.frombuffer(offsets, wide)[images.offset :][: len(images) + 1].tolist()
        for row, (begin, end) in enumerate(itertools.pairwise(ends)):
            # The values lie inside the mapped file, unless they were unpacked to other memory
            start = values.address - whole.address + begin
            size = end - begin
            if not (0 <= start <= whole.size - size and size >= 0):
                raise ValueError(
                    "its images are compressed; write it without compression"
                )
            stated = None if stated_labels is None else stated_labels[row].as_py()
            label = _label_of(stated, columns, place)
            path = None if paths is None else paths[row].as_py()
            rows.append(
                (_name_of(path, len(rows), file), label, bare_span(start, size))
            )
    classes = list(place) if columns.texts else columns.classes
    return Table.of(rows, classes, by_text=columns.texts)


def scan_lmdb(file: Path, _labels: Sequence[str] = ()) -> Table:
    """Scan an LMDB of path -> file, or of folder2lmdb's number -> pickled (file, label)."""
    import lmdb

    rows: list[Row] = []
    how = {"subdir": False, "readonly": True, "lock": False, "readahead": False}
    with (
        lmdb.open(str(file), max_spare_txns=0, **how) as env,
        env.begin(buffers=True) as entries,
    ):
        # A value is a piece of the mapped file, so its address tells its place. The library maps
        # the file as one piece, which begins at the lowest address of its lines here
        real = os.path.realpath(file)
        maps = Path("/proc/self/maps").read_text().splitlines()
        begin = min(
            int(line.split("-")[0], 16) for line in maps if line.endswith(f" {real}")
        )
        size = file.stat().st_size
        for key, value in entries.cursor():
            name = bytes(key).decode()
            start = -1
            if len(value):
                start = np.frombuffer(value, np.uint8).ctypes.data - begin
            if not 0 <= start <= size - len(value):
                raise ValueError(f"a value outside of the file, under {name[:100]}")
            if is_image(name):
                rows.append((name, -1, bare_span(start, len(value))))
            elif bytes(value[:1]) == b"\x80" and not name.startswith("__"):
                inner, length, label = _pickled(bytes(value))
                rows.append((f"{name}.jpg", label, bare_span(start + inner, length)))
    return Table.of(rows)


def _pickled(data: bytes) -> tuple[int, int, int]:
    """Return (first byte, number of bytes, label) of a pickled (bytes of an image, label).

    So nobody unpickles it again. ValueError for anything else."""
    pair = pickles.read(io.BytesIO(data))
    if not (isinstance(pair, tuple | list) and [type(x) for x in pair] == [bytes, int]):
        raise ValueError("a pickled value that is not (bytes of an image, label)")
    image, label = pair
    # Bytes of the operation and of the length that stand before the image
    heads = {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9}
    for operation, value, at in pickletools.genops(data):
        if value == image and at is not None and operation.name in heads:
            return at + heads[operation.name], len(image), label
    raise ValueError("an image that its pickle does not hold in one piece")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
