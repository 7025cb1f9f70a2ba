"""What a training decides beside its steps: what is due, what is waited for, what names a run."""

import contextlib
import logging
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning_fabric.strategies import DDPStrategy
from support import tiny_pretraining

from backbench.errors import BadInput
from backbench.images.crops import Crops
from backbench.parallel import loading, precision
from backbench.pretrain import train
from backbench.pretrain.monitor import RecentTerms
from backbench.pretrain.recipe import Data, Optim, ViewsConfig
from backbench.pretrain.train import SavedState, Training
from backbench.runs import seeding
from backbench.weights import archs


def test_a_state_is_due_after_minutes_at_long_epochs_and_at_the_end():
    config = tiny_pretraining.config(save_minutes=2.0)
    training = SimpleNamespace(steps_per_epoch=5, last=12, config=config)

    def due(done, age):
        return Training.state_is_due(training, done, age)

    assert due(12, 0)
    assert not due(7, 120)
    assert due(7, 120.1)
    assert not due(10, 30)
    assert due(10, 30.1)
    assert not due(9, 30.1) and not due(11, 30.1)


@pytest.mark.parametrize(
    ("every", "scored"),
    [(0, []), (1, [5, 10, 15, 20, 25]), (2, [10, 20, 25]), (9, [25])],
)
def test_a_knn_score_is_due_every_so_many_epochs_and_at_the_end(
    monkeypatch, every, scored
):
    written = []
    asked = []

    def knn(found, views, device, workers):
        asked.append((found, device, workers))
        return lambda backbone, stop: (backbone, stop)

    monkeypatch.setattr(train.monitor, "KnnScore", knn)
    training = SimpleNamespace(
        config=tiny_pretraining.config(knn_every=every),
        steps_per_epoch=5,
        last=25,
        first=0,
        found="pictures",
        workers=3,
        method=SimpleNamespace(backbone="trunk"),
        fabric=SimpleNamespace(global_rank=0, device="cpu"),
        record=SimpleNamespace(
            has_knn=True,
            paused=torch.no_grad,
            knn=lambda score, **place: written.append((score, place)),
        ),
    )
    for done in range(0, 26, 5):
        Training.score_neighbours(training, done, "stop")
    assert written == [
        (("trunk", "stop"), {"done": done, "epoch": done // 5 - 1}) for done in scored
    ]
    assert asked == [("pictures", "cpu", 3)] * len(scored)
    # A run that continues there has the score, unless it was stopped before; one rank scores
    written.clear()
    training.first = 25
    Training.score_neighbours(training, 25, None)
    training.record.has_knn = False
    training.fabric.global_rank = 1
    Training.score_neighbours(training, 25, None)
    assert written == []
    training.fabric.global_rank = 0
    Training.score_neighbours(training, 25, None)
    assert len(written) == bool(scored)


def test_a_cpus_losses_are_read_in_every_step_and_a_gpus_with_the_rows():
    read = []

    def first_not_finite():
        read.append("read")

    def agreed(bad):
        return (bad,)

    training = SimpleNamespace(
        recent=SimpleNamespace(first_not_finite=first_not_finite),
        agree=SimpleNamespace(any=agreed),
        fabric=SimpleNamespace(device=torch.device("cpu")),
    )
    Training.refuse_not_finite(training, 3, False)
    assert len(read) == 1
    training.fabric.device = torch.device("cuda")
    Training.refuse_not_finite(training, 3, False)
    assert len(read) == 1
    Training.refuse_not_finite(training, 3, True)
    assert len(read) == 2
    # A rank that found nothing ends with the one that did
    training.agree.any = lambda bad: (True,)
    training.loss_failure = lambda bad, step: BadInput(f"{bad} {step}")
    with pytest.raises(BadInput, match="None 3"):
        Training.refuse_not_finite(training, 3, True)


@pytest.mark.parametrize(
    ("asked", "cores", "workers"), [(0, 4, 0), (9, 4, 9), (None, 4, 4), (None, 8, 6)]
)
def test_workers_are_those_asked_for_or_at_most_one_a_core(
    monkeypatch, asked, cores, workers
):
    monkeypatch.setattr(loading, "cores", lambda devices: cores * devices // 2)
    config = tiny_pretraining.config(data=Data(dataset="shapes", workers=6))
    request = SimpleNamespace(workers=asked, devices=2)
    assert train.loader_workers(config, request) == workers


def test_images_make_at_least_one_batch():
    config = tiny_pretraining.config(batch_size=8)

    class SomePictures(list):
        root = Path("here")

    train.refuse_too_few(config, SomePictures(range(8)))
    with pytest.raises(BadInput) as error:
        train.refuse_too_few(config, SomePictures(range(7)))
    assert str(error.value) == (
        "here: 7 images are fewer than one batch of 8; set batch_size to at most 7"
    )
    # Without a step there is no batch
    train.refuse_too_few(tiny_pretraining.config(epochs=0), SomePictures())


def test_images_are_a_dataset_of_root_or_a_folder_of_ones_own(monkeypatch):
    monkeypatch.setattr(train.own, "open_images", lambda folder: ("own", folder))
    monkeypatch.setattr(train.catalog, "open_split", lambda *where: where)
    config = tiny_pretraining.config(data=Data(dataset="shapes", split="val"))

    def images_of(images, data):
        return train.images_of(SimpleNamespace(images=images, data=data), config)

    assert images_of("pictures", "root") == ("own", "pictures")
    assert images_of(None, "root") == ("root", "shapes", "val")
    with pytest.raises(
        BadInput, match=r"^give --data ROOT, the folder with one folder per"
    ):
        images_of(None, None)


def test_how_a_run_is_fed_and_watched_does_not_name_it():
    crops = (Crops(size=16), Crops(size=16, gray_first=True))
    plain = tiny_pretraining.config(views=ViewsConfig(crops=crops))
    named = train.what_decides(plain)
    watched = {"save_minutes": 9.0, "log_every": 3, "knn_every": 2}
    watched |= {"probe": {"a": "b"}, "expected": ("x",)}
    watched["data"] = Data(dataset="shapes", workers=5)
    other = tiny_pretraining.config(views=ViewsConfig(crops=crops), **watched)
    assert train.what_decides(other) == named
    assert not {"save_minutes", "log_every", "knn_every", "probe", "expected"} & set(
        named
    )
    assert "workers" not in named["data"]
    # Where colours turn gray is named where it is not as it always was
    first, second = named["views"]["crops"]
    assert "gray_first" not in first
    assert second["gray_first"] is True
    for change in ({"batch_size": 16}, {"seed": 1}, {"data": Data(dataset="other")}):
        assert train.what_decides(tiny_pretraining.config(**change)) != named


def test_the_origin_of_a_checkpoint_is_told(monkeypatch):
    config = tiny_pretraining.config(expected=("lorac:1:lorac:resnet50:200",))
    found = SimpleNamespace(
        paths=("a", "b", "c"), labels=(0, 1, 1), classes=("x", "y"), array=no_image
    )
    listed = type("Listed", (SimpleNamespace,), {"__len__": lambda self: 3})
    about = train.provenance(config, listed(**vars(found)), 4, torch.device("cpu"))
    assert about["name"] == "test"
    assert about["processes"] == 4
    assert about["expected"] == ["lorac:1:lorac:resnet50:200"]
    assert about["recipe"]["batch_size"] == 8
    fingerprint = about["data"].pop("fingerprint")
    assert about["data"] == {
        "dataset": "shapes",
        "split": "train",
        "images": 3,
        "classes": 2,
    }
    assert len(fingerprint) == 12 and int(fingerprint, 16)
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"].keys() == {"backbench", "torch", "torchvision", "python"}
    assert about["device"] == platform.machine()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 {device}")
    on_gpu = train.provenance(config, listed(**vars(found)), 4, torch.device("cuda:1"))
    assert on_gpu["device"] == "H200 cuda:1"


def no_image(index):
    raise BadInput("no image")


# ---- Starting


@pytest.fixture
def started(monkeypatch):
    """started(config, rank, **request): what Fabric is made of, and the log's level afterwards."""
    monkeypatch.setattr(precision, "bf16_is_quick", lambda device: False)
    monkeypatch.setattr(train.distributed, "launch", lambda fabric: fabric)
    precision.warn_if_slow.cache_clear()
    lightning = logging.getLogger("lightning_fabric")
    levels = {logger: logger.level for logger in (train.log, lightning)}

    def start(config, rank=0, **asked):
        def fabric(**made):
            return SimpleNamespace(is_global_zero=rank == 0, **made)

        monkeypatch.setattr(train, "Fabric", fabric)
        keys = {"accelerator": "cpu", "devices": 1, "nodes": 1}
        return train.launch(config, SimpleNamespace(**keys | asked))

    yield start
    for logger, level in levels.items():
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("precision", "autocast"),
    [("fp32", None), ("tf32", None), ("bf16", "bf16-mixed"), ("fp16", "16-mixed")],
)
def test_half_precisions_autocast_and_bf16_says_where_it_is_slow(
    started, caplog, precision, autocast
):
    fabric = started(tiny_pretraining.config(precision=precision))
    assert getattr(fabric.plugins, "precision", None) == autocast
    assert ("bf16 is slower than fp32 here" in caplog.text) is (precision == "bf16")


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (2, 1), (1, 3)])
def test_several_processes_exchange_gradients_and_one_speaks(started, devices, nodes):
    fabric = started(
        tiny_pretraining.config(),
        rank=devices * nodes - 1,
        accelerator="auto",
        devices=devices,
        nodes=nodes,
    )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert (fabric.accelerator, fabric.devices) == (kind, devices)
    assert fabric.num_nodes == nodes
    if devices * nodes == 1:
        assert fabric.strategy == "auto"
        assert train.log.level < logging.ERROR
        return
    assert isinstance(fabric.strategy, DDPStrategy)
    assert fabric.strategy._ddp_kwargs == {
        "broadcast_buffers": False,
        "gradient_as_bucket_view": True,
    }
    assert train.log.level == logging.ERROR


