"""Training on a real GPU against the CPU: methods, ranks, kept losses, whole runs of the loop."""

import contextlib
import signal

import pytest
import torch
from support import traces
from support.gpu import DEVICE, REAL, all_cases, on_gpu
from support.methods import CASES, train

from backbench.cli import program
from backbench.errors import EXIT_PREEMPTED
from backbench.parallel import precision
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.run_progress import Progress
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint

pytestmark = on_gpu


@contextlib.contextmanager
def no_waits(step):
    """torch raises where the host would wait for the device; in the first step the rules look."""
    if REAL and step:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if REAL:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def exact():
    precision.use("fp32")


@pytest.mark.parametrize("name", CASES)
def test_method_equals_the_cpu(name):
    expected, found = (
        train(CASES[name]),
        train(CASES[name], device=DEVICE, around=no_waits),
    )
    for key, value in expected.items():
        assert found[key].device.type == DEVICE
        torch.testing.assert_close(
            found[key].cpu(), value, rtol=1e-7, atol=1e-9, msg=key
        )


@pytest.mark.parametrize("name", CASES)
def test_method_in_float32(name):
    expected = train(CASES[name], dtype=torch.float32)
    found = train(CASES[name], dtype=torch.float32, device=DEVICE)
    # The first step's; behind it rounding is trained on
    torch.testing.assert_close(
        found["0 loss"].cpu(), expected["0 loss"], rtol=1e-4, atol=1e-5
    )
    assert all(
        torch.isfinite(value).all()
        for value in found.values()
        if value.is_floating_point()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_method_in_mixed_precision_is_finite(name, dtype):
    def around(step):
        return torch.autocast(DEVICE, dtype)

    half = dtype == torch.float16
    found = train(
        CASES[name], dtype=torch.float32, device=DEVICE, around=around, skips=half
    )
    assert all(torch.isfinite(found[f"{step} loss"]) for step in range(3))


SMALL = ("epochs=2", "data.workers=2", "log_every=1", "knn_every=0")


def pretrain(root, out, *more):
    where = ["--data", root, "--out", out, "--accelerator", DEVICE]
    return program.main(["pretrain", *map(str, ["tiny_simclr", *where, *SMALL, *more])])


def losses(out):
    return [row["loss"] for row in read_metrics(out) if "loss" in row]


@pytest.mark.parametrize("more", [(), ("precision=bf16",), ("compile=true",)])
def test_a_run_that_is_stopped_goes_on(more, tiny_root, tmp_path, monkeypatch):
    """Its losses are those of the run that was left alone, as far as the device repeats itself."""
    assert pretrain(tiny_root, tmp_path / "whole", *more) == 0
    advance, count = Progress.advance, 0

    def stopping(self, *args, **shown):
        nonlocal count
        count += 1
        if count == 3:
            signal.raise_signal(signal.SIGTERM)
        return advance(self, *args, **shown)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", stopping)
        assert pretrain(tiny_root, tmp_path / "parts", *more) == EXIT_PREEMPTED
    assert pretrain(tiny_root, tmp_path / "parts", *more) == 0
    assert losses(tmp_path / "parts") == pytest.approx(
        losses(tmp_path / "whole"), rel=1e-2
    )
    # What was saved on the device is a file like any other
    point = Checkpoint.load(tmp_path / "parts" / CHECKPOINT_FILE)
    assert all(x.device.type == "cpu" for x in point.state_dict.values())
    assert point.backbone().eval()(torch.zeros(1, 3, 32, 32)).isfinite().all()


@pytest.mark.skipif(not REAL, reason="asks how many GPUs there are")
def test_more_devices_than_there_are(tiny_root, trunk, tmp_path, capsys):
    many = str(torch.cuda.device_count() + 1)
    words = [
        "linear",
        trunk,
        "--datasets",
        "digits",
        "--protocol",
        "knn_demo",
        "--data",
        tiny_root,
    ]
    words += ["--out", tmp_path / "x", "--accelerator", "cuda", "--devices", many]
    assert program.main(list(map(str, words))) == 2
    assert f"--devices {many}: torch finds" in capsys.readouterr().err


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return all_cases(tmp_path_factory.mktemp("ranks"))


@pytest.mark.xdist_group("ranks")  # one process has them, however many run the tests
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(made, name):
    precision.use("fp32")
    expected = train(CASES[name], device=DEVICE)
    for rank in made:
        assert rank[name].keys() == expected.keys()
        for key, value in expected.items():
            found = rank[name][key]
            torch.testing.assert_close(
                found, value.cpu(), rtol=1e-7, atol=1e-8, msg=key
            )


@pytest.mark.parametrize("dtype", traces.DTYPES)
@pytest.mark.parametrize("paper", traces.PAPERS)
def test_losses_are_those_of_the_cpu(paper, dtype):
    found = traces.trace(paper, dtype, DEVICE)
    assert traces.far(found, traces.kept("cpu")[paper][dtype]) < traces.TOLERANCE[dtype]


@pytest.mark.skipif(
    not REAL, reason="the CPU's file is looked at by tests/pretrain/test_methods.py"
)
def test_losses_are_those_of_the_file():
    if not traces.file_of(DEVICE).exists():
        traces.write(DEVICE)
        pytest.skip(
            f"{traces.file_of(DEVICE)} is written for the first time: commit it"
        )
    kept = traces.kept(DEVICE)
    for paper in traces.PAPERS:
        for dtype, tolerance in traces.TOLERANCE.items():
            assert (
                traces.far(traces.trace(paper, dtype, DEVICE), kept[paper][dtype])
                < tolerance
            )
