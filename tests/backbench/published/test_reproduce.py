"""The table of a list, and the bundle sent back: whole, changed, or unlike its rows."""

import dataclasses
import hashlib
import io
import json
import zipfile

import pytest
from support.records import a_result

from backbench.cli import program
from backbench.published import bundle, reproduction_lists
from backbench.published.judge import judge_list
from backbench.published.public_files import FoundFile
from backbench.published.tables import list_page
from backbench.recipes import config
from backbench.records import store
from backbench.runs.folder import RESULTS_FILE
from backbench.tasks import TASKS

DINO, MOCO = "d" * 64, "e" * 64


@pytest.mark.parametrize("name", sorted(config.recipe_names(reproduction_lists.KIND)))
def test_a_shipped_list_names_what_there_is(name, tmp_path):
    one = reproduction_lists.read_list(name)
    for about in one.files.values():
        assert about.page.startswith("https://")
        assert about.url or about.by_hand
        assert about.rows or about.beside or about.testbed, "nothing is printed of it"
        for number in reproduction_lists.judged_rows(about):
            assert number.arch == "resnet50"
            assert number.epochs in (None, about.epochs), "of another pretraining"
    ways_to_get_it = {(about.url, about.by_hand) for about in one.files.values()}
    assert len(ways_to_get_it) == len(one.files)
    assert all(part.gpu_hours > 0 for part in one.parts)
    assert "not measured" in one.estimate


def test_the_lists_hold_the_methods_that_were_asked_for():
    methods = {
        about.method for about in reproduction_lists.read_list("full").files.values()
    }
    assert methods == {
        "moco",
        "swav",
        "barlow_twins",
        "vicreg",
        "dino",
        "simsiam",
        "byol",
        "supervised",
        "lorac",
        "moco_m",
        "jcl",
    }
    short = reproduction_lists.read_list("short")
    assert short.gpu_hours(list(short.files)) <= 1.0


def measured_by(runs, names=("dino", "moco_v2_200", "swav_200")):
    """What the short list and an ImageNet probe came to in `runs`, as `bundle.write` takes it.

    Of the checkpoints, dino and moco are on this machine.
    """
    one = reproduction_lists.read_list("short")
    covered = {name: {("knn", "imagenet"), ("linear", "imagenet")} for name in names}
    digests = {"dino": DINO, "moco_v2_200": MOCO}
    lines = judge_list(one, covered, digests, [runs])
    found = {}
    for name in digests:
        about = one.files[name]
        found[name] = FoundFile(runs / about.file, about, 9, "0" * 64, "1" * 32)
    return {
        "listed": one,
        "covered": covered,
        "files": found,
        "digests": digests,
        "lines": lines,
    }


def rows():
    """Two kNN numbers of dino, two probes of moco, and one of a checkpoint outside the list."""
    dino = {
        "checkpoint": DINO,
        "name": "dino",
        "method": "dino",
        "arch": "resnet50",
        "epochs": None,
        "task": "knn",
        "dataset": "imagenet",
        "protocol": "knn-dino-v1",
    }
    moco = {
        "checkpoint": MOCO,
        "name": "moco_v2_200",
        "method": "moco",
        "arch": "resnet50",
        "epochs": 200,
        "task": "linear",
        "dataset": "imagenet",
        "protocol": "linear-moco-v1",
    }
    return [
        a_result(**dino, metric="top1_k20", value=67.1),
        a_result(**dino, metric="top1_k10", value=67.9),
        a_result(**moco, metric="top1", value=65.0, ci95=(64.6, 65.4)),
        a_result(**moco, metric="top5", value=87.9),
        a_result(checkpoint="f" * 64, name="somebody else's"),
    ]


@pytest.fixture
def runs(tmp_path):
    store.append(tmp_path / "runs" / "a", rows()[:2])
    store.append(tmp_path / "runs" / "b", rows()[2:])
    return tmp_path / "runs"


