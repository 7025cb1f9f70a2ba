"""Recipes: small YAML files with `base:` inheritance and `a.b=c` overrides, read into frozen
dataclasses.

A dataclass field may hold another dataclass, a tuple of them, or -- where one key chooses the type,
as `method.name` does -- a class found by the `choose` function in the field's metadata. Every
mistake is a BadInput that names the file or override, the key, and what was allowed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from backbench.errors import BadInput, nearest
from backbench.untrusted import opening, printable, yamls

T = TypeVar("T")
# As read: text, numbers, lists and groups of them; `build` gives it its types
Recipe = dict[str, Any]
Hint = Any  # a type annotation, of any kind that typing knows


# --- files ---


def configs_dir() -> Path:
    """Where the shipped recipes are: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_recipe(name: str | Path, kind: str) -> Path:
    """Return a recipe's path; `name` is a path, or a name under configs/<kind> (.yaml or not).

    The path of a variant is that of its family's file and its name: FILE.yaml/NAME.
    """
    path = Path(name)
    is_yaml = path.suffix in (".yaml", ".yml")
    if (is_yaml and path.is_file()) or (path.parent.suffix == ".yaml" and path.parent.is_file()):
        return path
    stem = str(name).removesuffix(".yaml")
    for beside in [configs_dir() / kind / stem, *([Path(stem)] if is_yaml else [])]:
        if (found := _file_or_variant(beside)) is not None:
            return found
    if path.is_file():
        raise BadInput(f"{path}: recipes are .yaml files; give one, or a name under configs/{kind}")
    hint = nearest(stem, recipe_names(kind))
    raise BadInput(f"no recipe '{name}' (neither a file nor a name under configs/{kind}); {hint}")


def recipe_names(kind: str) -> list[str]:
    """Return the names under configs/<kind>: of files and of variants. What begins with _ is a base
    only."""
    folder = configs_dir() / kind
    names = []
    for file in sorted(folder.rglob("*.yaml")):
        for name in (file.stem, *_variant_names(file)):
            if not name.startswith("_"):
                names.append((file.parent / name).relative_to(folder).as_posix())
    return names


def _file_or_variant(stem: Path) -> Path | None:
    """STEM.yaml, else the variant of that name in a family's file beside it."""
    file = stem.parent / f"{stem.name}.yaml"
    if file.is_file():
        return file
    if stem.parent.is_file():  # FILE.yaml/NAME already
        return stem
    for family in sorted(stem.parent.glob("*.yaml")):
        if stem.name in _variant_names(family):
            return family / stem.name
    return None


def _variant_names(file: Path) -> list[str]:
    """The names under the file's `variants:`."""
    try:
        # Most files are no families, which their text says in a thousandth of the time
        if b"\nvariants:" not in opening.read_bytes(file, most=yamls.LARGEST):
            return []
    except OSError:
        return []
    return list(_variants(file))


def _variants(file: Path) -> dict[str, Recipe]:
    """The file's `variants:`, name -> keys."""
    found = read_yaml(file, trusted=True).get("variants", {})
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise BadInput(f"{file}: `variants:` must map each name to its keys")
    return {str(name): keys for name, keys in found.items()}


