"""Small smooth pictures, always the same, and tar shards of an image list."""

import tarfile

import numpy as np
from PIL import Image

from support.containers import add


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
    """FOLDER/part-00000{0,1}.tar with images, labels and captions in WebDataset's layout."""
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"part-{shard:06}{suffix}", mode) as tar:
            for i in range(shard, len(found), 2):
                key = f"sub/{i:05}"
                extension = found.file(i).suffix
                image, label = found.file(i).read_bytes(), str(found.labels[i]).encode()
                members = {extension: image, ".cls": label, ".txt": b"a caption"}
                for kind, content in members.items():
                    add(tar, f"{key}{kind}", content)
