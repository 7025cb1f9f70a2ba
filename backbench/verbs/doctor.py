"""`backbench doctor`: reports what is installed here, what the machine has, and what that allows.

Nothing is installed or changed. Exit status 1 where the suite itself cannot run.
"""

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

from backbench import plugins
from backbench.datasets import catalog
from backbench.datasets.catalog import TWELVE
from backbench.errors import EXIT_FAILED
from backbench.results import store
from backbench.weights import archs

OK, MISSING, BROKEN = "ok", "missing", "broken"
OUTSIDE = "outside"  # of the range of versions that was tested
OTHERS = ("imagenet", "imagenet100", "stl10", "digits", "scenes")


def run(args: argparse.Namespace) -> int:
    """The verb `doctor`."""
    args.document = found = examine(args.data)
    if not args.json:
        _print(found)
    return 0 if found["allows"]["pretrain"]["state"] == OK else EXIT_FAILED


def examine(data: Path) -> dict[str, Any]:
    """Everything as plain values: packages, machine, devices, slurm, detectron2, data, allows."""
    trunks: dict[str, Any] = {
        "installed": sorted(plugins.installed(plugins.TRUNKS)),
        "cached": [name for family in archs.FAMILIES for name in family.cached_names()],
    }
    found: dict[str, Any] = {
        "code": store.code_revision(),
        "python": platform.python_version(),
        "packages": packages(),
        "hidden": plugins.hidden(),
        "machine": machine(),
        "devices": devices(),
        "slurm": slurm(),
        "detectron2": detectron2(),
        "data": datasets(data),
        "trunks": trunks,
    }
    found["allows"] = allows(found)
    return found


def packages() -> dict[str, dict[str, str]]:
    """Each package that backbench requires here, without its extras: its version, and whether that is
    within the stated range."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it reads the ranges, and is one of the packages that are looked for
        return {"packaging": {"state": MISSING, "version": "", "wanted": ""}}
    out = {}
    for text in importlib.metadata.requires("backbench") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        wanted = text.partition(";")[0].removeprefix(name).strip()
        try:
            version = importlib.metadata.version(name)
            state = OK if within(version, wanted) else OUTSIDE
        except importlib.metadata.PackageNotFoundError:
            version, state = "", MISSING
        out[name] = {"state": state, "version": version, "wanted": wanted}
    return dict(sorted(out.items()))


def within(version: str, wanted: str) -> bool:
    """True if `2.15.0+cu130` is in `>=2.11,<2.16`. The release number alone counts: vendors' builds
    (`2.11.0a0+1f3c`, `2.15.0-custom`) are builds of it."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        known = Version(version)
        post = "" if known.post is None else f".post{known.post}"
        number = known.base_version + post
    except InvalidVersion:
        release = re.match(r"\d+(\.\d+)*", version)
        number = release.group() if release else "0"
    return SpecifierSet(wanted).contains(number)


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
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
    """The devices that torch sees. A process of its own asks it, so that a broken installation is
    reported and not raised."""
    output, why = _ask(sys.executable, "-c", _PROBE, patience_s=300, what="importing torch")
    if why:
        return {"state": BROKEN, "why": why, "gpus": []}
    seen = json.loads(output.strip().splitlines()[-1])
    if not seen["ops"]:
        return {"state": BROKEN, "why": "torchvision.ops.nms is wrong", **seen}
    return {"state": OK, "why": "", **seen}


def slurm() -> dict[str, Any]:
    if shutil.which("sbatch") is None:
        return {"state": MISSING, "why": "no sbatch on PATH"}
    output, why = _ask("sinfo", "--noheader", "--format=%P %D %G", patience_s=20)
    if why:
        return {"state": BROKEN, "why": f"sbatch is here, but no cluster answers ({why})"}
    return {"state": OK, "partitions": [line.split() for line in output.splitlines() if line]}


def detectron2() -> dict[str, Any]:
    """Tells whether it is there and imports; it is never imported into this process."""
    if importlib.util.find_spec("detectron2") is None:
        return {"state": MISSING, "why": "`make detectron2` builds it (g++ and a few minutes)"}
    code = "import detectron2, detectron2._C; print(detectron2.__version__)"
    output, why = _ask(sys.executable, "-W", "ignore", "-c", code, patience_s=300)
    return {"state": BROKEN, "why": why} if why else {"state": OK, "version": output.strip()}


def _ask(*command: str, patience_s: float, what: str = "") -> tuple[str, str]:
    """(what a command prints, why it failed: empty where it did not)."""
    what = what or Path(command[0]).name
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"{what} took more than {patience_s:.0f} s"
    except OSError as error:
        return "", f"{what} does not start ({type(error).__name__})"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return "", lines[-1]
    return done.stdout, ""


