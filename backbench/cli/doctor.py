"""`backbench doctor`: reports what is installed, what the machine has, and what that allows. It
changes nothing. Exit status 1 if the suite itself cannot run."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from backbench import plugins
from backbench.datasets import availability, catalog
from backbench.errors import EXIT_FAILED
from backbench.records import store
from backbench.requests.doctor import DoctorRequest
from backbench.requests.options import Outcome
from backbench.weights import archs

OK, MISSING, BROKEN = "ok", "missing", "broken"
OUTSIDE = "outside"  # of the range of versions that was tested


@dataclass(frozen=True)
class Finding:
    """One line of the report: a package, a dataset, a verb that can run here, ..."""

    kind: str
    name: str
    state: str
    about: str = ""


def run(request: DoctorRequest) -> Outcome:
    parts = examine(request.data)
    if not request.json:
        version = importlib.metadata.version("backbench")
        print(
            f"backbench {version} ({store.code_revision()}), Python {platform.python_version()}"
        )
        for one in parts:
            print(f"{one.kind:<8} {one.name:<25} {one.state:<8} {one.about}".rstrip())
        print(f"\ntype     {to_type(parts, request.data)}")
    # Without the first verb there is none
    verbs = [one for one in parts if one.kind == "verbs"]
    status = 0 if verbs[0].state == OK else EXIT_FAILED
    return Outcome(status=status, document=parts)


def examine(data: Path) -> list[Finding]:
    torch, engine = libraries()
    needed = [*packages(), torch]
    more = [engine, slurm(), *datasets(data), lists(data), coco(data)]
    trunks = dict.fromkeys(plugins.installed(plugins.TRUNKS), "installed")
    for family in archs.FAMILIES:
        trunks |= dict.fromkeys(family.cached_names(), "in the local cache")
    found = [Finding("trunk", name, OK, about) for name, about in trunks.items()]
    return [machine(), *needed, *more, *found, *verbs(needed, more)]


def machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    disk = shutil.disk_usage(Path.cwd()).free
    advice = "not set (with several processes on few cores: 1)"
    threads = os.environ.get("OMP_NUM_THREADS", advice)
    about = f"{platform.system()}, {cores} cores, {memory >> 30} GiB, {disk >> 30} GiB of disk free"
    return Finding(
        "machine", store.hardware(), OK, f"{about}, OMP_NUM_THREADS {threads}"
    )


def packages() -> list[Finding]:
    """List each required package (no extras): its version, and if that is in the stated range."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        # `packaging` reads the ranges, and is itself one of the packages that are looked for
        return [Finding("package", "packaging", MISSING, "pip install packaging")]
    parts = []
    for text in sorted(importlib.metadata.requires("backbench") or []):
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate(
            {"extra": ""}
        ):
            continue
        wanted = str(requirement.specifier)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            state, about = MISSING, f"not installed; {wanted}"
        else:
            fits = within(version, wanted)
            state = OK if fits else OUTSIDE
            about = version if fits else f"{version}; tested with {wanted}"
        parts.append(Finding("package", requirement.name, state, about))
    return parts


def within(version: str, wanted: str) -> bool:
    """Return True if `2.15.0+cu130` is in `>=2.11,<2.16`. The release number alone counts: vendors'
    builds (`2.11.0a0+1f3c`, `2.15.0-custom`) are builds of it."""
    from packaging.specifiers import SpecifierSet

    release = re.match(r"\d+(\.\d+)*(\.post\d+)?", version)
    return SpecifierSet(wanted).contains(release.group() if release else "0")


_PROBE = """
import torch, torchvision
boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2]])
kept = torchvision.ops.nms(boxes, torch.tensor([1.0, 0.5]), 0.5)
assert kept.tolist() == [0], "torchvision.ops.nms is wrong"
for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    gpu = torch.cuda.get_device_properties(i)
    print(f"{gpu.name} ({gpu.total_memory >> 30} GiB)")
"""


_ENGINE = """
import detectron2, detectron2._C
print(detectron2.__version__)
"""
_THEN = "<detectron2>"  # stands between what the two print


def libraries() -> tuple[Finding, Finding]:
    """Return the findings of `device` and `detectron2`, asked in one process: both import torch, which
    takes most of their time. Where that process fails, each is asked in its own."""
    if not _has_detectron2():
        return device(), detectron2()
    code = f"{_PROBE}print({_THEN!r}){_ENGINE}"
    both = _asked("device", "torch", sys.executable, "-W", "ignore", "-c", code)
    if both.state != OK:
        return device(), detectron2()
    # Lines that were printed are joined by commas
    gpus, _, version = both.about.partition(_THEN)
    torch = _of_gpus(gpus.removesuffix(", "))
    engine = Finding("engine", "detectron2", OK, version.removeprefix(", "))
    return torch, engine


def device() -> Finding:
    """Report the GPUs that torch sees, from its own process: a broken torch raises nothing here."""
    seen = _asked("device", "torch", sys.executable, "-c", _PROBE)
    return _of_gpus(seen.about) if seen.state == OK else seen


