"""Result: one measured number, and how a line of results.jsonl becomes one.

A line may come from anybody, so only `parse` makes a Result of it. Pydantic names the key that is
wrong; whoever holds a Result trusts its types.
"""

import contextlib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    StrictFloat,
    StrictInt,
    StrictStr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict

from backbench.errors import BadInput, nearest
from backbench.tasks import TASKS
from backbench.untrusted import jsons, printable

SCHEMA: Literal[1] = 1
LARGEST = 1e12  # of a value: no percentage, no spectrum comes near

# ---- the types of a line's keys

# The same characters as in untrusted/printable.py: they change what a terminal shows, or where a
# line ends. Lone surrogates are no text for pydantic.
_NO_CONTROLS = r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$"


def _text(longest: int) -> Any:
    return StringConstraints(max_length=longest, pattern=_NO_CONTROLS)


def _finite(value: object) -> object:
    """JSON has no nan: a number that is not finite is undefined."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _inside_the_run(path: str) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError("it lies outside of the run folder")
    return path


# A run's numbers share their command, so it is split once.
_words = functools.lru_cache(maxsize=65536)(printable.of_command)


def _command(command: str | list[str]) -> str | list[str]:
    try:
        if isinstance(command, str):
            _words(command)
    except ValueError as error:
        raise ValueError(f"it is no command line ({error})") from None
    return command


# Names become columns, headings and parts of files' names, which may have 255 bytes.
Name = Annotated[StrictStr, _text(120)]
LongName = Annotated[StrictStr, _text(300)]
Text = Annotated[StrictStr, _text(4096)]
Whole = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[StrictFloat, Field(ge=-LARGEST, le=LARGEST)]
Percent = Annotated[Number | None, BeforeValidator(_finite)]
Argument = Annotated[StrictStr, _text(1 << 20)]
Command = Annotated[Argument | list[Argument], AfterValidator(_command)]
Path = Annotated[StrictStr, _text(300), AfterValidator(_inside_the_run)]
Group = dict[str, Any]  # nested JSON of any shape


class RecordedTrunk(TypedDict, total=False):
    """Parameters and multiply-adds of the trunk that was measured (weights/trunk_facts.py)."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    parameters: Annotated[StrictInt, Field(ge=0, lt=10**12)]
    side: Annotated[StrictInt, Field(ge=1, lt=10**6)]
    sides: list[Annotated[StrictInt, Field(ge=1, lt=10**6)]]  # of a detector's images
    gflops: Annotated[Number, Field(ge=0)] | None


class RecordedSize(TypedDict, total=False):
    """Sides of images in pixels (weights/own_size.py); `from` says who knows `trained`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    measured: Annotated[StrictInt, Field(ge=1, lt=10**6)]
    trained: Annotated[StrictInt, Field(ge=1, lt=10**6)] | None  # None: nobody says


class Provenance(TypedDict, total=False):
    """The keys of a result's provenance that the board reads; all others may hold anything."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    recipe: Group | None  # the resolved protocol
    predictions: Path  # relative to the run folder
    scores: Path
    per_class: Path
    picture: Path
    command: Command | None
    trunk: RecordedTrunk | None
    size: RecordedSize | None
    pretraining: Group
    trained_on: list[Name]  # DATASET or DATASET:SPLIT, of the trunk
    # The lists of images. A probe has `manifests` and `images` of its splits; a detector has
    # `train` and `val` as "coco_2017_val:<sha256>:5000"; `analyze` has `manifest`.
    manifests: dict[str, StrictStr | None]
    images: dict[str, StrictInt | None] | StrictInt
    train: StrictStr
    val: StrictStr  # or, for a probe: "official", "held out of train"
    manifest: StrictStr
    labelled: StrictStr | None
    # The digest of all images that were scored (`images.contents.whole`)
    image_contents: StrictStr | None
    # By split, and under `image_contents`: the same digests with the images in the order of paths
    in_path_order: dict[str, StrictStr]


