"""Reads recipes into frozen dataclasses. A recipe is a small YAML file with `base:` inheritance.

On a command line, `a.b=c` overrides its values; pydantic checks the types. A mistake is a one-line
BadInput: the file, the key, the value, and what is allowed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from backbench.errors import BadInput, nearest
from backbench.untrusted import opening, printable, yamls

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
Value: TypeAlias = Any  # whatever YAML can say: text, numbers, lists and groups of them
Recipe: TypeAlias = dict[str, Value]  # as read; `build` gives it its types
Hint: TypeAlias = Any  # a type annotation, of any kind that typing knows

# A detector's config states the protocol of its numbers in a comment that begins so
STATES_PROTOCOL = "# protocol: "


# --- files ---


def configs_dir() -> Path:
    """Return the folder of the shipped recipes: in the installed package, or atop a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_recipe(name: str | Path, kind: str) -> Path:
    """Find a recipe by path or by name under configs/<kind>; a variant's path is FILE.yaml/NAME."""
    # 1. The path of a file or a variant
    path = Path(name)
    is_yaml = path.suffix in (".yaml", ".yml")
    if is_yaml and path.is_file():
        return path
    if path.parent.suffix == ".yaml" and path.parent.is_file():
        return path
    # 2. A name under configs/<kind>; or NAME.yaml, where NAME is a variant in a file beside it
    stem = str(name).removesuffix(".yaml")
    places = [configs_dir() / kind / stem]
    if is_yaml:
        places.append(Path(stem))
    for place in places:
        found = _file_or_variant(place)
        if found is not None:
            return found
    # 3. Neither
    if path.is_file():
        raise BadInput(
            f"{path}: recipes are .yaml files; give one, or a name under configs/{kind}"
        )
    hint = nearest(stem, recipe_names(kind))
    raise BadInput(
        f"no recipe '{name}' (neither a file nor a name under configs/{kind}); {hint}"
    )


def recipe_names(kind: str) -> list[str]:
    """List the files and variants in configs/<kind> by name, without bases (_NAME)."""
    return [name for name, _ in recipes(kind)]


def recipes(kind: str) -> list[tuple[str, Path]]:
    """List the same with their paths: finding one after the other reads all files each time."""
    folder = configs_dir() / kind
    found = []
    for file in sorted(folder.rglob("*.yaml")):
        variants = [(name, file / name) for name in _variant_names(file)]
        for name, path in [(file.stem, file), *variants]:
            if not name.startswith("_"):
                below = (file.parent / name).relative_to(folder)
                found.append((below.as_posix(), path))
    return found


def first_sentence(recipe: Path) -> str:
    """Return the first sentence of the comment above a recipe, or ''.

    It stands at the start of a file, or above the line `NAME:` of a variant."""
    is_file = recipe.is_file()
    file = recipe if is_file else recipe.parent
    comment: list[str] = []
    for line in file.read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
        elif is_file or text == f"{recipe.name}:":
            break
        else:
            comment = []
    sentences = re.split(r"(?<=[.;]) ", " ".join(comment), maxsplit=1)
    return sentences[0].rstrip(".;")


def _file_or_variant(stem: Path) -> Path | None:
    """Find STEM.yaml, else the variant of that name in a family's file beside it."""
    file = stem.parent / f"{stem.name}.yaml"
    if file.is_file():
        return file
    # FILE.yaml/NAME is a variant's path already
    if stem.parent.is_file():
        return stem
    families = []
    for other in sorted(stem.parent.glob("*.yaml")):
        if stem.name in _variant_names(other, stem.name):
            families.append(other)
    if len(families) > 1:
        raise BadInput(
            f"two families have a variant '{stem.name}': {families[0]}, {families[1]}"
        )
    return families[0] / stem.name if families else None


def _shipped(name: Path) -> Path | None:
    """Find the shipped protocol of this name, else the shipped pretraining recipe."""
    for kind in ("transfer", "pretrain"):
        file = _file_or_variant(configs_dir() / kind / name)
        if file is not None:
            return file
    return None


def _variant_names(file: Path, word: str = "") -> list[str]:
    """List the names under a file's `variants:`; none of a file that does not contain `word`."""
    try:
        text = opening.read_bytes(file, most=yamls.LARGEST)
    except OSError:
        return []
    # Most files are no families. Their text says so in a thousandth of the time that YAML takes
    if b"\nvariants:" not in text or word.encode(errors="replace") not in text:
        return []
    return list(_variants(file, read_yaml(file, trusted=True)))


