"""Reads recipes (small YAML files with `base:` inheritance) and `a.b=c` overrides into frozen
dataclasses by pydantic. A mistake is a one-line BadInput: where, key, value, what is allowed."""

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


# --- files ---


def configs_dir() -> Path:
    """Where the shipped recipes are: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_recipe(name: str | Path, kind: str) -> Path:
    """Find a recipe by path or by name under configs/<kind>; a variant's path is FILE.yaml/NAME."""
    path = Path(name)
    is_yaml = path.suffix in (".yaml", ".yml")
    if (is_yaml and path.is_file()) or (
        path.parent.suffix == ".yaml" and path.parent.is_file()
    ):
        return path
    stem = str(name).removesuffix(".yaml")
    for beside in [configs_dir() / kind / stem, *([Path(stem)] if is_yaml else [])]:
        if (found := _file_or_variant(beside)) is not None:
            return found
    if path.is_file():
        raise BadInput(
            f"{path}: recipes are .yaml files; give one, or a name under configs/{kind}"
        )
    hint = nearest(stem, recipe_names(kind))
    raise BadInput(
        f"no recipe '{name}' (neither a file nor a name under configs/{kind}); {hint}"
    )


def recipe_names(kind: str) -> list[str]:
    """Return the names of files and variants in configs/<kind>, but for bases (_NAME)."""
    folder = configs_dir() / kind
    names = []
    for file in sorted(folder.rglob("*.yaml")):
        for name in (file.stem, *_variant_names(file)):
            if not name.startswith("_"):
                names.append((file.parent / name).relative_to(folder).as_posix())
    return names


def first_sentence(recipe: Path) -> str:
    """Return the first sentence above a recipe (file's start, or a variant's comment), or ''."""
    file, variant = (recipe, None) if recipe.is_file() else (recipe.parent, recipe.name)
    comment: list[str] = []
    for line in file.read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
        elif variant is None or text == f"{variant}:":
            break
        else:
            comment = []
    return re.split(r"(?<=[.;]) ", " ".join(comment), maxsplit=1)[0].rstrip(".;")


def _file_or_variant(stem: Path) -> Path | None:
    """STEM.yaml, else the variant of that name in a family's file beside it."""
    file = stem.parent / f"{stem.name}.yaml"
    if file.is_file():
        return file
    if stem.parent.is_file():  # FILE.yaml/NAME already
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


def _variant_names(file: Path, word: str = "") -> list[str]:
    """The names under the file's `variants:`; none of a file that does not contain `word`."""
    try:
        text = opening.read_bytes(file, most=yamls.LARGEST)
    except OSError:
        return []
    # Most files are no families, which their text says in a thousandth of the time
    if b"\nvariants:" not in text or word.encode(errors="replace") not in text:
        return []
    return list(_variants(file, trusted=True))


def _variants(file: Path, *, trusted: bool) -> dict[str, Recipe]:
    """The file's `variants:`, name -> keys."""
    found = read_yaml(file, trusted=trusted).get("variants", {})
    if not isinstance(found, dict) or not all(
        isinstance(v, dict) for v in found.values()
    ):
        raise BadInput(f"{file}: `variants:` must map each name to its keys")
    return {str(name): keys for name, keys in found.items()}


def read_yaml(path: str | Path, *, trusted: bool = False) -> Recipe:
    """Read YAML as a dict (1e-4 is a number); only `trusted` files may hold control characters."""
    try:
        data = yamls.read(path)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not readable as YAML: {error}") from None
    data = {} if data is None else data  # an empty file
    if not isinstance(data, dict):
        raise BadInput(
            f"{path}: expected `key: value` lines, found {type(data).__name__}"
        )
    if not trusted and (found := printable.control_below(data)):
        raise BadInput(
            f"{path}: '{found[0]}' holds the control character {found[1]}; leave it out"
        )
    return {str(k): v for k, v in data.items()}


def read_recipe(path: Path, *, trusted: bool = False, base_key: str = "base") -> Recipe:
    """Read a recipe over its bases. `base:` is one name or a list, relative to the file, later over
    earlier. A file with `variants:` is a family: each is a recipe over what stands beside
    `variants:`. A base is a variant of the same family, a file, or a variant of another family in
    the file's folder or in configs/transfer."""
    return _Bases(base_key, trusted).whole(path.resolve(), ())