def test_every_printed_number_has_a_verdict_or_a_reason(runs):
    verdicts = measured_by(runs)["lines"]
    found = {}
    for one in verdicts:
        found[one.checkpoint, one.source, one.column.split("@")[0]] = one
    knn = found["dino", "dino README, Pretrained models, k-nn", "knn/imagenet/top1_k20"]
    assert (knn.verdict, knn.measured, knn.printed) == ("within", 67.1, 67.5)
    key = "lorac:1:moco-v2:resnet50:200"
    of_paper = found["moco_v2_200", key, "linear/imagenet/top1"]
    points = TASKS["linear"].tolerance_on("imagenet")
    assert (of_paper.verdict, of_paper.tolerance) == ("outside", (points, points))
    assert found["moco_v2_200", key, "linear/imagenet/top5"].verdict == "within"
    readme = found["moco_v2_200", "moco README, Models", "linear/imagenet/top1"]
    assert (readme.verdict, readme.ci95) == ("outside", (64.6, 65.4))
    source = "dino README, Pretrained models, linear"
    probe = found["dino", source, "linear/imagenet/top1"]
    assert (probe.verdict, probe.measured) == ("not measured", None)
    of_swav = {one.verdict for one in verdicts if one.checkpoint == "swav_200"}
    assert of_swav == {"no file"}
    page = list_page(reproduction_lists.read_list("short"), verdicts)
    assert "| dino | knn/imagenet/top1\\_k20" not in page


def test_what_was_measured_otherwise_has_no_verdict(runs):
    row = rows()[0]
    fewer = {**row.provenance, "images": {"train": 5, "val": 0, "test": 1000}}
    other = dataclasses.replace(row, provenance=fewer)
    store.append(runs / "c", [other])
    (runs / "a" / RESULTS_FILE).unlink()
    (line,) = [one for one in measured_by(runs)["lines"] if "k20" in one.column]
    assert (line.verdict, line.measured) == ("unlike", 67.1)
    assert "imagenet:test~" in line.why


DEEP = {"arch": "timm:vit_small_patch16_dinov3", "epochs": None}
SEG = {
    "task": "segmentation",
    "dataset": "ade20k",
    "metric": "miou",
    "protocol": "seg-dinov3-v1",
}
EP = {"task": "attentive", "dataset": "imagenet", "protocol": "attentive-ep-v1"}
OWN = {"task": "ood", "dataset": "imagenet-val", "protocol": "own-all"}


@pytest.mark.parametrize(
    ("of", "row", "value", "verdict"),
    [
        # The printed numbers are the best on val, so ours may be lower by more than higher
        ("dinov3 dinov3_vit_small", SEG, 46.21, "within"),
        ("dinov3 dinov3_vit_small", SEG, 46.19, "outside"),
        ("dinov3 dinov3_vit_small", SEG, 47.29, "within"),
        ("dinov3 dinov3_vit_small", SEG, 47.31, "outside"),
        ("dinov3 dinov3_convnext_tiny", SEG, 42.7, "unlike"),
        ("efficient_probing hiera_base", EP, 75.09, "within"),
        ("efficient_probing hiera_base", EP, 75.99, "outside"),
        ("efficient_probing mae_vitb16", EP, 75.46, "unlike"),
        ("heads moco_v3_100", OWN, 68.99, "within"),
        ("heads moco_v3_100", OWN, 69.01, "outside"),
    ],
)
def test_a_pages_number_has_its_own_tolerance(tmp_path, of, row, value, verdict):
    name, file = of.split()
    store.append(
        tmp_path, [a_result(checkpoint=DINO, name=file, **DEEP, **row, value=value)]
    )
    covered = {file: {(row["task"], row["dataset"])}}
    (line,) = judge_list(
        reproduction_lists.read_list(name), covered, {file: DINO}, [tmp_path]
    )
    assert (line.verdict, line.measured) == (verdict, value)
    assert bool(line.why) == (verdict == "unlike")
    if name == "dinov3" and verdict != "unlike":
        assert "| -0.8 +0.3 |" in list_page(reproduction_lists.read_list(name), [line])


