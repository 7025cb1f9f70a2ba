"""`backbench doctor`: what is installed here, what the machine has, and what that allows.

Nothing is installed or changed. Exit status 1 where the suite itself cannot run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from backbench.board.board import TWELVE
from backbench.errors import EXIT_FAILED
from backbench.results import store

OK, MISSING, BROKEN = "ok", "missing", "broken"
OTHERS = ("imagenet", "imagenet100", "stl10", "digits", "scenes")


def run(args: argparse.Namespace) -> int:
    """The verb `doctor`."""
    found = examine(args.data)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0 if found["allows"]["pretrain"]["state"] == OK else EXIT_FAILED


def examine(data: Path) -> dict[str, Any]:
    """Everything as plain values: packages, machine, devices, slurm, detectron2, data, allows."""
    found: dict[str, Any] = {
        "code": store.code_revision(),
        "python": platform.python_version(),
        "packages": packages(),
        "machine": machine(),
        "devices": devices(),
        "slurm": slurm(),
        "detectron2": detectron2(),
        "data": datasets(data),
    }
    found["allows"] = allows(found)
    return found


def packages() -> dict[str, dict[str, str]]:
    """Each package that backbench requires: its version, and whether that is within the stated range."""
    out = {}
    for text in importlib.metadata.requires("backbench") or []:
        requirement, _, marker = text.partition(";")
        if "extra" in marker:
            continue
        match = re.match(r"\s*([A-Za-z0-9_.-]+)\s*\(?([^)]*)\)?", requirement)
        if match is None:
            continue
        name, wanted = match.group(1), match.group(2).strip()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = {"state": MISSING, "version": "", "wanted": wanted}
            continue
        out[name] = {
            "state": OK if within(version, wanted) else "outside",
            "version": version,
            "wanted": wanted,
        }
    return dict(sorted(out.items()))


def within(version: str, wanted: str) -> bool:
    """Whether `2.15.0+cu130` is in `>=2.11,<2.16`; a comparison that is not one of these is taken as met."""

    def numbers(text: str) -> list[int]:
        release = re.match(r"\d+(\.\d+)*", text)
        return [int(n) for n in release.group().split(".")] if release else []

    have = numbers(version)
    for part in filter(None, (p.strip() for p in wanted.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*(\S+)", part)
        if match is None:
            continue
        limit = numbers(match.group(2))
        size = max(len(have), len(limit))
        a, b = have + [0] * (size - len(have)), limit + [0] * (size - len(limit))
        met = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b}[
            match.group(1)
        ]
        if not met:
            return False
    return True


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": affinity,
        "memory_gib": round(memory / 2**30, 1),
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cpu": store.hardware(),
    }


_PROBE = """
import json, torch, torchvision
out = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2]])
out["ops"] = torchvision.ops.nms(boxes, torch.tensor([1.0, 0.5]), 0.5).tolist() == [0]
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        bf16 = p.major >= 8
        out["gpus"].append({"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "bf16": bf16})
print(json.dumps(out))
"""


def devices() -> dict[str, Any]:
    """What torch sees, asked in a process of its own so that a broken installation is reported and not raised."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        return {"state": BROKEN, "why": "importing torch took more than 5 minutes", "gpus": []}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"state": BROKEN, "why": lines[-1], "gpus": []}
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "state": OK if seen["ops"] else BROKEN,
        "why": "" if seen["ops"] else "torchvision.ops.nms is wrong",
        **seen,
    }


def slurm() -> dict[str, Any]:
    if shutil.which("sbatch") is None:
        return {"state": MISSING, "why": "no sbatch on PATH"}
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%P %D %G"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"state": BROKEN, "why": f"sinfo does not answer ({type(error).__name__})"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"state": BROKEN, "why": f"sbatch is here, but no cluster answers ({lines[-1]})"}
    return {
        "state": OK,
        "partitions": [line.split() for line in done.stdout.splitlines() if line.strip()],
    }


def detectron2() -> dict[str, Any]:
    """Whether it is there and imports; it is never imported into this process."""
    if importlib.util.find_spec("detectron2") is None:
        return {"state": MISSING, "why": "`make detectron2` builds it (g++ and a few minutes)"}
    code = "import detectron2, detectron2._C; print(detectron2.__version__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"state": BROKEN, "why": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return {"state": OK, "version": done.stdout.strip()}


def datasets(data: Path) -> dict[str, Any]:
    """Which datasets have a folder below ROOT. `backbench data check NAME` says whether what is in it is right."""
    coco = [
        data / "coco",
        *(Path(p) / "coco" for p in [os.environ.get("DETECTRON2_DATASETS", "")] if p),
    ]
    lists = data / "lists"
    return {
        "root": str(data),
        "there": sorted(name for name in (*TWELVE, *OTHERS) if (data / name).is_dir()),
        "not_there": sorted(name for name in (*TWELVE, *OTHERS[:3]) if not (data / name).is_dir()),
        "coco": next((str(p) for p in coco if (p / "annotations").is_dir()), None),
        "lists": sorted(p.name for p in lists.glob("*percent.txt")) if lists.is_dir() else [],
    }


def allows(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Verb -> whether it can run here, and what it lacks."""
    lacking = [name for name, about in found["packages"].items() if about["state"] == MISSING]
    if lacking:
        base = {"state": MISSING, "why": f"not installed: {', '.join(lacking)}"}
    elif found["devices"]["state"] != OK:
        base = {"state": BROKEN, "why": found["devices"]["why"]}
    else:
        gpus = found["devices"]["gpus"]
        where = (
            f"on {len(gpus)} x {gpus[0]['name']}"
            if gpus
            else "on the CPU: for the demo and small data"
        )
        base = {"state": OK, "why": where}
    data = found["data"]
    twelve = [name for name in TWELVE if name in data["there"]]
    other = [name for name in data["there"] if name not in TWELVE]
    have = (
        f"{len(twelve)} of LORAC's twelve"
        + (f", {', '.join(other)}" if other else "")
        + f" in {data['root']}"
    )
    scenes = Path(data["root"]) / "scenes"

    def also(ready: bool, why: str) -> dict[str, str]:
        return base if base["state"] != OK else {"state": OK if ready else MISSING, "why": why}

    d2 = found["detectron2"]
    return {
        "demo": base,
        "pretrain": base,
        "linear, finetune, analyze": also(bool(data["there"]), have),
        "semisup": also(
            bool(data["lists"]) and bool({"imagenet", "digits"} & set(data["there"])),
            f"lists: {', '.join(data['lists']) or 'none; see `backbench data fetch-splits`'}",
        ),
        "detect (torchvision)": also(
            data["coco"] is not None or "scenes" in data["there"],
            f"COCO in {data['coco']}"
            if data["coco"]
            else f"the demo's scenes in {scenes}"
            if "scenes" in data["there"]
            else "no COCO below --data or $DETECTRON2_DATASETS",
        ),
        "detect (detectron2)": also(d2["state"] == OK, d2.get("version") or d2["why"]),
        "launch --cluster slurm": also(
            found["slurm"]["state"] == OK, found["slurm"].get("why", "sinfo answers")
        ),
        "launch --cluster local": base,
    }


def _print(found: dict[str, Any]) -> None:
    print(
        f"backbench {importlib.metadata.version('backbench')} ({found['code']}), Python {found['python']}"
    )
    m = found["machine"]
    threads = (
        m["omp_num_threads"]
        or "not set: with several processes on few cores, export OMP_NUM_THREADS=1"
    )
    print(
        f"machine    {m['system']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['disk_free_gib']} GiB of disk free"
    )
    print(f"threads    OMP_NUM_THREADS {threads}")
    gpus = found["devices"]["gpus"]
    named = [f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in gpus]
    print(f"GPUs       {', '.join(named) or 'none'}")
    print("packages")
    for name, about in found["packages"].items():
        note = {
            OK: "",
            MISSING: "MISSING",
            "outside": f"outside {about['wanted']}, the range that was tested",
        }
        print(f"  {name:<24} {about['version']:<18} {note[about['state']]}".rstrip())
    for name in ("detectron2", "slurm"):
        about = found[name]
        print(f"{name:<10} {about['state']}" + (f": {about['why']}" if about.get("why") else ""))
    data = found["data"]
    print(f"data       {data['root']}: {', '.join(data['there']) or 'none of the datasets'}")
    print(
        f"           COCO {data['coco'] or 'not found'}; lists {', '.join(data['lists']) or 'none'}"
    )
    print(
        "           `backbench data list` says where each belongs, `backbench data check NAME` whether it is right"
    )
    print("this allows")
    for verb, about in found["allows"].items():
        print(f"  {verb:<26} {'yes' if about['state'] == OK else 'no':<4} {about['why']}".rstrip())