def _variants(file: Path, content: Recipe) -> dict[str, Recipe]:
    """Return a file's `variants:`, name -> keys."""
    found = content.get("variants", {})
    if not isinstance(found, dict) or not all(
        isinstance(v, dict) for v in found.values()
    ):
        raise BadInput(f"{file}: `variants:` must map each name to its keys")
    return {str(name): keys for name, keys in found.items()}


def read_yaml(path: str | Path, *, trusted: bool = False) -> Recipe:
    """Read YAML as a dict (1e-4 is a number). Only `trusted` files may hold control characters."""
    try:
        text = yamls.text_of(path)
        data = yamls.decode(text)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not readable as YAML: {error}") from None
    if data is None:  # an empty file
        return {}
    if not isinstance(data, dict):
        raise BadInput(
            f"{path}: expected `key: value` lines, found {type(data).__name__}"
        )
    found = None if trusted else yamls.control_below(text, data)
    if found:
        key, character = found
        raise BadInput(
            f"{path}: '{key}' holds the control character {character}; leave it out"
        )
    return {str(key): value for key, value in data.items()}


def read_recipe(path: Path, *, trusted: bool = False, base_key: str = "base") -> Recipe:
    """Read a recipe over its bases.

    `base:` is one name or a list; of two bases the later one wins. A file with `variants:` is a
    family: each variant is a recipe over the keys that stand beside `variants:`. A base is a
    variant of the same family; or a file, or a variant of another family, by its path from the
    file's folder, from configs/transfer or from configs/pretrain."""
    return _Bases(base_key, trusted).whole(path.resolve(), ())


def read_detector(path: Path) -> Recipe:
    """Read a file in Detectron2's dialect, YAML over `_BASE_`: MODEL.RPN.NMS_THRESH -> 0.7."""
    return flat(read_recipe(path, base_key="_BASE_"))


def flat(tree: Mapping[str, Value], prefix: str = "") -> Recipe:
    """Flatten a tree: {"MODEL": {"MASK_ON": True}} -> {"MODEL.MASK_ON": True}."""
    out: Recipe = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


class _Bases:
    """Reads a recipe over its bases, each file once and each variant once, however many name it."""

    def __init__(self, key: str, trusted: bool) -> None:
        self.key = key  # under which a recipe names its bases
        self.trusted = trusted
        self.done: dict[Path, Recipe] = {}
        self.read: dict[Path, Recipe] = {}

    def whole(self, path: Path, seen: tuple[Path, ...]) -> Recipe:
        """Read a file over its bases; or a variant over its bases, all over its family's file.

        `seen` are the recipes that have this one as a base."""
        above = self.over_bases(path, seen)
        if not path.parent.is_file():
            return above
        shared = self.over_bases(path.parent, (*seen, path))
        return merge(shared, above)

    def over_bases(self, path: Path, seen: tuple[Path, ...]) -> Recipe:
        """Read the keys of a file, or of a variant without its family's, over its bases."""
        if path in self.done:
            return self.done[path]
        if path in seen:
            circle = " -> ".join(p.name for p in (*seen, path))
            raise BadInput(f"{path}: `{self.key}:` goes in a circle: {circle}")
        # 1. The recipe's own keys
        family = path.parent if path.parent.is_file() else None
        variants: dict[str, Recipe] = {}
        if family is None:
            own = dict(self.content(path))
            own.pop("variants", None)
        else:
            variants = _variants(family, self.content(family))
            if path.name not in variants:
                raise BadInput(
                    f"{family}: no variant '{path.name}'; {nearest(path.name, variants)}"
                )
            own = dict(variants[path.name])
        # 2. The names of its bases
        bases = own.pop(self.key, [])
        if isinstance(bases, str):
            bases = [bases]
        if not isinstance(bases, list):
            raise BadInput(
                f"{path}: `{self.key}:` must be a name or a list of names, not {bases!r}"
            )
        # 3. The bases, each over those before it, and the own keys over all
        out: Recipe = {}
        for base in map(str, bases):
            if family is not None and base in variants:
                # `whole` puts what the family shares below all of these, once
                out = merge(out, self.over_bases(family / base, (*seen, path)))
                continue
            name = Path(base.removesuffix(".yaml")).expanduser()
            beside = (family or path).parent / name
            # A recipe of one's own, anywhere, may name a shipped protocol or pretraining recipe, also
            # one of its own name
            file = _file_or_variant(beside)
            if file is None or file.resolve() == path:
                file = _shipped(name) or file
            if file is None:
                raise BadInput(
                    f"{path}: base '{base}' is not there (looked for {beside}.yaml, and under"
                    f" {configs_dir()} in transfer and pretrain)"
                )
            out = merge(out, self.whole(file.resolve(), (*seen, path)))
        self.done[path] = merge(out, own)
        return self.done[path]

    def content(self, file: Path) -> Recipe:
        """Read a file. Most bases of a variant stand in its own family."""
        if file not in self.read:
            self.read[file] = read_yaml(file, trusted=self.trusted)
        return self.read[file]


