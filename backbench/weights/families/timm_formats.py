"""The published formats of vision transformers and ConvNeXts (timm_formats.toml), and their tests.

A model's key is its width and patch, with `+reg` for register tokens, `+glu` for a gated MLP, and
for a ConvNeXt the width and the blocks of its third stage. Depth is not part of it: a file that
lacks a block is not a shallower model.
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
    """A test that names with one of these ends are in every trunk, and none with the others."""

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
    """True for MoCo-v3's and MAE's fixed positions, in which the class token's is 0."""
    position = tables[trunk.table].get(f"{trunk.prefix}pos_embed")
    if (
        position is None
        or position.dim() != 3
        or not position.numel()
        or not in_file(position)
    ):
        return False
    return not bool((position[0, 0] != 0).any())


def _said(method: str) -> FormatTest:
    """A test for a ViT that no mark in the file says whose it is: `--method` has to. A training
    run's teacher and student are such a mark."""

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
    """A decoder or fixed positions are MAE's marks; without them `--method mae` says it."""
    for trunk in trunks:
        decoder = any(key.startswith("decoder_") for key in tables[trunk.table])
        if (
            not decoder
            and not _fixed_positions(tables, trunk)
            and trunk.metadata.method != "mae"
        ):
            return False
    return _plain(tables, trunks)


def _format(
    name: str, row: dict[str, Any], models: Mapping[str, Mapping[str, str]]
) -> Format:
    """A row as a Format: timm's own names unless it says others, and a test by ends of names."""
    for table in row.pop("models", ()):
        row["timm"] = row.get("timm", {}) | models[table]
    row["readings"] = {
        int(width): word for width, word in row.get("readings", {}).items()
    }
    tests = {"plain": _plain, "mae": _mae, "said": _said(row["method"])}
    has, lacks = row.pop("has", ()), row.pop("lacks", ())
    if has or lacks:
        row["test"] = "ends"
        tests["ends"] = _with(*has, without=tuple(lacks))
    return format_row(name, {"dialects": ["timm's"]} | row, tests)


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TIMM_FORMATS = tuple(
    _format(name, row, _FILE["models"]) for name, row in _FILE["formats"].items()
)
TIMM = _format("timm", _FILE["timm"], {})