def test_the_trunk_and_the_method_are_drawn_from_seeds_of_their_own():
    narrow = "resnet18,width=0.25"
    config = tiny_pretraining.config(
        seed=5, arch=narrow, zero_init_residual=True, stem="conv3"
    )
    found = SimpleNamespace(classes=("x", "y"), labels=(0, 1))
    listed = type("Four", (SimpleNamespace,), {"__len__": lambda self: 4})
    method = train.build(config, listed(**vars(found)))
    after = torch.rand(3)
    seeding.seed_everything(5, "backbone")
    trunk = archs.build_trunk(narrow, "conv3", zero_init_residual=True)
    for name, value in trunk.state_dict().items():
        assert torch.equal(method.backbone.state_dict()[name], value), name
    seeding.seed_everything(5, "method")
    assert torch.equal(torch.rand(3), after)  # this method draws nothing


@pytest.mark.parametrize(
    ("last", "first_step", "each", "made", "seconds"),
    [
        (1000, 50.0, 2.0, 4, 2.0),
        (1000, 50.0, 5.9, 3, 5.9),
        (1000, 50.0, 6.0, 2, 6.0),
        (3, 50.0, 1.0, 3, 1.0),
        (1, 50.0, 1.0, 1, 50.0),
    ],
)
def test_the_first_step_is_not_timed_unless_it_is_the_only_one(
    monkeypatch, *, last, first_step, each, made, seconds
):
    clock = SimpleNamespace(now=100.0)
    steps = []

    def step(number):
        steps.append(number)
        clock.now += each if number else first_step

    def training(*parts):
        clock.now += 1000  # making it is no step
        return SimpleNamespace(last=last, step_without_log=step)

    monkeypatch.setattr(train, "Training", training)
    monkeypatch.setattr(train.time, "monotonic", lambda: clock.now)
    for part in ("images_of", "launch", "build", "loader_workers"):
        monkeypatch.setattr(train, part, lambda *_: [1] * 8)
    config = tiny_pretraining.config(batch_size=8)
    assert train.seconds_per_step(config, None) == pytest.approx(seconds)
    assert steps == list(range(made))


