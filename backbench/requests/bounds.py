"""Says how large and how small numbers may be, on the command line and in recipes.

A bound is far above what anybody wants. It stops a slip of the hand, such as a side of 1000000
pixels, in the first second; without it the machine would compute for minutes, or run out of memory,
before a line is printed.
"""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Interval

# A row of results keeps its seed in 64 bits
LEAST_SEED = -(2**63)
MOST_SEED = 2**63 - 1
MOST_SEEDS = 1000  # trainings that one command repeats
MOST_PROCESSES = 4096  # on one machine, or machines
MOST_WORKERS = 1024  # loader processes of one process
MOST_SIDE = 4096  # pixels of a picture that a trunk reads
# A detector reads few pictures at a time, which may be photographs from the air
MOST_DETECTION_SIDE = 20_000
MOST_BATCH = 2**20  # pictures or rows of features
MOST_REPEATS = 10_000  # views of one picture, draws, penalties
MOST_EPOCHS = 1_000_000
MOST = 10**9  # of whatever else is counted

Seed = Annotated[int, Interval(ge=LEAST_SEED, le=MOST_SEED)]
Count = Annotated[int, Interval(ge=1, le=MOST)]
CountOrNone = Annotated[int, Interval(ge=0, le=MOST)]  # where 0 is none of it
Several = Annotated[int, Interval(ge=2, le=MOST)]
Side = Annotated[int, Interval(ge=1, le=MOST_SIDE)]
Batch = Annotated[int, Interval(ge=1, le=MOST_BATCH)]
Repeats = Annotated[int, Interval(ge=1, le=MOST_REPEATS)]
Workers = Annotated[int, Interval(ge=0, le=MOST_WORKERS)]
Processes = Annotated[int, Interval(ge=1, le=MOST_PROCESSES)]

NotNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