def datasets(data: Path) -> dict[str, Any]:
    """The datasets below ROOT that can be evaluated on, and why others cannot. `backbench data
    check NAME` also reads the images."""
    there, unusable = [], {}
    for name in (*TWELVE, *OTHERS):
        if not (data / name).is_dir():
            continue
        wrong = None if name == "scenes" else catalog.found(name, data)
        if wrong:
            unusable[name] = wrong
        else:
            there.append(name)
    for name, wrong in catalog.own_folders(data).items():
        if wrong:
            unusable[name] = wrong
        else:
            there.append(name)
    wanted = [*TWELVE, *OTHERS[:3]]
    coco = [data / "coco"]
    if elsewhere := os.environ.get("DETECTRON2_DATASETS"):
        coco.append(Path(elsewhere) / "coco")
    lists = data / "lists"
    return {
        "root": str(data),
        "there": sorted(there),
        "unusable": unusable,
        "not_there": sorted(set(wanted) - set(there) - set(unusable)),
        "coco": next((str(path) for path in coco if (path / "annotations").is_dir()), None),
        "lists": sorted(path.name for path in lists.glob("*percent.txt")),
    }


def allows(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Verb -> whether it can run here, and what it lacks."""
    base = _basis(found)
    data, d2, cluster = found["data"], found["detectron2"], found["slurm"]
    there, root = data["there"], data["root"]
    lists = ", ".join(data["lists"]) or "none; see `backbench data fetch-splits`"
    labelled = not {"imagenet", "digits"}.isdisjoint(there)
    twelve = [name for name in TWELVE if name in there]
    other = [name for name in there if name not in TWELVE]
    named = ", ".join([f"{len(twelve)} of LORAC's twelve", *other])
    detection = "no COCO below --data or $DETECTRON2_DATASETS"
    if data["coco"]:
        detection = f"COCO in {data['coco']}"
    elif "scenes" in there:
        detection = f"the demo's scenes in {Path(root) / 'scenes'}"

    def also(ready: bool, why: str) -> dict[str, str]:
        """A verb that needs more than the basis."""
        if base["state"] != OK:
            return base
        return {"state": OK if ready else MISSING, "why": why}

    return {
        "demo": base,
        "pretrain": base,
        "linear, finetune, analyze": also(bool(there), f"{named} in {root}"),
        "semisup": also(bool(data["lists"]) and labelled, f"lists: {lists}"),
        "detect (torchvision)": also(data["coco"] is not None or "scenes" in there, detection),
        "detect (detectron2)": also(d2["state"] == OK, d2.get("version") or d2["why"]),
        "launch --cluster slurm": also(cluster["state"] == OK, cluster.get("why", "sinfo answers")),
        "launch --cluster local": base,
    }


def _basis(found: dict[str, Any]) -> dict[str, str]:
    """The state of what every verb that computes needs."""
    lacking = [name for name, about in found["packages"].items() if about["state"] == MISSING]
    if lacking:
        return {"state": MISSING, "why": f"not installed: {', '.join(lacking)}"}
    for why in found.get("hidden", {}).values():
        return {"state": BROKEN, "why": why}
    if found["devices"]["state"] != OK:
        return {"state": BROKEN, "why": found["devices"]["why"]}
    gpus = found["devices"]["gpus"]
    if not gpus:
        return {"state": OK, "why": "on the CPU: for the demo and small data"}
    return {"state": OK, "why": f"on {len(gpus)} x {gpus[0]['name']}"}


def _print(found: dict[str, Any]) -> None:
    version = importlib.metadata.version("backbench")
    print(f"backbench {version} ({found['code']}), Python {found['python']}")
    m = found["machine"]
    room = f"{m['memory_gib']} GiB, {m['disk_free_gib']} GiB of disk free"
    print(f"machine    {m['system']}, {m['cores']} cores, {room}")
    unset = "not set: with several processes on few cores, export OMP_NUM_THREADS=1"
    print(f"threads    OMP_NUM_THREADS {m['omp_num_threads'] or unset}")
    gpus = [f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in found["devices"]["gpus"]]
    print(f"GPUs       {', '.join(gpus) or 'none'}")
    print("packages")
    for name, about in found["packages"].items():
        outside = f"outside {about['wanted']}, the range that was tested"
        note = {OK: "", MISSING: "MISSING", OUTSIDE: outside}[about["state"]]
        print(f"  {name:<24} {about['version']:<18} {note}".rstrip())
    for why in found["hidden"].values():
        print(f"hidden     {why}")
    for name in ("detectron2", "slurm"):
        about = found[name]
        why = f": {about['why']}" if about.get("why") else ""
        print(f"{name:<10} {about['state']}{why}")
    data = found["data"]
    lists = ", ".join(data["lists"]) or "none"
    print(f"data       {data['root']}: {', '.join(data['there']) or 'none of the datasets'}")
    for name, wrong in data["unusable"].items():
        print(f"           {name} cannot be used: {wrong}")
    print(f"           COCO {data['coco'] or 'not found'}; lists {lists}")
    advice = "`backbench data list` says where each belongs, `backbench data check NAME` whether it is right"
    print(f"           {advice}")
    cached = ", ".join(found["trunks"]["cached"]) or "no weights of timm's in the local cache"
    print(f"trunks     ResNets, timm:NAME ({cached}); `backbench inspect X` says what one allows")
    if found["trunks"]["installed"]:
        print(f"           from packages: {', '.join(found['trunks']['installed'])}")
    print("this allows")
    for verb, about in found["allows"].items():
        can = "yes" if about["state"] == OK else "no"
        print(f"  {verb:<26} {can:<4} {about['why']}".rstrip())