def read_detector(path: Path) -> Recipe:
    """Read a file in Detectron2's dialect, YAML over `_BASE_`: MODEL.RPN.NMS_THRESH -> 0.7."""
    return flat(read_recipe(path, base_key="_BASE_"))


def flat(tree: Mapping[str, Value], prefix: str = "") -> Recipe:
    """{"MODEL": {"MASK_ON": True}} -> {"MODEL.MASK_ON": True}."""
    out: Recipe = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


class _Bases:
    """Reads a recipe over its bases, each file and variant once, however many name it."""

    def __init__(self, key: str, trusted: bool) -> None:
        self.key = key  # of the bases
        self.trusted = trusted
        self.done: dict[Path, Recipe] = {}

    def whole(self, path: Path, seen: tuple[Path, ...]) -> Recipe:
        """A file over its bases; a variant over its bases, over its family's file."""
        above = self.over_bases(path, seen)
        if not path.parent.is_file():
            return above
        shared = self.over_bases(path.parent, (*seen, path))
        return merge(shared, above)

    def over_bases(self, path: Path, seen: tuple[Path, ...]) -> Recipe:
        """The keys of a file, or of a variant without its family's, over its bases."""
        if path in self.done:
            return self.done[path]
        if path in seen:
            circle = " -> ".join(p.name for p in (*seen, path))
            raise BadInput(f"{path}: `{self.key}:` goes in a circle: {circle}")
        family = path.parent if path.parent.is_file() else None
        variants: dict[str, Recipe] = {}
        if family is None:
            own = read_yaml(path, trusted=self.trusted)
            own.pop("variants", None)
        else:
            variants = _variants(family, trusted=self.trusted)
            if path.name not in variants:
                raise BadInput(
                    f"{family}: no variant '{path.name}'; {nearest(path.name, variants)}"
                )
            own = variants[path.name]
        bases = own.pop(self.key, [])
        if isinstance(bases, str):
            bases = [bases]
        if not isinstance(bases, list):
            raise BadInput(
                f"{path}: `{self.key}:` must be a name or a list of names, not {bases!r}"
            )
        out: Recipe = {}
        for base in map(str, bases):
            if family is not None and base in variants:
                # What the family shares lies below all of the variant already
                out = merge(out, self.over_bases(family / base, (*seen, path)))
                continue
            name = Path(base.removesuffix(".yaml")).expanduser()
            stem = (family or path).parent / name
            shipped = (
                configs_dir() / "transfer" / name
            )  # for a recipe of one's own, anywhere
            file = _file_or_variant(stem)
            if file is None or file.resolve() == path:
                file = _file_or_variant(shipped) or file
            if file is None:
                raise BadInput(
                    f"{path}: base '{base}' is not there (looked for {stem}.yaml and {shipped}.yaml)"
                )
            out = merge(out, self.whole(file.resolve(), (*seen, path)))
        self.done[path] = merge(out, own)
        return self.done[path]


def merge(low: Mapping[str, Value], high: Mapping[str, Value]) -> Recipe:
    """`high` over `low`; mappings merge key by key, everything else is replaced."""
    out = dict(low)
    for key, value in high.items():
        below = out.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            out[key] = merge(below, value)
        else:
            out[key] = value
    return out


def apply_overrides(recipe: Mapping[str, Value], overrides: Sequence[str]) -> Recipe:
    """A recipe with `a.b=c` strings over it; values are YAML: `lr=1e-3`, `x=[1,2]`, `x=null`."""
    out = dict(recipe)
    for text in overrides:
        key, equals, value = text.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise BadInput(f"override '{text}': expected key=value, as in optim.lr=0.1")
        if found := printable.control_in(text):
            raise BadInput(
                f"override {ascii(text)[:80]} holds the control character {found}"
            )
        try:
            tree = yamls.decode(value)
        except ValueError as error:
            raise BadInput(f"override '{text}': {error}") from None
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
    return build(cls, apply_overrides(read_recipe(path), overrides), where=str(path))


def build(cls: type[T], data: Mapping[str, Value], *, where: str) -> T:
    """Make the dataclass `cls` of nested plain values, strictly: unknown, missing and mistyped keys
    are refused by name. `where` is the file that messages name."""
    from pydantic import ValidationError

    try:
        return _parse(cls, data)
    except ValidationError as error:
        raise BadInput(f"{where}: {_first_mistake(error, cls, data)}") from None


