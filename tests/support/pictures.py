"""Small smooth pictures, always the same, and tar shards of an image list."""

import io
import tarfile

import numpy as np
from PIL import Image


def picture(n, size=32):
    """Picture `n`: (size + n % 5) x size, smooth colours."""
    rng = np.random.default_rng(n)
    low = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return low.resize((size, size + n % 5), Image.BICUBIC)


def write_pictures(root):
    """ROOT/shapes/train/{a,b,c}: 21 pictures, PNG and JPEG."""
    for n in range(21):
        folder = root / "shapes" / "train" / "abc"[n % 3]
        folder.mkdir(parents=True, exist_ok=True)
        picture(n).save(folder / f"{n:02}.{'png' if n % 2 else 'jpg'}")


def write_shards(folder, found, *, suffix=".tar", mode="w"):
    """FOLDER/part-000000.tar and part-000001.tar with the images of `found` in turns, in
    WebDataset's layout: image, label and a caption."""
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"part-{shard:06}{suffix}", mode) as tar:
            for i in range(shard, len(found), 2):
                key = f"sub/{i:05}"
                extension = found.file(i).suffix
                for name, content in (
                    (f"{key}{extension}", found.file(i).read_bytes()),
                    (f"{key}.cls", str(found.labels[i]).encode()),
                    (f"{key}.txt", b"a caption"),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
