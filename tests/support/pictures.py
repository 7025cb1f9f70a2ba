"""Small smooth pictures, always the same, and tar shards of an image list."""

import tarfile

import numpy as np
from PIL import Image

from support.containers import add


def picture(n, size=32):
    """Make picture `n`: (size + n % 5) x size, smooth colours."""
    rng = np.random.default_rng(n)
    low = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return low.resize((size, size + n % 5), Image.BICUBIC)


def write_pictures(root):
    """Write ROOT/shapes/train/{a,b,c}: 21 pictures, PNG and JPEG."""
    for n in range(21):
        folder = root / "shapes" / "train" / "abc"[n % 3]
        folder.mkdir(parents=True, exist_ok=True)
        extension = "png" if n % 2 else "jpg"
        picture(n).save(folder / f"{n:02}.{extension}")


def write_shards(folder, found, *, suffix=".tar", mode="w"):
    """Write FOLDER/part-00000{0,1}.tar with images, labels and captions in WebDataset's layout."""
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"part-{shard:06}{suffix}", mode) as tar:
            for i in range(shard, len(found), 2):
                key = f"sub/{i:05}"
                file = found.file(i)
                add(tar, f"{key}{file.suffix}", file.read_bytes())
                add(tar, f"{key}.cls", str(found.labels[i]).encode())
                add(tar, f"{key}.txt", b"a caption")
