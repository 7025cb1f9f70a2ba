"""What an entry of a grid's `checkpoints` names: files, globs, runs that have ended or not."""

import json
from pathlib import Path

import pytest
from support import fake_verbs

from backbench.errors import BadInput
from backbench.launch import expansion
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid


@pytest.fixture
def expand(lab):
    """expand(*entries): the jobs of one evaluation of these checkpoints, and what is waited for."""

    def of(*entries, runs="runs"):
        grid = read_grid(lab.grid(checkpoints=list(entries), evaluate=lab.linear("d1")))
        return Expansion(grid, lab.root / runs, where="grid g")

    return of


def measured(expansion):
    """The checkpoint files of the probes."""
    return [job.argv[1] for job in expansion.jobs if job.verb == "linear"]


def pretraining(folder, *, ended, verb="pretrain", recipe=None):
    """A run folder by hand."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"verb": verb, "folder": str(folder)}))
    if ended:
        fake_verbs.write_checkpoint(folder / "backbone.safetensors", str(folder))
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe)
    return folder


def test_a_file_and_its_copy_are_one_checkpoint(lab, expand):
    files = lab.root / "ck"
    fake_verbs.write_checkpoint(files / "a.safetensors", "a")
    fake_verbs.write_checkpoint(files / "copy.safetensors", "a")
    fake_verbs.write_checkpoint(files / "b.safetensors", "b")
    found = expand(str(files / "*.safetensors"), str(files / "a.safetensors"))
    assert measured(found) == [
        str(files / "a.safetensors"),
        str(files / "b.safetensors"),
    ]
    assert len(found.jobs) == 2  # nothing is imported


def test_a_run_and_its_checkpoint_are_one(lab, expand):
    run = pretraining(lab.root / "by_hand", ended=True)
    file = run / "backbone.safetensors"
    for entries in ([str(run)], [str(file)], [str(run), str(file)]):
        found = expand(*entries)
        assert measured(found) == [str(file)]
        # It is called as the folder is
        (job,) = found.jobs
        assert job.name.startswith("by_hand-")
    # Without run.json it is a file like others
    other = lab.root / "other" / "backbone.safetensors"
    fake_verbs.write_checkpoint(other, "x")
    (job,) = expand(str(other)).jobs
    assert job.name.startswith("backbone-")
    # So is another file in the folder of a run
    beside = run / "step100.safetensors"
    fake_verbs.write_checkpoint(beside, "y")
    (job,) = expand(str(beside)).jobs
    assert job.name.startswith("step100-")


def test_a_run_that_nobody_here_makes_is_waited_for(lab, expand):
    run = pretraining(lab.root / "by_hand", ended=False)
    found = expand(str(run))
    assert (found.jobs, found.waiting) == ([], [str(run)])
    fake_verbs.write_checkpoint(run / "backbone.safetensors", "x")
    assert len(expand(str(run)).jobs) == 1


def test_folders_that_are_no_pretraining_are_refused_by_name_and_left_out_of_a_glob(
    lab, expand
):
    pretraining(lab.root / "all" / "one", ended=True)
    pretraining(lab.root / "all" / "probe", ended=True, verb="linear")
    (lab.root / "all" / "empty").mkdir()
    assert len(expand(str(lab.root / "all" / "*")).jobs) == 1
    with pytest.raises(
        BadInput,
        match=r"^grid g: checkpoints\[0\]: /\S+/probe holds a run of 'linear'; a folder must be a run of",
    ):
        expand(str(lab.root / "all" / "probe"))
    with pytest.raises(
        BadInput,
        match=r"^grid g: checkpoints\[0\]: /\S+/empty has no run\.json; a folder must be a run of",
    ):
        expand(str(lab.root / "all" / "empty"))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            "nowhere.pth",
            "grid g: .*nowhere.pth: no such file or folder; give a checkpoint file",
        ),
        (
            "*.nothing",
            r"grid g: .*'.*\*.nothing' matches no file \(looked from .*\); --watch",
        ),
    ],
)
def test_what_is_not_there_is_said(lab, expand, entry, says):
    with pytest.raises(BadInput, match=says):
        expand(str(lab.root / entry))


def test_several_files_cannot_have_one_name(lab, expand):
    lab.checkpoints("a", "b")
    entry = {"path": str(lab.root / "ck" / "*.safetensors"), "name": "mine"}
    with pytest.raises(BadInput, match="2 files cannot all be named 'mine'"):
        expand(entry)


def test_a_foreign_file_is_imported_first_and_so_is_one_with_words_of_its_own(
    lab, expand
):
    foreign = lab.root / "theirs.pth"
    foreign.write_bytes(b"weights")
    lab.checkpoints("a")
    ours = str(lab.root / "ck" / "a.safetensors")
    found = expand(str(foreign), {"path": ours, "method": "simclr", "epochs": 3})
    imports = [job for job in found.jobs if job.verb == "import"]
    assert [job.argv[1] for job in imports] == [str(foreign), ours]
    assert imports[0].name.startswith("imported/theirs-")
    assert imports[1].argv[imports[1].argv.index("--method") + 1] == "simclr"
    assert imports[1].argv[imports[1].argv.index("--epochs") + 1] == "3"
    for probe in [job for job in found.jobs if job.verb == "linear"]:
        (need,) = probe.needs
        (made,) = [job.makes for job in imports if job.name == need]
        assert Path(probe.argv[1]) == (lab.root / "runs" / made).resolve()


def test_a_name_of_timms_has_no_encoder(expand):
    with pytest.raises(
        BadInput, match="timm:resnet18@random names one trunk; leave out encoder"
    ):
        expand({"path": "timm:resnet18@random", "encoder": "x"})
    (job,) = expand("timm:resnet18@random").jobs
    assert job.argv[1] == "timm:resnet18@random"


def test_foreign_files_are_told_apart_by_size_beginning_and_end(tmp_path):
    middle = bytes(3 << 20)
    names = {}
    for name, content in {
        "a": b"x" + middle + b"y",
        "same": b"x" + middle + b"y",
        "start": b"z" + middle + b"y",
        "end": b"x" + middle + b"z",
        "size": b"x" + middle + b"0y",
        "short": b"x",
    }.items():
        (tmp_path / name).write_bytes(content)
        names[name] = expansion.content_digest(tmp_path / name)
    assert names["a"] == names["same"]
    assert len(set(names.values())) == 5


@pytest.mark.parametrize(
    ("protocol", "cached"),
    [("own", False), ("lorac", False), ("logreg", True), ("knn", True), (None, False)],
)
def test_features_are_shared_where_no_picture_is_changed(protocol, cached):
    assert (expansion._geometry(protocol) is not None) == cached
