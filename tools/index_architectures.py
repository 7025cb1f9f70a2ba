"""Write backbench.weights.families.architectures.tsv: `python tools/index_architectures.py`.

It has the networks that timm and torchvision build, with the digests of their tensors' shapes
(`backbench.weights.families.architectures`). Building all of them takes ten minutes, so the table is kept, and
made again for another version of timm. A test builds a few and holds the table current.
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import timm
import torchvision

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backbench.weights.families import architectures  # noqa: E402
from backbench.weights.families.architectures import IndexRow  # noqa: E402


def main() -> None:
    warnings.simplefilter("ignore")
    rows = [*timm_rows(), *torchvision_rows()]
    architectures.write(rows)
    print(f"{architectures.INDEX}: {len(rows)} networks")


def timm_rows() -> Iterator[IndexRow]:
    for name in sorted(timm.list_models()):
        try:
            yield architectures.of_timm(name)
        except Exception as error:
            # Some need a package that is not here, or cannot be built without memory.
            print(f"left out: timm's {name}: {error!r:.120}", file=sys.stderr)


def torchvision_rows() -> Iterator[IndexRow]:
    for name in sorted(torchvision.models.list_models(module=torchvision.models)):
        yield architectures.of_torchvision(name)


if __name__ == "__main__":
    main()