def test_a_timed_step_is_a_whole_one_that_is_waited_for():
    did = []

    class Loss:
        def item(self):
            did.append("waited")

    def gradients(parts, step, epoch):
        did.append((parts, step, epoch))
        return [{"loss": Loss()}] * len(parts)

    training = SimpleNamespace(
        config=tiny_pretraining.config(accumulate=2),
        batches=iter("abcd"),
        refuse_unreadable=lambda parts: did.append(("readable", parts)),
        gradients=gradients,
        update=did.append,
    )
    Training.step_without_log(training, 3)
    parts = ["a", "b"]
    assert did == [("readable", parts), (parts, 3, 0), "waited", "waited", 4]


# ---- Steps


def test_gradients_of_micro_batches_are_those_of_their_mean(monkeypatch):
    """Ranks exchange them with the last; a batch knows its place in the run."""
    monkeypatch.setattr(
        train.data, "finish_views", lambda loaded, views, form: loaded.views
    )
    config = tiny_pretraining.config(epochs=7, accumulate=2)
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    silent, batches, checked = [], [], []

    @contextlib.contextmanager
    def no_backward_sync(model, enabled):
        silent.append(enabled)
        yield

    def model(batch):
        batches.append(batch)
        return {"loss": (weight * batch.views).sum(), "rank": weight.sum()}

    training = SimpleNamespace(
        config=config,
        fabric=SimpleNamespace(
            device=torch.device("cpu"),
            no_backward_sync=no_backward_sync,
            backward=torch.Tensor.backward,
        ),
        form=None,
        model=model,
        rules=SimpleNamespace(
            terms=lambda terms: terms,
            gradients=lambda: checked.append(float(weight.grad)),
        ),
        total=80,
    )
    parts = [
        SimpleNamespace(views=view, labels=torch.tensor([n]), index=torch.tensor([n]))
        for n, view in enumerate((2.0, 8.0))
    ]
    terms = Training.gradients(training, parts, 20, 2)
    assert checked == [5.0]
    assert silent == [True, False]
    assert [float(each["loss"]) for each in terms] == [6.0, 24.0]
    assert not any(x.requires_grad for each in terms for x in each.values())
    for number, batch in enumerate(batches):
        place = (batch.step, batch.epoch, batch.epochs, batch.progress)
        assert place == (20, 2, 7, 0.25)
        assert int(batch.labels) == int(batch.index) == number


