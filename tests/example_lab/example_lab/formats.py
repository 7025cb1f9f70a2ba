"""A checkpoint format: the trunk under `net.trunk.`, finished epochs in `done`."""

from backbench.images.preprocess import Pixels
from backbench.weights.formats import Format

OURS = Format(
    name="example lab",
    source="the lab's own trainer",
    method="spread",
    encoders={"trunk": (":net.trunk.",)},
    pixels=Pixels((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    epoch=("done", 0),
)
