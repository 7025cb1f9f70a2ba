"""Lines that verbs print, and words that they refuse, item by item."""

import json
import os
import shutil
import time

import pytest
from support.records import a_result

from backbench.cli import (
    clean,
    demo_ranges,
    doctor,
    export_results,
    log,
    program,
    verbs,
)
from backbench.cli import weights as weights_verbs
from backbench.cli.doctor import BROKEN, MISSING, OK, OUTSIDE, Finding
from backbench.errors import BadInput
from backbench.records import store
from backbench.requests.finetune import FinetuneRequest
from backbench.requests.options import Outcome
from backbench.requests.parsing import parse
from backbench.requests.weights import ImportRequest
from backbench.runs.folder import open_run
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

# demo


def test_a_range_holds_to_the_tenth_that_is_written():
    one = demo_ranges.Range("CPU", "linear/digits/top1", "moco", 20, 19, -1.0, 2.0, 3.0)
    assert one.holds(-1.05) and one.holds(3.05)
    assert not one.holds(-1.06) and not one.holds(3.06)


def test_a_demos_results_are_held_against_the_kept_ranges(tmp_path, monkeypatch):
    rows = [
        a_result(name=f"{name}-demo", value=value, checkpoint=letter * 64)
        for name, value, letter in (
            ("random", 50.0, "a"),
            ("moco-v2", 60.0, "b"),
            ("lorac", 49.0, "c"),
        )
    ]
    store.append(tmp_path / "runs", rows)
    column = "linear/digits/top1"
    ranges = [
        demo_ranges.Range(machine, column, trunk, 20, 20, least, most, most)
        for machine, trunk, least, most in (
            ("Z", "moco_v2", 9.0, 11.0),
            ("A", "lorac", 1.0, 2.0),
            ("A", "absent", 1.0, 2.0),
        )
    ]
    monkeypatch.setattr(demo_ranges, "FILE", tmp_path / "ranges.csv")
    demo_ranges.write(ranges)
    assert demo_ranges.of_demo(tmp_path / "runs") == [
        "1 of 2 differences to the random trunk lie where 20 demos on A and 20 demos on Z had"
        " them; outside:",
        "  lorac in linear/digits/top1: -1.0 points, there +1.0 to +2.0",
        "detection here shows the path and compares nothing: its trainings are short",
    ]
    demo_ranges.write(ranges[:1])
    first, _ = demo_ranges.of_demo(tmp_path / "runs")
    assert first == (
        "1 of 1 differences to the random trunk lie where 20 demos on Z had them"
    )


# clean


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (3.25 * 1024**3, "3.2 GiB"),
        (2000 * 1024**4, "2000.0 TiB"),
    ],
)
def test_sizes_have_units(size, text):
    assert clean._size(size) == text


