"""Reads the published formats of vision transformers and ConvNeXts (timm_formats.toml), with tests.

There, a model's key is its width and patch, with `+reg` for register tokens and `+glu` for a gated
MLP; a ConvNeXt's key is its width and the number of blocks in its third stage. A transformer's depth
is not part of it: a file that lacks a block is not a shallower model.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbench.weights.family import (
    Format,
    FormatTest,
    Tables,
    TrunkInFile,
    format_row,
    in_file,
)


def _with(*ends: str, without: tuple[str, ...] = ()) -> FormatTest:
    """Make a test that every trunk has a name with one of these ends, and none that ends as in
    `without`."""

    def test(tables: Tables, trunks: list[TrunkInFile]) -> bool:
        for trunk in trunks:
            names = [key for key in tables[trunk.table] if key.startswith(trunk.prefix)]
            if ends and not any(name.endswith(ends) for name in names):
                return False
            if without and any(name.endswith(without) for name in names):
                return False
        return True

    return test


_SCALES = ("ls1.gamma", "gamma_1", "lambda1", "ls2.gamma", "gamma_2")
REGISTERS = ("reg_token", "register_tokens", "storage_tokens")
_HEADS = (
    "head.weight",
    "head.bias",
    "fc_norm.weight",
    "norm_pre.weight",
    "attn_pool.latent",
)
_plain = _with(without=(*_SCALES, *REGISTERS, *_HEADS))


def _fixed_positions(tables: Tables, trunk: TrunkInFile) -> bool:
    """Return True for MoCo-v3's and MAE's fixed positions, in which the class token's is 0."""
    position = tables[trunk.table].get(f"{trunk.prefix}pos_embed")
    if position is None or position.dim() != 3 or not position.numel():
        return False
    if not in_file(position):
        return False
    return not bool((position[0, 0] != 0).any())


def _said(method: str) -> FormatTest:
    """Make a test for ViTs whose files have no mark of their authors: `--method` must tell it, unless
    the file is of a training run, with its teacher and student."""

    def test(tables: Tables, trunks: list[TrunkInFile]) -> bool:
        for trunk in trunks:
            marked = trunk.table in ("teacher", "student")
            if not marked and trunk.metadata.method != method:
                return False
            if not marked and _fixed_positions(tables, trunk):
                return False
        return _plain(tables, trunks)

    return test


def _mae(tables: Tables, trunks: list[TrunkInFile]) -> bool:
    """Return True for MAE's files: their marks are a decoder or fixed positions, or else `--method
    mae`."""
    for trunk in trunks:
        decoder = any(key.startswith("decoder_") for key in tables[trunk.table])
        marked = decoder or _fixed_positions(tables, trunk)
        if not marked and trunk.metadata.method != "mae":
            return False
    return _plain(tables, trunks)


def _format(
    name: str, row: dict[str, Any], models: Mapping[str, Mapping[str, str]]
) -> Format:
    """Make a Format of a row. It has timm's own names unless the row says others, and a test by the
    ends of names where the row has `has` or `lacks`."""
    row = {"dialects": ["timm's"], **row}
    for table in row.pop("models", ()):
        row["timm"] = row.get("timm", {}) | models[table]
    # TOML has only text as keys.
    readings = row.get("readings", {})
    row["readings"] = {int(width): reading for width, reading in readings.items()}
    tests = {"plain": _plain, "mae": _mae, "said": _said(row["method"])}
    has = row.pop("has", ())
    lacks = row.pop("lacks", ())
    if has or lacks:
        row["test"] = "ends"
        tests["ends"] = _with(*has, without=tuple(lacks))
    return format_row(name, row, tests)


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TIMM_FORMATS = tuple(
    _format(name, row, _FILE["models"]) for name, row in _FILE["formats"].items()
)
TIMM = _format("timm", _FILE["timm"], {})