def read_yaml(path: str | Path, *, trusted: bool = False) -> Recipe:
    """One YAML file as a plain dict (1e-4 is a number here, unlike in plain PyYAML).

    `${a.b}` is the value of that key of the file, and no other `${...}` is resolved. Text of
    several lines, and other control characters, only a `trusted` file may have (a cluster's set-up).
    """
    try:
        data = yamls.read(path)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except Exception as error:
        raise BadInput(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: expected `key: value` lines, found {type(data).__name__}")
    if not trusted and (found := printable.control_below(data)):
        raise BadInput(
            f"{path}: '{found[0]}' holds the control character {found[1]}; write it without"
        )
    return {str(k): v for k, v in data.items()}


def read_recipe(path: Path, *, trusted: bool = False) -> Recipe:
    """Read a recipe with its bases below it.

    `base:` is one name or a list, relative to the file, later over earlier. A file with `variants:`
    is a family: each variant is a recipe over what stands beside `variants:`. A base may also be a
    variant, of the same family or of one in the same folder.
    """
    return _whole(path.resolve(), (), {}, trusted=trusted)


def _whole(
    path: Path, seen: tuple[Path, ...], done: dict[Path, Recipe], *, trusted: bool
) -> Recipe:
    """A file over its bases; a variant over its bases, over its family's file."""
    above = _over_bases(path, seen, done, trusted=trusted)
    if not path.parent.is_file():
        return above
    shared = _over_bases(path.parent, (*seen, path), done, trusted=trusted)
    return merge(shared, above)


def _over_bases(
    path: Path, seen: tuple[Path, ...], done: dict[Path, Recipe], *, trusted: bool
) -> Recipe:
    """The keys of a file, or of a variant without its family's, over its bases.

    `done` has what was read on the way: what many name is read once.
    """
    if path in done:
        return done[path]
    if path in seen:
        circle = " -> ".join(p.name for p in (*seen, path))
        raise BadInput(f"{path}: `base:` goes in a circle: {circle}")
    family = path.parent if path.parent.is_file() else None
    own = read_yaml(family or path, trusted=trusted)
    if family is None:
        own.pop("variants", None)
    else:
        variants = _variants(family)
        if path.name not in variants:
            raise BadInput(f"{family}: no variant '{path.name}'; {nearest(path.name, variants)}")
        own = variants[path.name]
    bases = own.pop("base", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list):
        raise BadInput(f"{path}: `base:` must be a name or a list of names, not {bases!r}")
    out: Recipe = {}
    for base in bases:
        stem = (family or path).parent / str(base).removesuffix(".yaml")
        file = _file_or_variant(stem)
        if file is None:
            raise BadInput(f"{path}: base '{base}' is not there (looked for {stem}.yaml)")
        file = file.resolve()
        # What the family shares lies below all of the variant already
        read = _over_bases if family is not None and file.parent == family else _whole
        out = merge(out, read(file, (*seen, path), done, trusted=trusted))
    done[path] = merge(out, own)
    return done[path]


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> Recipe:
    """`high` over `low`; mappings merge key by key, everything else is replaced."""
    out = dict(low)
    for key, value in high.items():
        below = out.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            out[key] = merge(below, value)
        else:
            out[key] = value
    return out


def apply_overrides(recipe: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """`a.b=c` strings over a recipe; the value is read as YAML, so `lr=1e-3`, `crops=[1,2]` and
    `x=null` work."""
    out = dict(recipe)
    for text in overrides:
        out = merge(out, copy.deepcopy(_override(text)))
    return out


@functools.lru_cache(maxsize=4096)
def _override(text: str) -> Recipe:
    """One `a.b=c` as nested mappings."""
    from omegaconf import OmegaConf

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"override '{text}': expected key=value, as in optim.lr=0.1")
    if found := printable.control_in(text):
        raise BadInput(f"override {ascii(text)[:80]} holds the control character {found}")
    try:
        yamls.check(value)
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
        yamls.refuse_long_numbers(tree)
    except Exception as error:
        raise BadInput(f"override '{text}': {' '.join(str(error).split())}") from None
    assert isinstance(tree, dict)
    return {str(k): v for k, v in tree.items()}


# --- types ---


def load(cls: type[T], recipe: str | Path, overrides: Sequence[str] = (), *, kind: str) -> T:
    """Read a recipe by name or path into the frozen dataclass `cls`."""
    path = find_recipe(recipe, kind)
    return build(cls, apply_overrides(read_recipe(path), overrides), where=str(path))


def build(cls: type[T], data: Mapping[str, Any], *, where: str) -> T:
    """A nested mapping as the dataclass `cls`; unknown, missing and mistyped keys are refused by
    name."""
    return _dataclass(cls, data, where, "")


def _dataclass(cls: type[T], data: object, where: str, path: str) -> T:
    """`data` as `cls`; `where` is the file and `path` the key that messages name."""
    if not isinstance(data, Mapping):
        raise BadInput(f"{where}: '{path or 'recipe'}' must be a group of keys, not {data!r}")
    # 1. Every key is known.
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in data:
        if key not in fields:
            raise BadInput(
                f"{where}: unknown key '{_join(path, str(key))}'; {nearest(str(key), fields)}"
            )
    # 2. Every field gets the value of its key, as its type; without a key its own default.
    values: dict[str, Any] = {}
    for name, field in fields.items():
        here = _join(path, name)
        if name in data:
            choose = field.metadata.get("choose")
            hint = choose(data[name], where, here) if choose else hints[name]
            values[name] = _value(hint, data[name], where, here)
        elif _needed(field):
            raise BadInput(f"{where}: key '{here}' is missing ({_type_name(hints[name])})")
    # 3. What fields must be together, the dataclass says itself.
    try:
        return cls(**values)
    except ValueError as error:  # a dataclass's own __post_init__ check
        group = f"{path}: " if path else ""
        raise BadInput(f"{where}: {group}{error}") from None


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(hint: Hint, value: Any, where: str, path: str) -> Any:
    """`value` as the type that `hint` says, or BadInput that names the key."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, value, where, path)
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    wrong = BadInput(f"{where}: '{path}' must be {_type_name(hint)}, not {value!r}")
    if origin in (typing.Union, types.UnionType):
        return _one_of(args, value, where, path, wrong)
    if origin is typing.Literal:
        if value not in args:
            raise BadInput(f"{where}: '{path}' is {value!r}; {nearest(str(value), map(str, args))}")
        return value
    if origin is tuple:
        return _tuple(args, value, where, path, wrong)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise wrong
        return {str(k): _value(args[1], v, where, _join(path, str(k))) for k, v in value.items()}
    return _scalar(hint, value, wrong)


def _one_of(args: tuple[Hint, ...], value: Any, where: str, path: str, wrong: BadInput) -> Any:
    """A union: the first of its types that takes the value."""
    if value is None:
        if type(None) in args:
            return None
        raise wrong
    # With one type its own message is the better one: it names the key below
    choices = [arg for arg in args if arg is not type(None)]
    for arg in choices:
        try:
            return _value(arg, value, where, path)
        except BadInput as error:
            inner = error
    raise wrong if len(choices) > 1 else inner


def _tuple(args: tuple[Hint, ...], value: Any, where: str, path: str, wrong: BadInput) -> Any:
    if not isinstance(value, list | tuple):
        raise wrong
    if len(args) == 2 and args[1] is Ellipsis:  # tuple[X, ...]
        args = (args[0],) * len(value)
    if len(value) != len(args):
        raise wrong
    pairs = enumerate(zip(args, value))
    return tuple(_value(arg, each, where, f"{path}[{i}]") for i, (arg, each) in pairs)


def _scalar(hint: Hint, value: Any, wrong: BadInput) -> Any:
    # bool is an int to Python, but `epochs: true` is a mistake
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number:
        return float(value)
    if hint is float and value in ("inf", "infinity"):
        return math.inf
    if hint is int and number and isinstance(value, int):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise wrong


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


_PLAIN_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _type_name(hint: Hint) -> str:
    if hint in _PLAIN_NAMES:
        return _PLAIN_NAMES[hint]
    if typing.get_origin(hint) is tuple:
        return "a list"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_type_name, typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if hint is type(None):
        return "null"
    if dataclasses.is_dataclass(hint) or typing.get_origin(hint) in (dict, Mapping):
        return "a group of keys"
    return str(getattr(hint, "__name__", hint) if isinstance(hint, type) else hint)


# --- back to plain values ---


def to_dict(config: Any) -> Recipe:
    """The dataclass as plain YAML-able values."""
    return json.loads(json.dumps(dataclasses.asdict(config)).replace("Infinity", '"inf"'))


def to_yaml(config: Any) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def fingerprint(value: Any) -> str:
    """12 hex digits that name a configuration (or any JSON-able value): equal exactly when the
    values are."""
    plain = to_dict(value) if dataclasses.is_dataclass(value) else value
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]