def test_the_testbeds_counts_stand_beside_its_files(tmp_path):
    listed = reproduction_lists.read_list("heads")
    geometry = {
        "input_size": [3, 224, 224],
        "crop_pct": 0.875,
        "interpolation": "bilinear",
    }
    about = {"own_geometry": geometry, "recipe": {"kind": "ood", "rule": "subset"}}
    about |= {"images": {"train": 0, "val": 0, "test": 7500}}
    found = {}
    for file, right in (("resnet50_swav", 391), ("resnet50_simsiam", 204)):
        row = {
            "task": "ood",
            "dataset": "imagenet-a",
            "protocol": "own-subset",
            "name": file,
        }
        facts = {**about, "right": {"top1": right}}
        store.append(tmp_path, [a_result(**row, value=right / 75, provenance=facts)])
        covered = {file: {("ood", "imagenet-a")}}
        (line,) = judge_list(listed, covered, {file: "a" * 64}, [tmp_path])
        found[file] = (line.verdict, round(line.printed, 2))
        (tmp_path / RESULTS_FILE).unlink()
    # 23 images of 7,500 are more than 0.3 points
    assert found == {
        "resnet50_swav": ("outside", 5.52),
        "resnet50_simsiam": ("unlike", 2.72),
    }


@pytest.fixture
def sent(runs, tmp_path):
    bundle.write(tmp_path / "short.zip", runs, **measured_by(runs))
    return tmp_path / "short.zip"


def test_a_bundle_is_whole_and_its_table_follows(sent, capsys):
    assert program.main(["reproduce", "--check", str(sent)]) == 0
    said = capsys.readouterr().out
    assert "| dino | knn/imagenet/top1_k20@knn-dino-v1 | 67.5 | 67.10 |" in said
    assert "its table follows from its rows" in said
    # The file that was measured is not the one whose md5 moco's page prints
    assert "REMARK moco_v2_200: its md5 begins 11111111, printed is 59fd9945" in said


def test_a_bundle_holds_nothing_of_others(sent):
    with zipfile.ZipFile(sent) as archive:
        text = b"".join(archive.read(name) for name in archive.namelist())
    assert b"somebody" not in text
    assert b"f" * 64 not in text


def changed(sent, change):
    """The bundle with its members changed by `change(members)`."""
    with zipfile.ZipFile(sent) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    sent.write_bytes(buffer.getvalue())


def better(data):
    return data.replace(b"65.0", b"67.4")


def resealed(members, name, data):
    """Change a member as somebody would who knows of the manifest."""
    members[name] = data
    manifest = json.loads(members[bundle.MANIFEST])
    manifest["files"][name] = hashlib.sha256(data).hexdigest()
    members[bundle.MANIFEST] = json.dumps(manifest).encode()


def with_better_row(members):
    name = "results/1/results.jsonl"
    members[name] = better(members[name])


def with_better_table(members):
    resealed(members, bundle.TABLE, better(members[bundle.TABLE]))


def with_lower_printed_number(members):
    resealed(members, bundle.LIST, members[bundle.LIST].replace(b"67.5", b"67.0"))


def with_a_stranger(members):
    manifest = json.loads(members[bundle.MANIFEST])
    manifest["covered"]["stranger"] = []
    members[bundle.MANIFEST] = json.dumps(manifest).encode()


def with_odd_coverage(members):
    manifest = json.loads(members[bundle.MANIFEST])
    manifest["covered"]["dino"] = [3]
    members[bundle.MANIFEST] = json.dumps(manifest).encode()


