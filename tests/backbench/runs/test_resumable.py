"""What happens between two steps: the vote, the progress, the state, the stop."""

import json
from types import SimpleNamespace

import pytest

from backbench.errors import Preempted
from backbench.parallel.distributed import Agreement
from backbench.runs.folder import PROGRESS_FILE
from backbench.runs.resumable import ResumableSteps
from backbench.runs.run_progress import Progress


@pytest.fixture
def loop(tmp_path):
    """A loop over what is left of ten units, which stands in `steps`, `saved` and `flag`."""

    def make(first=0, *, size=1, due=lambda done, age: False, **more):
        flag = SimpleNamespace(requested=None)
        saved = []
        steps = ResumableSteps(
            first,
            10,
            size=size,
            stop=flag,
            agreement=more.pop("agreement", Agreement()),
            progress=Progress(tmp_path, 10, "test", done=first),
            save=saved.append,
            due=due,
            **more,
        )
        return SimpleNamespace(steps=steps, saved=saved, flag=flag)

    return make


def test_the_steps_that_are_left_are_made_and_shown(loop, tmp_path):
    left = loop(first=7)
    assert list(left.steps) == [7, 8, 9]
    assert left.saved == []
    assert json.loads((tmp_path / PROGRESS_FILE).read_text())["done"] == 10
    assert list(loop(first=10).steps) == []


def test_a_step_of_several_units_ends_with_the_last_unit(loop):
    left = loop(first=2, size=3, due=lambda done, age: True)
    assert list(left.steps) == [2, 5, 8]
    assert left.saved == [5, 8, 10]


def test_the_state_is_saved_where_it_is_due(loop, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(
        "backbench.runs.resumable.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    left = loop(due=lambda done, age: age > 25 or done == 10)
    for _ in left.steps:
        now[0] += 10
    assert left.saved == [3, 6, 9, 10]


def test_a_signal_saves_and_leaves_after_the_step_that_it_came_in(loop, tmp_path):
    left = loop(place="at step {done} of {total}, state saved", run=tmp_path)
    with pytest.raises(Preempted) as stopped:
        for step in left.steps:
            if step == 4:
                left.flag.requested = "SIGTERM"
    assert left.saved == [5]
    assert str(stopped.value) == (
        f"{tmp_path}: stopped by SIGTERM at step 5 of 10, state saved;"
        " the same command continues"
    )


def test_a_signal_in_the_last_step_saves_and_stops_nothing(loop):
    left = loop(first=8)
    for step in left.steps:
        if step == 9:
            left.flag.requested = "SIGTERM"
    assert left.saved == [10]


def test_a_signal_to_another_rank_stops_this_one_once_all_have_saved(loop):
    """The agreement of a rank whose neighbour hears a signal in its third step."""
    exchanges = []

    def any_rank(*flags):
        exchanges.append((flags, list(left.saved)))
        if len(flags) == 1:
            return flags
        return (len(exchanges) == 3, False)

    left = loop(agreement=SimpleNamespace(any=any_rank))
    with pytest.raises(Preempted, match="stopped by a signal to another process at"):
        list(left.steps)
    vote = ((False, False), [])
    assert exchanges == [vote, vote, vote, ((True,), [3])]


def test_a_step_that_breaks_the_loop_is_not_counted(loop):
    left = loop(due=lambda done, age: True)
    for step in left.steps:
        if step == 2:
            break
    assert left.saved == [1, 2]


def test_what_is_shown_stands_beside_the_progress_until_others_are_given(
    loop, monkeypatch
):
    shown = []

    def advance(self, count, **values):
        shown.append((count, values))

    monkeypatch.setattr(Progress, "advance", advance)
    left = loop(first=4, size=4)
    for step in left.steps:
        if step == 4:
            left.steps.show(loss=2.5, rate=0.1)
    assert shown == [(4, {"loss": 2.5, "rate": 0.1}), (2, {"loss": 2.5, "rate": 0.1})]