def merge(low: Mapping[str, Value], high: Mapping[str, Value]) -> Recipe:
    """Put `high` over `low`: mappings merge key by key, everything else is replaced."""
    out = dict(low)
    for key, value in high.items():
        below = out.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            out[key] = merge(below, value)
        else:
            out[key] = value
    return out


def apply_overrides(recipe: Mapping[str, Value], overrides: Sequence[str]) -> Recipe:
    """Put `a.b=c` strings over a recipe; values are YAML: `lr=1e-3`, `x=[1,2]`, `x=null`."""
    out = dict(recipe)
    for text in overrides:
        key, equals, value = text.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise BadInput(f"override '{text}': expected key=value, as in optim.lr=0.1")
        found = printable.control_in(text)
        if found:
            raise BadInput(
                f"override {ascii(text)[:80]} holds the control character {found}"
            )
        try:
            tree = yamls.decode(value)
        except ValueError as error:
            raise BadInput(f"override '{text}': {error}") from None
        # `a.b=c` becomes {a: {b: c}}, from the innermost name outwards
        for name in reversed(names):
            tree = {name: tree}
        out = merge(out, tree)
    return out


# --- types ---


def load(
    cls: type[T], recipe: str | Path, overrides: Sequence[str] = (), *, kind: str
) -> T:
    """Read a recipe by name or path into the frozen dataclass `cls`."""
    path = find_recipe(recipe, kind)
    data = apply_overrides(read_recipe(path), overrides)
    return build(cls, data, where=str(path), overrides=overrides)


def build(
    cls: type[T],
    data: Mapping[str, Value],
    *,
    where: str,
    overrides: Sequence[str] = (),
) -> T:
    """Make the dataclass `cls` of nested plain values.

    BadInput names an unknown, missing or mistyped key, and who wrote it: one of the `overrides`,
    or the file `where`."""
    from pydantic import ValidationError

    try:
        return _parse(cls, data)
    except ValidationError as error:
        mistake = _first_mistake(error, cls, data)
    # The last word for a key counts
    for text in reversed(overrides):
        key = text.partition("=")[0]
        if re.search(rf"'{re.escape(key)}['.\[]", mistake):
            where = f"override '{text[:80]}'"
            break
    raise BadInput(f"{where}: {mistake}")


@dataclasses.dataclass(frozen=True)
class ChosenBy:
    """Marks a field whose type depends on its value: `Annotated[Base, ChosenBy(choose)]`.

    `choose` finds the class by a key of the group (`method.name`, say), and raises ValueError where
    there is none."""

    choose: Callable[[Value], type]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Value:
        from pydantic_core import core_schema

        def parse(data: Value) -> object:
            return _parse(self.choose(data), data)

        return core_schema.no_info_plain_validator_function(parse)


@functools.cache
def _adapter(cls: Hashable) -> TypeAdapter[tuple[Value]]:
    from pydantic import ConfigDict, TypeAdapter

    # pydantic takes no configuration for a dataclass from outside, but for a tuple of it
    tuple_of_one: Hint = types.GenericAlias(tuple, (cls,))
    return TypeAdapter(tuple_of_one, config=ConfigDict(extra="forbid", strict=True))


def _parse(cls: type[T], data: Value) -> T:
    """Parse plain values as `cls`; pydantic's ValidationError where they do not fit."""
    from pydantic import ValidationError

    adapter = _adapter(cls)  # type: ignore[arg-type]
    # Strict JSON is what a recipe means: a list may be a tuple, 3 a float, and true is no number
    try:
        return adapter.validate_json(json.dumps([data]))[0]
    except ValidationError as error:
        infinite = [
            mistake["loc"]
            for mistake in error.errors()
            if mistake["input"] in ("inf", "infinity")
        ]
        if not infinite:
            raise
    # JSON and YAML 1.1 have no word for infinity: "inf" is a number where one is wanted
    changed = copy.deepcopy(data)
    for place in infinite:
        *groups, last = _keys_of(place, data)
        group = changed
        for key in groups:
            group = group[key]
        group[last] = math.inf
    return adapter.validate_json(json.dumps([changed]))[0]