def test_what_a_cleaning_would_do_is_printed_line_by_line(tmp_path, capsys):
    runs = tmp_path / "runs"
    with open_run(runs / "b", verb="detect", identity={}) as run:
        pass
    store.append(run, [a_result()])
    (run / "state.pt").write_bytes(b"s" * 10_000)
    with open_run(runs / "a", verb="detect", identity={}) as going:
        pass
    (going / "state.pt").write_bytes(b"s" * 10_000)
    beside = runs / ".x.tmp"
    young = runs / ".y.tmp"
    for file, age in ((beside, 3700), (young, 3500)):
        file.write_bytes(b"t" * 5000)
        os.utime(file, (time.time() - age,) * 2)
    (runs / "note.txt").write_text("not counted")

    def on_disk(*files):
        return sum(file.lstat().st_blocks * 512 for file in files)

    def all_of(folder):
        return on_disk(*(file for file in folder.rglob("*") if file.is_file()))

    sizes = [all_of(going), all_of(run), on_disk(beside)]
    state = on_disk(run / "state.pt")
    width = len(str(runs / "a"))
    shown = [clean._size(size) for size in (*sizes, state, sum(sizes))]
    a, b, temporary, of_state, total = shown
    free = clean._size(state + on_disk(beside))
    rows = [
        f"{going!s:<{width}}  detect      unfinished {a:>9}  {'':>9}",
        f"{run!s:<{width}}  detect      finished   {b:>9}  {of_state:>9}",
        f"{runs!s:<{width}}  -           finished   {temporary:>9}  {temporary:>9}",
        f"3 folders hold {total}; {free} can go",
    ]
    files = [
        f"{run / 'state.pt'}  {of_state}, training state of a finished run",
        f"{beside}  {temporary}, left by a writer that died",
    ]
    assert program.main(["clean", str(runs)]) == 0
    said = capsys.readouterr().out.splitlines()
    told = "nothing was removed; --yes removes what can go"
    assert said == [*rows, *(f"can go  {file}" for file in files), told]
    assert program.main(["clean", str(runs), "--yes"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [*rows, *(f"removed {file}" for file in files)]
    assert young.exists() and not beside.exists()
    assert not (run / "state.pt").exists() and (going / "state.pt").exists()
    (tmp_path / "none").mkdir()
    assert program.main(["clean", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == "no run folders here\n"


# log


def test_a_logger_gets_the_runs_name_recipe_and_new_numbers(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setitem(log.LOGGERS, "tensorboard", sent.append)
    row = a_result(value=91.25, seed=3)
    undefined = a_result(value=None, metric="mean_per_class")
    store.append(tmp_path / "runs" / "b" / "c", [row, undefined])
    store.append(tmp_path / "runs", [a_result(value=50.0, dataset="cifar10")])
    words = ["log", str(tmp_path / "runs"), "--to", "tensorboard"]
    assert program.main(words) == 0
    top, below = sent
    assert (top.name, below.name) == ("runs", "b/c")
    assert top.id != below.id and len(below.id) == 16
    assert below.numbers == {row.column: 91.25}
    told = {"checkpoint": "a" * 64, "seed": 3}
    assert below.config == {**row.facts["recipe"], **told}
    note = json.loads((tmp_path / "runs" / "b" / "c" / "logged.json").read_text())
    of_b = {"step": -1, "keys": [], "numbers": [row.column]}
    assert note == {"tensorboard": of_b}
    # What is new goes alone, and the note keeps both
    more = a_result(value=70.0, dataset="dtd")
    store.append(tmp_path / "runs" / "b" / "c", [more])
    assert program.main(words) == 0
    assert [each.numbers for each in sent[2:]] == [{more.column: 70.0}]
    note = json.loads((tmp_path / "runs" / "b" / "c" / "logged.json").read_text())
    assert note["tensorboard"]["numbers"] == sorted([row.column, more.column])


def test_what_is_no_folder_of_runs_is_not_logged(tmp_path, bad_input):
    status = program.main(["log", str(tmp_path / "x"), "--to", "tensorboard"])
    bad_input(status, f"{tmp_path / 'x'}: no such folder; give the --out of a run")


def test_mlflows_names_are_told_apart():
    names = ["a@b", "a~b", "a+b", "a@b%c", "ü/x-1. y_2"]
    made = [log._of_allowed_characters(name) for name in names]
    assert made[0] == "a_b" and made[4] == "ü/x-1. y_2"
    assert len(set(made)) == 5
    assert all(name.startswith("a_b ") and len(name) == 10 for name in made[1:3])


# export-results


def test_words_of_pairs_are_read_from_the_last_sign():
    def read(text):
        return text.upper() if text.isalpha() else None

    given = ["x=a", "y=b=c"]
    assert export_results._pairs("--m", "N=V", given, read) == {"x": "A", "y=b": "C"}
    for wrong in ("a", "=a", "x=1"):
        with pytest.raises(BadInput) as refused:
            export_results._pairs("--m", "N=V", ["x=a", wrong], read)
        assert str(refused.value) == f"--m {wrong}: it has the form N=V"
    with pytest.raises(BadInput, match=r"^--m x=b: 'x' is named twice$"):
        export_results._pairs("--m", "N=V", ["x=a", "x=b"], read)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/name.v-1_x", True),
        ("org", False),
        ("org/a/b", False),
        ("-org/a", False),
        (f"{'a' * 96}/{'b' * 96}", True),
        (f"{'a' * 97}/b", False),
    ],
)
def test_repositories_have_the_hubs_names(text, found):
    assert export_results._repository(text) == (text if found else None)
    benchmark = export_results._benchmark(f"{text}:task-1")
    assert (benchmark is not None) == found
    if found:
        assert (benchmark.dataset, benchmark.task) == (text, "task-1")
        assert export_results._benchmark(f"{text}:") is None


# The command line


def test_each_seed_has_a_folder_of_its_own(tmp_path):
    words = ["finetune", "timm:resnet18@random", "--dataset", "x"]
    words += ["--data", str(tmp_path)]
    request = parse(
        [*words, "--seeds", "3", "--seed", "4", "--out", str(tmp_path / "r")]
    )
    found = [(one.seed, one.out) for one in verbs.each_seed(request)]
    assert found == [(n, tmp_path / "r" / f"s{n}") for n in (4, 5, 6)]
    one = parse([*words, "--out", str(tmp_path / "r")])
    assert list(verbs.each_seed(one)) == [one]


def test_documents_of_several_seeds_are_one_list(tmp_path, monkeypatch, capsys):
    def finetune(request):
        print("aside")
        rows = [{"seed": request.seed}, request.out]
        return Outcome(document=rows, status=int(request.seed == 1))

    monkeypatch.setitem(verbs.VERBS, FinetuneRequest, verbs.Verb(finetune))
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(
        "backbench.datasets.availability.datasets_there", lambda _: None
    )
    words = ["finetune", "timm:resnet18@random", "--dataset", "mine", "--json"]
    words += ["--data", str(tmp_path), "--out", str(tmp_path / "r")]
    assert program.main([*words, "--seeds", "2"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == [
        {"seed": 0},
        str(tmp_path / "r" / "s0"),
        {"seed": 1},
        str(tmp_path / "r" / "s1"),
    ]
    assert said.err.count("aside") == 2
    assert program.main(words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == [{"seed": 0}, str(tmp_path / "r")]


def test_runs_without_results_are_not_verified(tmp_path, bad_input):
    (tmp_path / "x").mkdir()
    bad_input(
        program.main(["verify", str(tmp_path / "x")]),
        f"{tmp_path / 'x'}: no results.jsonl below; give the --out of an evaluation",
    )


# Weights


def report_row(**changes):
    row = {
        "problems": {},
        "missing_statistics": "none",
        "absent_counters": 0,
        "untrained": [],
    }
    return {**row, **changes}


def test_remarks_on_a_trunk():
    assert weights_verbs._notes(report_row(missing_statistics="some")) == []
    row = report_row(
        problems={"missing": ["a", "b"], "not usable": ["c"]},
        missing_statistics="all",
        absent_counters=3,
        untrained=["first", "second"],
    )
    assert weights_verbs._notes(row) == [
        "2 missing: a, b",
        "1 not usable: c",
        "no batch-norm statistics",
        "3 batch counters are not in the file and become 0",
        "untrained? first",
        "untrained? second",
    ]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {},
            [
                "reading   pooled: 512 numbers an image",
                "takes     images of any size",
                "detection on maps at strides 4, 8",
            ],
        ),
        (
            {"divisor": 16, "strides": []},
            [
                "reading   pooled: 512 numbers an image",
                "takes     images of any size, in multiples of 16",
                "detection none: it has no maps",
            ],
        ),
        (
            {"size": 224, "positions": ".1"},
            [
                "reading   pooled: 512 numbers an image",
                "takes     images of 224 x 224 pixels; of others with `import --pos .1`",
                "detection on maps at strides 4, 8",
            ],
        ),
        (
            {"size": 96, "divisor": 16},
            [
                "reading   pooled: 512 numbers an image",
                "takes     images of 96 x 96 pixels",
                "detection on maps at strides 4, 8",
            ],
        ),
    ],
)
def test_what_a_trunk_allows(changes, lines):
    allows = {
        "reading": "pooled",
        "feature_dim": 512,
        "size": None,
        "divisor": 1,
        "strides": [4, 8],
        "positions": "",
        **changes,
    }
    assert weights_verbs._allowed(allows) == lines


def test_what_a_trunk_was_trained_on_is_kept(tmp_path, bad_input):
    arch = "resnet18,width=0.25"
    trunk = build_trunk(arch).state_dict()
    file = tmp_path / "mine.safetensors"
    Checkpoint(arch=arch, method="demo", state_dict=trunk).save(file)
    out = tmp_path / "x.safetensors"
    words = ["import", str(file), "--out", str(out), "--method", "test", "--trained-on"]
    for wrong in ("a b", "a:", ":train", "a:b:c"):
        status = program.main([*words, "mine", wrong])
        bad_input(status, f"--trained-on {wrong}: DATASET or DATASET:SPLIT")
    assert not out.exists()
    assert program.main([*words, "mine", "imagenet:train"]) == 0
    made = Checkpoint.load(out)
    assert made.provenance["trained_on"] == ["mine", "imagenet:train"]


def test_all_that_is_told_of_a_file_reaches_its_reader(tmp_path, monkeypatch, capsys):
    arch = "resnet18,width=0.25"
    point = Checkpoint(
        arch=arch, method="demo", state_dict=build_trunk(arch).state_dict()
    )
    asked = []

    def read(file, **told):
        asked.append((file, told))
        return point

    monkeypatch.setattr(weights_verbs, "read", read)
    told = {
        "encoder": "student",
        "method": "mine",
        "epochs": 7,
        "name": "n",
        "published": "cllr:1:cllr-alpha=0-512-d:resnet50:100:stl10",
        "stem": "cifar",
        "allow_missing_statistics": True,
        "arch": arch,
        "rename": "by-order",
        "reading": "pooled",
        "pixels": "half",
        "pos": "size",
    }
    file, out = tmp_path / "x.pth", tmp_path / "x.safetensors"
    weights_verbs.run_import(ImportRequest(file=file, out=out, **told))
    assert asked == [(file, told)]
    made = Checkpoint.load(out)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{out}: '{point.name}', method demo, {arch}, imagenet stem,"
        f" {len(point.state_dict)} tensors; format backbench, encoder trunk from '';"
        f" epochs unknown; digest {made.digest[:12]}"
    )


# doctor


def test_a_command_that_cannot_be_asked_is_broken():
    asked = doctor._asked("cluster", "x", "/nowhere/sinfo")
    assert asked == Finding("cluster", "x", BROKEN, "/nowhere/sinfo: FileNotFoundError")
    said = doctor._asked("a", "b", "sh", "-c", "echo one; echo two")
    assert said == Finding("a", "b", OK, "one, two")
    failed = doctor._asked(
        "a", "b", "sh", "-c", "echo out; echo x >&2; echo y >&2; exit 1"
    )
    assert failed == Finding("a", "b", BROKEN, "y")
    silent = doctor._asked("a", "b", "sh", "-c", "exit 3")
    assert silent == Finding("a", "b", BROKEN, "no message")


def test_an_engine_that_is_not_there_says_how_it_is_built(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    builds = "`python -m backbench.detection.build_detectron2` builds it"
    assert doctor.detectron2() == Finding("engine", "detectron2", MISSING, builds)


def test_coco_is_looked_for_in_three_places(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("DETECTRON2_DATASETS", str(elsewhere))
    data = tmp_path / "data"
    assert doctor.coco(data).state == MISSING
    for folder in (data / "scenes", elsewhere / "coco", data / "coco"):
        (folder / "annotations").mkdir(parents=True)
        assert doctor.coco(data) == Finding("boxes", "coco", OK, str(folder))
    shutil.rmtree(data)
    monkeypatch.delenv("DETECTRON2_DATASETS")
    assert doctor.coco(data).state == MISSING


def test_what_each_group_of_verbs_lacks():
    packages = [Finding("package", "a", OK), Finding("package", "b", OUTSIDE, "old")]
    more = [
        Finding("boxes", "coco", MISSING, "no boxes"),
        Finding("engine", "detectron2", BROKEN, "no import"),
        Finding("cluster", "slurm", OK),
        Finding("data", "imagenet-a", OK),  # tested on alone
        Finding("data", "mine", BROKEN, "damaged"),
    ]

    def found(needed):
        return {one.name: (one.state, one.about) for one in doctor.verbs(needed, more)}

    advice = "datasets: none; `backbench data list` says where each belongs"
    assert found(packages) == {
        "demo, pretrain": (OK, ""),
        "launch on this machine": (OK, ""),
        "linear, finetune, semisup": (MISSING, advice),
        "detect (torchvision)": (MISSING, "coco: no boxes"),
        "detect (detectron2)": (BROKEN, "detectron2: no import"),
        "launch --cluster slurm": (OK, ""),
    }
    lacking = [*packages, Finding("device", "torch", BROKEN, "no torch")]
    assert set(found(lacking).values()) == {(BROKEN, "torch: no torch")}


def test_what_to_type_next(tmp_path):
    broken = Finding("device", "torch", BROKEN)
    absent = [Finding("package", name, MISSING) for name in ("x", "y")]
    python = f"{doctor.sys.executable} -m pip install"
    assert doctor.to_type([broken, *absent], tmp_path) == f"{python} x y"
    reinstalled = f"{python} --force-reinstall torch torchvision"
    assert doctor.to_type([broken], tmp_path) == reinstalled
    images = [
        Finding("data", "gone", BROKEN),
        Finding("data", "imagenet-a", OK),
        Finding("data", "b c", OK),
        Finding("data", "d", OK),
    ]
    assert doctor.to_type(images, tmp_path) == (
        "backbench evaluate MODEL.pth timm:resnet50@random"
        f" --data '{tmp_path / 'b c'}' --out runs"
    )