@pytest.mark.parametrize("norm", [None, 0.5])
def test_an_update_clips_steps_and_forgets_then_tells_the_method(norm):
    did = []

    def zero_grad(*, set_to_none):
        did.append(set_to_none)

    training = SimpleNamespace(
        config=tiny_pretraining.config(optim=Optim(lr=0.1, clip_norm=norm)),
        fabric=SimpleNamespace(
            clip_gradients=lambda *what, **how: did.append((what, how))
        ),
        model="model",
        stepper=SimpleNamespace(
            step=lambda: did.append("step"),
            zero_grad=zero_grad,
        ),
        method=SimpleNamespace(after_step=did.append),
        rules=SimpleNamespace(state=lambda: did.append("rules")),
        total=8,
    )
    Training.update(training, 6)
    how = {"max_norm": 0.5, "error_if_nonfinite": False}
    clipped = [] if norm is None else [(("model", training.stepper), how)]
    assert did == [*clipped, "step", True, 0.75, "rules"]


def test_a_loss_that_another_rank_has_found_is_named_by_this_step():
    recent = RecentTerms()
    recent.add([{"loss": torch.tensor(1.0)}], torch.device("cpu"))
    training = SimpleNamespace(recent=recent, rates=SimpleNamespace(at=float))
    training.state = SimpleNamespace(last_good=lambda: "nothing is kept")
    assert str(Training.loss_failure(training, None, step=9)) == (
        "the loss is nan at step 9 (lr 9); nothing is kept; a lower optim.lr, a longer"
        " optim.warmup_epochs or precision=fp32 may help"
    )


def test_a_state_is_taken_up_with_its_scale_and_its_terms(tmp_path, caplog):
    caplog.set_level("INFO", "backbench")
    scales = []
    scaler = SimpleNamespace(
        state_dict=lambda: {"scale": 4.0}, load_state_dict=scales.append
    )
    fabric = SimpleNamespace(
        global_rank=0,
        device=torch.device("cpu"),
        strategy=SimpleNamespace(precision=scaler),
    )

    def state(value, recipe="recipe"):
        method = torch.nn.Linear(2, 2, bias=False)
        method.weight.data.fill_(value)
        optimizer = torch.optim.SGD(method.parameters(), 0.1, momentum=0.9)
        method.weight.grad = torch.full((2, 2), value)
        optimizer.step()
        return SavedState(tmp_path, recipe, fabric, method, optimizer)

    first, other = state(1.0), state(2.0)
    step, none = other.resume(9)
    assert (step, len(none), scales) == (0, 0, [])
    assert first.last_good() == "no state was saved before"
    recent = RecentTerms()
    recent.add([{"loss": torch.tensor(3.0)}], torch.device("cpu"))
    first.save(5, recent)
    step, terms = other.resume(9)
    assert (step, terms.mean(), scales) == (5, {"loss": 3.0}, [{"scale": 4.0}])
    assert torch.equal(other.method.weight, first.method.weight)
    for one, two in zip(
        first.optimizer.state.values(), other.optimizer.state.values(), strict=True
    ):
        assert torch.equal(one["momentum_buffer"], two["momentum_buffer"])
    assert f"{tmp_path}: continuing at step 5 of 9" in caplog.text
    # Other ranks write nothing
    fabric.global_rank = 1
    other.save(7, recent)
    assert first.last_good().endswith("state.pt, at step 5")
    with pytest.raises(BadInput, match=r"state\.pt: the state of another recipe; move"):
        state(1.0, "other").resume(9)