@dataclasses.dataclass(frozen=True)
class ChosenBy:
    """`Annotated[Base, ChosenBy(choose)]`: the field's type is the class that `choose` finds by a
    key of the group, as `method.name`. `choose` raises ValueError where it has no class."""

    choose: Callable[[Value], type]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Value:
        from pydantic_core import core_schema

        def parse(data: Value) -> object:
            return _parse(self.choose(data), data)

        return core_schema.no_info_plain_validator_function(parse)


@functools.cache
def _adapter(cls: Hashable) -> TypeAdapter[tuple[Value]]:
    from pydantic import ConfigDict, TypeAdapter

    # The tuple's configuration holds for all dataclasses in it, which have none of their own
    alone: Hint = types.GenericAlias(tuple, (cls,))
    return TypeAdapter(alone, config=ConfigDict(extra="forbid", strict=True))


def _parse(cls: type[T], data: Value) -> T:
    """Plain values as `cls`, or pydantic's ValidationError."""
    from pydantic import ValidationError

    adapter = _adapter(cls)  # type: ignore[arg-type]

    # Strict JSON is what a recipe means: a list may be a tuple, 3 a float, and true is no number
    try:
        return adapter.validate_json(json.dumps([data]))[0]
    except ValidationError as error:
        # JSON and YAML 1.1 have no word for infinity: "inf" is a number where one is wanted
        wrong = [e["loc"] for e in error.errors() if e["input"] in ("inf", "infinity")]
        if not wrong:
            raise
        changed = copy.deepcopy(data)
        for place in wrong:
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
    """One line about the first mistake: the key, the value and what is allowed."""
    mistakes = error.errors(include_url=False)
    # A misspelt key first: it explains the one that is missing
    first = next(
        (e for e in mistakes if e["type"] == "unexpected_keyword_argument"), mistakes[0]
    )
    if first["type"] == "json_invalid":  # half a character, which JSON cannot write
        return "holds text that is no text"
    keys = _keys_of(first["loc"], data)
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)[
        1:
    ]
    kind, missing = first["type"], first["loc"][-1]
    if kind == "unexpected_keyword_argument":
        return f"unknown key '{path}'; {nearest(str(keys[-1]), _fields_at(cls, data, keys))}"
    if kind == "missing" and isinstance(missing, str):
        return f"key '{path}.{missing}' is missing".replace("'.", "'")
    if kind == "value_error":  # a dataclass's own check, or `choose`
        said = str(first["ctx"]["error"])
        return f"{path}: {said}" if path else said
    allowed: list[str] = []
    for each in mistakes:  # a union has one for each of its types
        if _keys_of(each["loc"], data) == keys:
            expected = each.get("ctx", {}).get("expected")
            said = each["msg"].removeprefix("Input should be ")
            allowed.append(expected or _ALLOWED.get(each["type"], said))
    if kind == "literal_error" and len(allowed) == 1:
        values = allowed[0].replace("'", "").replace(" or ", ", ").split(", ")
        return f"'{path}' is {first['input']!r:.200}; {nearest(str(first['input']), values)}"
    wanted = " or ".join(allowed)
    return f"'{path or 'recipe'}' must be {wanted}, not {first['input']!r:.200}"


def _keys_of(place: Sequence[str | int], data: Value) -> list[str | int]:
    """pydantic's place of a mistake as the keys that lead to it, without its words for types."""
    keys: list[str | int] = []
    for part in place[1:]:  # the first is the tuple of `_adapter`
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
    """The names that the last of `keys` may be, with the type `hint` for all of `data`."""
    for depth in range(len(keys)):
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            hint = next(arg for arg in args if arg is not type(None))
            origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated and isinstance(args[1], ChosenBy):
            hint = args[1].choose(data)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            hints = typing.get_type_hints(hint, include_extras=True)
            if depth == len(keys) - 1:
                return [field.name for field in dataclasses.fields(hint) if field.init]
            hint = hints[str(keys[depth])]
        else:  # dict[str, X] or tuple[X, ...]
            hint = args[1] if origin is dict else args[0]
        data = data[keys[depth]]
    return []


# --- back to plain values ---


def to_dict(config: Value) -> Recipe:
    """The dataclass as plain YAML-able values."""
    return json.loads(
        json.dumps(dataclasses.asdict(config)).replace("Infinity", '"inf"')
    )


def to_yaml(config: Value) -> str:
    return yamls.encode(to_dict(config))


def fingerprint(value: object) -> str:
    """12 hex digits of any JSON-able value, equal exactly when the values are."""
    plain = to_dict(value) if dataclasses.is_dataclass(value) else value
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]
