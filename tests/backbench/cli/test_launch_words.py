"""Words of `launch`: what changes the cluster, which jobs are named, and what is said of a plan."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from backbench.cli import launch, program
from backbench.errors import BadInput
from backbench.launch.job import Job
from backbench.launch.plan import Plan
from backbench.launch.view import State


def test_words_for_the_cluster_and_for_the_grid():
    words = ["cluster.jobs=3", "again=0", "cluster.jobs", "cluster.env.A=b=c", "name"]
    of_cluster, others = launch._split_overrides(words)
    assert of_cluster == ["jobs=3", "env.A=b=c"]
    assert others == ["again=0", "cluster.jobs", "name"]


def test_jobs_are_chosen_by_a_part_of_their_names_and_their_states():
    states = {
        "a/linear": "failed",
        "b/linear": "done",
        "b/knn": "failed",
        "c/x": "lost",
    }
    snapshot = SimpleNamespace(
        records=states,
        states={name: State(state) for name, state in states.items()},
        ledger=SimpleNamespace(runs=Path("/x/my runs")),
    )
    both = ("failed", "lost")
    assert launch._chosen(snapshot, [], both) == ["a/linear", "b/knn", "c/x"]
    assert launch._chosen(snapshot, ["linear", "c/"], both) == ["a/linear", "c/x"]
    assert launch._chosen(snapshot, ["b/linear"], both) == []
    with pytest.raises(BadInput) as refused:
        launch._chosen(snapshot, ["nobody", "other"], both)
    assert str(refused.value) == (
        "no job's name holds 'nobody'; `backbench launch status --out '/x/my runs'` lists them"
    )


@pytest.mark.parametrize("action", ["retry", "cancel"])
def test_a_folder_of_runs_that_is_not_there_is_named(tmp_path, capsys, action):
    gone = tmp_path / "gone"
    assert program.main(["launch", action, "--out", str(gone)]) == 2
    assert capsys.readouterr().err == (
        f"backbench: --out {gone}: no such folder; give the folder of a `backbench launch run`\n"
    )
    assert not gone.exists()


def test_a_folder_without_jobs_is_named(tmp_path, capsys):
    assert program.main(["launch", "status", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no jobs were submitted here\n"


def jobs(count):
    return [
        Job(name=str(n), argv=("linear",), like="x", cells=()) for n in range(count)
    ]


def test_what_is_said_of_a_plan(caplog):
    known = {str(n): State(name) for n, name in enumerate(("done", "failed", "done"))}
    plan = Plan(jobs(2), known, ["runs/a", "runs/b"])
    launch._say(plan, "submitted in 1 arrays", Path("/x/my runs"))
    told = [record.getMessage() for record in caplog.records]
    file = "backbone.safetensors"
    assert told == [
        "2 jobs submitted in 1 arrays, 2 done, 1 failed",
        "`backbench launch retry --out '/x/my runs'` starts the failed ones again",
        f"waiting for runs/a: no runs/a/{file} yet; run again then, or --watch",
        f"waiting for runs/b: no runs/b/{file} yet; run again then, or --watch",
    ]
    caplog.clear()
    nothing = Plan([], {"a": State("done")}, [])
    launch._say(nothing, "submitted in 0 arrays", Path("/x"))
    assert [record.getMessage() for record in caplog.records] == [
        "0 jobs missing, 1 done"
    ]


def test_changes_of_a_cluster_need_the_cluster():
    request = SimpleNamespace(names=("a", "cluster.jobs=3"), cluster=None)
    with pytest.raises(
        BadInput, match=r"^cluster\.jobs=3: say of which cluster, --clus"
    ):
        launch._named_cluster(request)
    assert launch._named_cluster(SimpleNamespace(names=("a",), cluster=None)) == (
        None,
        ["a"],
    )
    request = SimpleNamespace(names=("a", "cluster.jobs=3"), cluster="local")
    cluster, patterns = launch._named_cluster(request)
    assert (cluster.kind, cluster.jobs, patterns) == ("local", 3, ["a"])
