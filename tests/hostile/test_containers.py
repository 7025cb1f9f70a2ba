"""Containers changed, cut and exchanged at seeded places: a line, or images; nothing is run."""

import random
import resource

import pytest
from support.containers import LAYOUTS
from support.layouts import class_folder

from backbench.containers import finding, reading, spans
from backbench.errors import BadInput

# Layout -> how many files in the fast suite, and in the whole one
CASES = {"tar": (8, 30), "wds": (6, 30), "zip": (6, 30), "deflated": (6, 30)}
CASES |= {
    "parquet of 2023": (3, 30),
    "parquet of 2025": (3, 20),
    "parquet of 2026": (3, 20),
}
CASES |= {"arrow": (3, 30), "lmdb": (3, 80)}


def mutated(data, draw):
    """Another file of these bytes: a few changed, some doubled or removed, or the end cut off."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 10])):
        at = draw.randrange(len(data))
        # Headers and directories stand at the beginning and at the end.
        at = draw.choice([at, at % 600, len(data) - 1 - at % 600])
        way = draw.randrange(6)
        if way < 3:
            data[at] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        elif way == 3:
            order = draw.choice(["little", "big"])
            data[at : at + 8] = (1 << draw.randrange(64)).to_bytes(8, order)
        elif way == 4:
            other = draw.randrange(len(data))
            size = draw.choice([1, 8, 512])
            data[at : at + size] = data[other : other + size]
        elif len(data) > 2000:
            del data[draw.choice([at, len(data) - at % 2000]) :]
            data = data or bytearray(b"x")
    return bytes(data)


def look(base):
    """Read all that can be read; True if the container could be opened. A BadInput has one line."""
    try:
        images = reading.read_split(base, "train")
        for index in range(len(images)):
            try:
                images.array(index)
            except BadInput as error:
                assert "\n" not in str(error)
    except BadInput as error:
        assert "\n" not in str(error) and str(base) in str(error)
        return False
    return True


@pytest.mark.parametrize(
    ("layout", "first", "last"),
    [
        *((layout, 0, fast) for layout, (fast, _) in CASES.items()),
        *(
            pytest.param(layout, fast, whole, marks=pytest.mark.slow)
            for layout, (fast, whole) in CASES.items()
        ),
    ],
)
def test_a_mutated_container_is_a_line_or_images(tmp_path, layout, first, last):
    class_folder(tmp_path / "own", per=6)
    base = tmp_path / "packed"
    base.mkdir()
    LAYOUTS[layout](tmp_path / "own" / "train", base, "train")
    assert look(base)
    file = sorted(finding.find(base, "train").files)[0]
    whole = file.read_bytes()
    before = resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss  # kB, with what tests before took
    for seed in range(first, last):
        file.write_bytes(mutated(whole, random.Random(f"{layout} {seed}")))
        look(base)
        spans._open_container.cache_clear()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
