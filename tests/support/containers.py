"""Writes the images of a class folder into containers, as labs hold them."""

import io
import json
import subprocess
import tarfile
import types
import zipfile

from backbench.containers import scan_parquet_arrow_lmdb


def images_of(folder):
    """Yield (path below the folder, label, bytes) of every image, in the order of a class folder."""
    classes = sorted(p.name for p in folder.iterdir())
    for label, name in enumerate(classes):
        for file in sorted((folder / name).iterdir()):
            yield f"{name}/{file.name}", label, file.read_bytes()


def add(tar, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def tar(source, base, split):
    with tarfile.open(base / f"{split}.tar", "w") as out:
        out.add(source, f"./{split}")


def per_class(source, base, split):
    (base / split).mkdir()
    for folder in sorted(source.iterdir()):
        with tarfile.open(base / split / f"{folder.name}.tar", "w") as out:
            for file in folder.iterdir():
                out.add(file, file.name)


def tar_of_tars(source, base, split):
    """Write tars of classes in one tar, as ILSVRC2012_img_train.tar."""
    with tarfile.open(base / f"ILSVRC2012_img_{split}.tar", "w") as out:
        for folder in sorted(source.iterdir(), reverse=True):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as below:
                for file in folder.iterdir():
                    below.add(file, file.name)
            add(out, f"{folder.name}.tar", inner.getvalue())


def webdataset(source, base, split):
    """Write three shards, in another order than a class folder's."""
    rows = list(images_of(source))
    word = {"val": "validation"}.get(split, split)
    for shard in range(3):
        with tarfile.open(base / f"own-{word}-{shard:04}.tar", "w") as out:
            for n, (path, label, data) in enumerate(rows[shard::3][::-1]):
                key = path.partition(".")[0]
                add(out, path, data)
                if n % 2:
                    add(out, f"{key}.cls", str(label).encode())
                else:
                    add(out, f"{key}.json", json.dumps({"label": label}).encode())
                add(out, f"{key}.txt", b"a caption")


def zip_stored(source, base, split, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(base / f"{split}.zip", "w", method) as out:
        for path, _, data in images_of(source):
            out.writestr(f"{split}/{path}", data)
        out.writestr("__MACOSX/._0.jpg", b"nothing")


def zip_deflated(source, base, split):
    zip_stored(source, base, split, zipfile.ZIP_DEFLATED)


def zip_whole(source, base, split):
    """Add a split to one archive with all splits."""
    with zipfile.ZipFile(base / "all.zip", "a") as out:
        for path, _, data in images_of(source):
            out.writestr(f"pictures/{split}/{path}", data)


def rows_of(source, first=0, step=1):
    """Return rows as the Hub has them, backwards, with the names of the classes."""
    import pyarrow as pa

    classes = sorted(p.name for p in source.iterdir())
    rows = []
    for path, label, data in images_of(source):
        rows.append(
            {"image": {"bytes": data, "path": path.rpartition("/")[2]}, "label": label}
        )
    features = {
        "label": {"_type": "ClassLabel", "names": classes},
        "image": {"_type": "Image"},
    }
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", image), ("label", pa.int64())], metadata=about)
    return pa.Table.from_pylist(rows[::-1][first::step], schema=schema)


# How the library `datasets` wrote Parquet, by year
ERAS = {
    "2023": {"row_group_size": 5, "compression": "snappy"},
    "2025": {
        "compression": "snappy",
        "use_content_defined_chunking": {
            "min_chunk_size": 2000,
            "max_chunk_size": 9000,
            "norm_level": 0,
        },
        "write_page_index": True,
        "dictionary_pagesize_limit": 4000,
        "write_batch_size": 2,
    },
    "2026": {"compression": "none", "use_dictionary": False, "write_page_index": True},
    "zstd, pages of 2": {
        "compression": "zstd",
        "data_page_version": "2.0",
        "data_page_size": 2000,
    },
}


def parquet(era):
    def write(source, base, split):
        import pyarrow.parquet as pq

        (base / "data").mkdir(exist_ok=True)
        word = {"val": "validation"}.get(split, split)
        for part in range(2):
            file = base / "data" / f"{word}-{part:05}-of-00002.parquet"
            pq.write_table(rows_of(source, part, 2), file, **ERAS[era])

    return write


def arrow(source, base, split, file_format=False):
    """Write what `datasets` writes: its cache (a stream), or by `save_to_disk` (a file)."""
    import pyarrow as pa

    table = rows_of(source)
    if file_format:
        (base / split).mkdir()
        file = base / split / "data-00000-of-00001.arrow"
        writer = pa.ipc.new_file(file, table.schema)
    else:
        (base / f"cache-{split}.arrow").write_bytes(b"a result of map")
        file = base / f"own-{split}.arrow"
        writer = pa.ipc.new_stream(file, table.schema)
    with writer as out:
        out.write_table(table, max_chunksize=7)


def arrow_file(source, base, split):
    arrow(source, base, split, file_format=True)


def lmdb_file(source, base, split):
    import lmdb

    file = str(base / f"{split}.lmdb")
    with lmdb.open(file, map_size=1 << 24) as env, env.begin(write=True) as out:
        for path, _, data in images_of(source):
            out.put(path.encode(), data)


LAYOUTS = {
    "tar": tar,
    "tar_of_tars": tar_of_tars,
    "per_class": per_class,
    "wds": webdataset,
    "zip": zip_stored,
    "deflated": zip_deflated,
    "whole": zip_whole,
    **{f"parquet of {era}": parquet(era) for era in ERAS},
    "arrow": arrow,
    "arrow file": arrow_file,
    "lmdb": lmdb_file,
}


def packed(root, name, layout, below=None):
    """Pack the class folder ROOT/<name> into containers in BELOW/LAYOUT/<name>, and return
    BELOW/LAYOUT. BELOW is ROOT unless it is given."""
    below = below or root
    base = below / layout / name
    base.mkdir(parents=True)
    for split in ("train", "val", "test"):
        if (root / name / split).is_dir():
            LAYOUTS[layout](root / name / split, base, split)
    return below / layout


def scan_here(monkeypatch):
    """Scan files in this process, where its protection from them is not what is tested: another one
    imports pyarrow for each split."""

    def run(program, **_):
        begin = program.index(scan_parquet_arrow_lmdb.__name__) + 1
        kind, folder, labels, *files = program[begin:]
        scan_parquet_arrow_lmdb.write_tables(kind, folder, labels, files)
        return subprocess.CompletedProcess(program, 0)

    there = types.SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(scan_parquet_arrow_lmdb, "subprocess", there)
