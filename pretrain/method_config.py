"""Declares the part of a recipe under `method:`, and lists the methods.

It does not import torch, so that a recipe is checked before that is. Only the keys of the method
itself are checked later, as they stand in the method's file."""

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated

import backbench.pretrain.methods
from backbench import plugins
from backbench.errors import BadInput, nearest
from backbench.recipes.config import ChosenBy


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The part of a recipe under `method:`. Each method's file extends it as `Config`."""

    name: str


@functools.cache
def shipped_names() -> tuple[str, ...]:
    """List the methods that have a file in pretrain/methods. The folder is looked through once."""
    names = []
    for module in pkgutil.iter_modules(backbench.pretrain.methods.__path__):
        if not module.name.startswith("_"):
            names.append(module.name)
    return tuple(names)


def method_names() -> list[str]:
    """List the allowed values of `method.name`: shipped ones, and those of installed packages."""
    shipped = list(shipped_names())
    return shipped + plugins.names(plugins.METHODS, shipped)


def check_name(data: object) -> str:
    """Return the name in the group of keys `data`. Raise BadInput where it names no method."""
    names = method_names()
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str):
        raise BadInput(f"needs a name; allowed: {', '.join(names)}")
    if name not in names:
        raise BadInput(f"unknown method '{name}'; {nearest(name, names)}")
    return name


def method_module(name: str) -> ModuleType:
    """Import the method's module, which has a `Config` and a `Method`."""
    if name in shipped_names():
        return importlib.import_module(f"backbench.pretrain.methods.{name}")
    return plugins.load(plugins.METHODS, name, ModuleType)


def choose_config(data: object) -> type[MethodConfig]:
    """Return the Config class that `method.name` selects. Raise ValueError if it selects none."""
    try:
        return method_module(check_name(data)).Config
    except BadInput as error:
        raise ValueError(str(error)) from None


# The type of a recipe's `method`
AnyMethodConfig = Annotated[MethodConfig, ChosenBy(choose_config)]
