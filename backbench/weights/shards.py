"""Recognises a piece of weights that many processes or files hold together, and says how to make one
file of all pieces."""

import glob
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

# model-00001-of-00003.safetensors, pytorch_model-00001-of-00002.bin
_NUMBERED = re.compile(r"(.+)-\d{3,6}-of-(\d{3,6})\.(safetensors|bin|pt|pth)")
_DEEPSPEED = re.compile(r"(.*zero_pp_rank_\d+_)?mp_rank_\d+.*\.pt")
# FSDP's names of what it has flattened, in its two versions
_FLAT = re.compile(r"(^|\.)_?flat_param(_\d+)?$")
_IN_ONE_FILE = "and import OUT"


def of_folder(folder: Path) -> str:
    """Say what a folder of pieces is, and how to make one file of it; empty for any other folder."""
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".distcp") for name in names):
        return _distcp(folder)
    if any(_DEEPSPEED.fullmatch(name) for name in names):
        return _deepspeed(folder.parent)
    if "zero_to_fp32.py" in names or any(
        name.startswith("global_step") for name in names
    ):
        return _deepspeed(folder)
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered is not None:
            return f"a folder of {_numbered(folder, numbered)}"
    return ""


def of_file(path: Path, keys: Iterable[str] = ()) -> str:
    """Say what a file is a piece of, by its name and the keys in it; '' for a whole file."""
    if path.suffix == ".distcp":
        return _distcp(path.parent)
    numbered = _NUMBERED.fullmatch(path.name)
    if numbered is not None:
        return f"one of {_numbered(path.parent, numbered)}"
    if path.name.endswith((".safetensors.index.json", ".bin.index.json")):
        return (
            "the list of a model's files, not their weights; join the files that it names"
            f" (`backbench inspect {shlex.quote(str(path.parent))}` has the command)"
        )
    if _DEEPSPEED.fullmatch(path.name):
        return _deepspeed(path.parent.parent)
    flat = [key for key in keys if _FLAT.search(key)]
    if flat:
        return (
            f"one process's part of a model that FSDP has cut ('{flat[0][:120]}'): the shapes are not"
            " in it; save it whole where it was trained, with StateDictType.FULL_STATE_DICT (DINOv2"
            " has written its teacher whole: eval/training_*/teacher_checkpoint.pth)"
        )
    return ""


def _distcp(folder: Path) -> str:
    return (
        "a checkpoint that torch.distributed has cut into .distcp files; make one file of it with"
        f" `python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        f" {shlex.quote(str(folder))} OUT.pth`,"
        f" {_IN_ONE_FILE}.pth"
    )


def _deepspeed(folder: Path) -> str:
    script = shlex.quote(f"{folder}/zero_to_fp32.py")
    return (
        "one process's part of a DeepSpeed checkpoint; make one file of it with"
        f" `python {script} {shlex.quote(str(folder))} OUT`, which DeepSpeed has put there,"
        f" {_IN_ONE_FILE}/pytorch_model.bin"
    )


def _numbered(folder: Path, numbered: re.Match[str]) -> str:
    stem, count, suffix = numbered.groups()
    # A folder may be called run[1]; a text in JSON is one in Python, too
    pattern = f"{glob.escape(f'{folder}/{stem}')}-*-of-{count}.{suffix}"
    files = f"glob.glob({json.dumps(pattern, ensure_ascii=False)})"
    if suffix == "safetensors":
        script = (
            "import glob; from safetensors.torch import load_file, save_file;"
            f" save_file({{k: v for f in {files} for k, v in load_file(f).items()}},"
            ' "OUT.safetensors")'
        )
    else:
        script = (
            f"import glob, torch; torch.save({{k: v for f in {files} for k, v in"
            ' torch.load(f, weights_only=True).items()}, "OUT.pth")'
        )
    suffix = "safetensors" if suffix == "safetensors" else "pth"
    return (
        f"{int(count)} files that are one model; join them with"
        f" `python -c {shlex.quote(script)}`, {_IN_ONE_FILE}.{suffix}"
    )
