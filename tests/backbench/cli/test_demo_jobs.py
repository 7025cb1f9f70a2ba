"""The demo's cheapest step, run as a job by its user's command."""

from backbench.cli import demo, program
from backbench.launch.records import Ledger
from backbench.runs.folder import CHECKPOINT_FILE


def test_a_step_of_the_demo_runs_as_a_job(tmp_path, monkeypatch, capsys):
    """The trunk that nobody trains is there in seconds. Without the others nothing is calibrated, which
    is what the demo then says."""
    monkeypatch.setattr(demo, "CHAINS", {"pretraining-b": {"pretrain/random": 1}})
    out = tmp_path / "demo"
    assert program.main(["demo", "--size", "tiny", "--out", str(out)]) == 1
    assert "the scores were not calibrated" in capsys.readouterr().err
    assert (out / "pretrain" / "random" / CHECKPOINT_FILE).exists()
    (status,) = Ledger(out).statuses().values()
    assert [attempt["how"] for attempt in status["attempts"]] == ["done"]