# pydantic's types of errors -> what is allowed
_ALLOWED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "missing": "a longer list",
    "too_long": "a shorter list",
    "too_short": "a list that is not empty",
    "string_too_short": "text that is not empty",
    "dict_type": "a group of keys",
    "dataclass_type": "a group of keys",
}


def _first_mistake(error: ValidationError, cls: type, data: Value) -> str:
    """Say the first mistake in one line: the key, the value and what is allowed."""
    mistakes = error.errors(include_url=False)
    # A misspelt key comes first: it explains the one that is missing
    first = mistakes[0]
    for mistake in mistakes:
        if mistake["type"] == "unexpected_keyword_argument":
            first = mistake
            break
    kind = first["type"]
    if kind == "json_invalid":  # half a character, which JSON cannot write
        return "holds text that is no text"
    keys = _keys_of(first["loc"], data)
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        else:
            path += f".{key}" if path else str(key)
    if kind == "unexpected_keyword_argument":
        return f"unknown key '{path}'; {nearest(str(keys[-1]), _fields_at(cls, data, keys))}"
    missing = first["loc"][-1]
    if kind == "missing" and isinstance(missing, str):
        return (
            f"key '{path}.{missing}' is missing"
            if path
            else f"key '{missing}' is missing"
        )
    if kind == "value_error":  # a dataclass's own check, or `choose`
        said = str(first["ctx"]["error"])
        return f"{path}: {said}" if path else said
    # The value fits none of the types that it may have: each of them made a mistake of its own
    allowed: list[str] = []
    for mistake in mistakes:
        if _keys_of(mistake["loc"], data) == keys:
            expected = mistake.get("ctx", {}).get("expected")
            said = mistake["msg"].removeprefix("Input should be ")
            allowed.append(expected or _ALLOWED.get(mistake["type"], said))
    value = first["input"]
    if kind == "literal_error" and len(allowed) == 1:
        values = allowed[0].replace("'", "").replace(" or ", ", ").split(", ")
        return f"'{path}' is {value!r:.200}; {nearest(str(value), values)}"
    return f"'{path or 'recipe'}' must be {' or '.join(allowed)}, not {value!r:.200}"


def _keys_of(place: Sequence[str | int], data: Value) -> list[str | int]:
    """Return the keys of `data` that lead to a mistake. Pydantic's `place` of it also has names of
    types between them, which are left out."""
    keys: list[str | int] = []
    # The first part of a place is the index in the tuple of `_adapter`
    for part in place[1:]:
        if isinstance(data, Mapping):
            named = {str(key): value for key, value in data.items()}
            if part not in named:
                continue
            data = named[str(part)]
        elif (
            isinstance(data, list | tuple)
            and isinstance(part, int)
            and part < len(data)
        ):
            data = data[part]
        else:
            continue
        keys.append(part)
    return keys


def _fields_at(hint: Hint, data: Value, keys: Sequence[str | int]) -> list[str]:
    """List the names that the last of `keys` may be, where all of `data` has the type `hint`."""
    for depth, key in enumerate(keys):
        # 1. The type itself, without its bounds and without None
        hint = _bare(hint, data)
        # 2. One key further down
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if depth == len(keys) - 1:
                return [field.name for field in dataclasses.fields(hint) if field.init]
            hint = typing.get_type_hints(hint, include_extras=True)[str(key)]
        else:  # dict[str, X] or tuple[X, ...]
            args = typing.get_args(hint)
            hint = args[1] if typing.get_origin(hint) is dict else args[0]
        data = data[key]
    return []


def _bare(hint: Hint, data: Value) -> Hint:
    """Return X for X | None and for Annotated[X, ...]; of a type that depends on the value, the chosen
    class."""
    while True:
        origin = typing.get_origin(hint)
        args = typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            hint = next(arg for arg in args if arg is not type(None))
        elif origin is Annotated:
            choosers = [each for each in args[1:] if isinstance(each, ChosenBy)]
            hint = choosers[0].choose(data) if choosers else args[0]
        else:
            return hint


# --- back to plain values ---


def to_dict(config: Value) -> Recipe:
    """Return the dataclass as plain values, which JSON and YAML can say: infinity becomes "inf"."""
    text = json.dumps(dataclasses.asdict(config))
    return json.loads(text.replace("Infinity", '"inf"'))


def to_yaml(config: Value) -> str:
    return yamls.encode(to_dict(config))


def fingerprint(value: object) -> str:
    """Return 12 hex digits of any JSON-able value, equal exactly when the values are."""
    plain = to_dict(value) if dataclasses.is_dataclass(value) else value
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]