def with_an_odd_table(members):
    resealed(
        members, bundle.TABLE, members[bundle.TABLE].replace(b"within", b"outside", 1)
    )


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (with_better_row, 2, "results/1/results.jsonl was changed"),
        (lambda m: m.pop(bundle.PAGE), 2, "table.md is not in both"),
        (lambda m: m.update({"../evil.py": b"1"}), 2, "../evil.py is not in both"),
        (
            lambda m: m.update({bundle.MANIFEST: b"{}"}),
            2,
            "no bundle of `backbench reproduce`",
        ),
        (lambda m: m.update({bundle.MANIFEST: b"[" * 9999}), 2, "manifest.json"),
        (lambda m: m.pop(bundle.MANIFEST), 2, "(no manifest.json in it)"),
        (
            lambda m: m.update({bundle.MANIFEST: b"[]"}),
            2,
            "manifest.json must be a table",
        ),
        (lambda m: m.update({bundle.MANIFEST: b"{"}), 2, "manifest.json: "),
        (with_a_stranger, 2, "'stranger' is none of the list's checkpoints"),
        (with_an_odd_table, 1, "does not follow"),
        (with_odd_coverage, 2, "short.zip"),
        (with_better_table, 1, "does not follow"),
        (with_lower_printed_number, 1, "does not follow"),
    ],
    ids=[
        "row",
        "lost",
        "more",
        "other format",
        "nested",
        "no manifest",
        "list for it",
        "damaged",
        "stranger",
        "odd table",
        "odd coverage",
        "table",
        "list",
    ],
)
def test_a_changed_bundle_is_refused(sent, capsys, change, status, said):
    changed(sent, change)
    assert program.main(["reproduce", "--check", str(sent)]) == status
    err = capsys.readouterr().err.strip()
    assert said in err
    assert err.count("\n") == 0


def test_a_list_is_held_against_the_shipped_one_of_its_name(runs, tmp_path):
    """timm's own is made again for the models in the bundle."""

    def remarks_on(listed):
        file = tmp_path / "x.zip"
        bundle.write(
            file, runs, listed=listed, covered={}, files={}, digests={}, lines=[]
        )
        return bundle.check(file).remarks

    timms = reproduction_lists.timm_list("timm-v2", ["resnet18.tv_in1k"])
    for listed in (reproduction_lists.read_list("short"), timms):
        assert not remarks_on(listed)
        (remark,) = remarks_on(dataclasses.replace(listed, title="made-up"))
        assert "is not as it is shipped here" in remark
        (remark,) = remarks_on(dataclasses.replace(listed, name="made-up"))
        assert "is none that is shipped here" in remark


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"no zip"])
def test_what_is_no_zip_is_refused(tmp_path, capsys, content):
    (tmp_path / "x.zip").write_bytes(content)
    assert program.main(["reproduce", "--check", str(tmp_path / "x.zip")]) == 2
    assert "not readable as a bundle" in capsys.readouterr().err


def entry(**keys):
    """A checkpoint that a list may have, with these keys changed; None leaves one out."""
    whole = {"page": "https://x.org", "file": "a.pth", "url": "https://x.org", **keys}
    return {key: value for key, value in whole.items() if value is not None}


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        ({}, "name one at least"),
        ({"one": entry(file="../a.pth")}, "without a folder"),
        ({"one": entry(url=None)}, "by_hand"),
        ({"one": entry(md5="ab")}, "eight or more"),
        ({"one": entry(md5="abcdef01")}, "digest_page"),
        ({"one": entry(url="file:///etc/passwd")}, "https://"),
        ({"one": entry(url="https://[::1/a")}, "https://HOST/PATH"),
        ({"one": entry(url="https://x.org:1/é")}, "in ASCII"),
        ({"one": entry(rows=["lorac:9"])}, "lorac:9"),
        ({"one": entry(testbed="vit")}, "'vit': allowed"),
        ({"one": {"timm": "../../../etc/passwd"}}, "must be NAME.TAG"),
        ({"one": {"timm": "resnet18"}}, "must be NAME.TAG"),
    ],
)
def test_a_list_that_says_too_little_is_refused(tmp_path, capsys, checkpoints, said):
    listed = {"title": "t", "estimate": "e", "checkpoints": checkpoints, "parts": []}
    (tmp_path / "mine.yaml").write_text(json.dumps(listed))  # JSON is YAML
    assert program.main(["reproduce", str(tmp_path / "mine.yaml"), "--download"]) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert err.count("\n") == 0


def test_what_a_later_part_lacks_is_said_before_the_first_runs(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert program.main(["reproduce", "full", "--data", str(tmp_path)]) == 2
    assert "semisup needs `lists: DIR`" in capsys.readouterr().err
    (tmp_path / "1percent.txt").touch()
    evaluation = {"verb": "semisup", "percent": 1, "lists": str(tmp_path)}
    measured = reproduction_lists.measures({"name": "x", "evaluate": [evaluation]})
    assert measured == {("semi_1pct", "imagenet")}, "and no other percent"