def _of_gpus(gpus: str) -> Finding:
    """Say which GPUs torch has seen, or that there is the CPU alone."""
    if gpus:
        return Finding("device", "torch", OK, gpus)
    about = "the CPU: demo and small data"
    if platform.system() == "Darwin":
        about = f"{about}; Apple's GPU (mps) is not used, as it has no float64"
    return Finding("device", "torch", OK, about)


def _has_detectron2() -> bool:
    return importlib.util.find_spec("detectron2") is not None


def detectron2() -> Finding:
    """Tells whether it is there and imports; it is never imported into this process."""
    if not _has_detectron2():
        builds = "`python -m backbench.detection.build_detectron2` builds it"
        return Finding("engine", "detectron2", MISSING, builds)
    return _asked("engine", "detectron2", sys.executable, "-W", "ignore", "-c", _ENGINE)


def slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("cluster", "slurm", MISSING, "no sbatch on PATH")
    return _asked("cluster", "slurm", "sinfo", "--noheader", "--format=%P %D %G")


def _asked(kind: str, name: str, *command: str) -> Finding:
    """Run a command: its output, or the last line that it says where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return Finding(kind, name, BROKEN, f"{command[0]}: {type(error).__name__}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return Finding(kind, name, BROKEN, lines[-1])
    return Finding(kind, name, OK, ", ".join(done.stdout.strip().splitlines()))


def datasets(data: Path) -> list[Finding]:
    """Return the datasets below ROOT, and why some are unusable; `data check NAME` also reads
    images."""
    parts = []
    for row in availability.listed(data):
        name, state = (
            str(row["name"]),
            OK if row["on_disk"] == availability.FOUND else BROKEN,
        )
        if row["on_disk"] != availability.MISSING or (data / name).is_dir():
            parts.append(Finding("data", name, state, str(row["wrong"] or "")))
    return parts


def lists(data: Path) -> Finding:
    """SimCLR's lists of labels, which semisup takes on ImageNet."""
    found = sorted(file.name for file in (data / "lists").glob("*percent.txt"))
    about = ", ".join(found) or "none; `backbench data fetch-splits` fetches ImageNet's"
    return Finding("lists", "semisup", OK if found else MISSING, about)


def coco(data: Path) -> Finding:
    """COCO below ROOT or where Detectron2 looks for it, or else the demo's scenes."""
    folders = [
        data / "coco",
        Path(os.environ.get("DETECTRON2_DATASETS", data)) / "coco",
    ]
    for folder in (*folders, data / "scenes"):
        if (folder / "annotations").is_dir():
            return Finding("boxes", "coco", OK, str(folder))
    return Finding("boxes", "coco", MISSING, "not below --data or $DETECTRON2_DATASETS")


def to_type(parts: list[Finding], data: Path) -> str:
    """Return the command that comes next: what mends this, or the first numbers of what is here."""
    absent = [
        one.name for one in parts if (one.kind, one.state) == ("package", MISSING)
    ]
    if absent:
        return f"{sys.executable} -m pip install {' '.join(absent)}"
    broken = [one for one in parts if one.kind == "device" and one.state == BROKEN]
    if broken:
        # A torch and a torchvision that do not belong together are the usual reason
        return f"{sys.executable} -m pip install --force-reinstall torch torchvision"
    there = [one.name for one in parts if (one.kind, one.state) == ("data", OK)]
    images = [name for name in there if not catalog.find(name).rules]
    if images:
        own = shlex.quote(str(data / images[0]))
        return (
            f"backbench evaluate MODEL.pth timm:resnet50@random --data {own} --out runs"
        )
    return (
        "backbench demo --size tiny; or, with images in mine/CLASS/,"
        " backbench evaluate MODEL.pth timm:resnet50@random --data mine --out runs"
    )


def verbs(needed: list[Finding], more: list[Finding]) -> list[Finding]:
    """Return each group of verbs: whether it can run here, and what it lacks."""
    lacking = [one for one in needed if one.state in (MISSING, BROKEN)]
    by_name = {one.name: one for one in more if one.kind != "data"}
    data = [one for one in more if (one.kind, one.state) == ("data", OK)]
    advice = "none; `backbench data list` says where each belongs"
    images = [one for one in data if not catalog.find(one.name).rules]
    needs = {
        "demo, pretrain": [],
        "launch on this machine": [],
        "linear, finetune, semisup": images
        or [Finding("data", "datasets", MISSING, advice)],
        "detect (torchvision)": [by_name["coco"]],
        "detect (detectron2)": [by_name["detectron2"]],
        "launch --cluster slurm": [by_name["slurm"]],
    }
    parts = []
    for name, need in needs.items():
        wrong = next((one for one in [*lacking, *need[:1]] if one.state != OK), None)
        about = "" if wrong is None else f"{wrong.name}: {wrong.about}"
        parts.append(
            Finding("verbs", name, OK if wrong is None else wrong.state, about)
        )
    return parts