class Origin(TypedDict, total=False):
    """Where and when a number was made."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    command: Command
    cwd: Text
    code: Text  # commit or version
    versions: Mapping[str, str]
    hardware: Text
    recorded: Number  # seconds since 1970, UTC
    verified: int  # a level of `verification`, filled when a board reads the line
    images_per_second: Number  # through the frozen trunk alone, on this hardware
    # Merged records only (backbench merge): the lab, and who else measured this number
    lab: Text
    also: list[dict[str, object]]


# ---- the line


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One number with all that must be known to compare it, in percent where the metric is. Two
    results are equal when all but their origin is."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    checkpoint: Name  # the digest
    name: LongName
    method: LongName
    arch: LongName
    epochs: Annotated[Whole, Field(ge=0)] | None
    task: Name
    dataset: Name
    split: Name
    metric: Name
    value: Percent  # None means undefined (an AP with no ground truth)
    ci95: tuple[Number, Number] | None = None
    protocol: Name
    engine: Annotated[StrictStr, _text(60)] | None = None
    seed: Whole = 0
    # What was selected on validation data, and on which split
    chosen: (
        Annotated[Mapping[str, object], GetPydanticSchema(lambda _, to: to(Group))]
        | None
    ) = None
    # What is needed to repeat the number; `facts` is the same with the types of the keys
    provenance: Annotated[
        Mapping[str, object], GetPydanticSchema(lambda _, to: to(Provenance))
    ] = field(default_factory=dict)
    # Filled by `store.append`
    origin: Origin = field(default_factory=Origin, compare=False)
    schema: Literal[1] = SCHEMA

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise BadInput(
                f"result with unknown task '{self.task}'; {nearest(self.task, TASKS)}"
            )
        # JSON has no nan: what is not finite is undefined. `frozen` is for everybody after this.
        if self.value is not None and not math.isfinite(self.value):
            object.__setattr__(self, "value", None)
        if self.ci95 is not None and not all(map(math.isfinite, self.ci95)):
            object.__setattr__(self, "ci95", None)

    @property
    def facts(self) -> Provenance:
        """The provenance, with the types of the keys that the board reads."""
        return cast(Provenance, self.provenance)

    @property
    def column(self) -> str:
        """The leaderboard column this number belongs to: task/dataset/metric@protocol[+engine]."""
        engine = f"+{printable.part(self.engine)}" if self.engine else ""
        what = "/".join(map(printable.part, (self.task, self.dataset, self.metric)))
        return f"{what}@{printable.part(self.protocol)}{engine}"


_LINE: TypeAdapter[Result] = TypeAdapter(Result)
# How a line ends that `store.append` wrote. Its keys are sorted, and no bracket stands behind this
# schema, so it is the line's own.
_WRITTEN_END = re.compile(rb'"schema": 1, "seed": [^][{}]*\}\s*')
_MESSAGES = {"string_pattern_mismatch": "it holds a control character"}


def parse_line(line: bytes) -> Result:
    """Return a line of JSON as a Result. BadInput names the first key that is wrong, ValueError
    says why it is no JSON.

    pydantic reads a line of `store.append` without making a dict of it, in two thirds of the time of
    `parse`. What it refuses is left to `parse`, which says why, as are lines of other writers.
    """
    begin = line.rfind(b'"schema"')
    as_written = begin >= 0 and _WRITTEN_END.fullmatch(line, begin)
    if as_written and jsons.is_bounded(line):
        with contextlib.suppress(ValidationError):
            return _LINE.validate_json(line)
    return parse(jsons.decode_line(line))


def parse(data: object) -> Result:
    """Return a decoded line of JSON as a Result. BadInput names the first key that is wrong."""
    if not isinstance(data, dict):
        raise BadInput(f"a {type(data).__name__}, not a result")
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        shown = printable.shown(str(schema), 20)
        raise BadInput(
            f"result of schema {shown}, not counted; this version reads {SCHEMA}"
        )
    try:
        return _LINE.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    message = _MESSAGES.get(first["type"]) or first["msg"]
    raise BadInput(f"'{key}' is {printable.shown(repr(first['input']), 60)}: {message}")
