"""`backbench semisup` and `finetune` train all layers, on 1%, 10% or all of the labels.

The network is trained with each head rate of the grid, validation images choose the best, and the
final network scores the test split once. The trunk's rate is the head's divided by
`head_over_trunk`. Batch norm uses the statistics of the global batch, so the number of processes
changes nothing.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.datasets import catalog, splits
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.images.preprocess import normalise
from backbench.parallel import batchnorm, distributed, precision
from backbench.records import store
from backbench.records.store import Result
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.options import Outcome
from backbench.runs import price, seeding
from backbench.runs.folder import STATES, open_run
from backbench.runs.resumable import ResumableSteps
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.stats import training_noise
from backbench.tasks import TASKS
from backbench.transfer import keeping, scoring
from backbench.transfer.assignment import Assignment, identity_of
from backbench.transfer.devices import Machine, read_checkpoints, start_for
from backbench.transfer.features import batches
from backbench.transfer.finetune_protocol import Finetune, Part
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.protocol import TrunkGeometry
from backbench.transfer.protocols import load_protocol
from backbench.transfer.scoring import best_of
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.own_size import own_size
from backbench.weights.trunk import Trunk

SHOW_EVERY = 20  # steps; reading a loss waits for the device


def run_semisup(
    request: SemisupRequest, checkpoint: Checkpoint | None = None
) -> Outcome:
    """Run the verb `semisup`; `checkpoint` is the file's, where the caller has read it already."""
    protocol = load_protocol(request.protocol, ["finetune"], request.overrides)
    assert isinstance(protocol, Finetune)
    part = protocol.parts.get(str(request.percent))
    dataset = request.dataset or protocol.dataset
    if dataset is None:
        raise BadInput(
            f"--protocol {request.protocol}: names no dataset; use a semi-supervised protocol, as"
            " `semisup`"
        )
    if part is None:
        raise BadInput(
            f"--protocol {request.protocol}: has no part for {request.percent}%; use a"
            " semi-supervised protocol, as `semisup`"
        )
    # A published list belongs to the protocol's own dataset.
    if dataset != protocol.dataset:
        part = dataclasses.replace(part, list=None)
        parts = {**protocol.parts, str(request.percent): part}
        protocol = dataclasses.replace(protocol, dataset=dataset, parts=parts)
    if request.lists is None and part.list is not None:
        raise BadInput(
            f"--protocol {request.protocol}: measures on a published list of {dataset}; give --lists DIR"
            " (`backbench data fetch-splits --out DIR` fetches it)"
        )
    listed: dict[str, int] | None = None
    where = f"a list of {request.percent}% that seed {request.seed} draws"
    if request.lists is not None:
        file = request.lists / f"{request.percent}percent.txt"
        published = {} if part.list is None else dataclasses.asdict(part.list)
        listed = splits.read_list(file, **published)
        where = str(file)
    images = catalog.load(dataset, request.data, seed=request.seed)
    drawn = listed is None
    if listed is None:
        pool = images.both() if images.held_out else images.train
        listed = splits.drawn_list(pool, request.percent, request.seed)
        log.info(
            f"{dataset}: no --lists, so {len(listed)} of {len(pool)} labels are drawn"
        )
    return _run(
        request,
        checkpoint,
        protocol,
        part,
        dataclasses.replace(
            labelled_part(images, listed, where, request.seed), drawn_labels=drawn
        ),
        task_name=f"semi_{request.percent}pct",
        dataset=dataset,
    )


def run(request: FinetuneRequest, checkpoint: Checkpoint | None = None) -> Outcome:
    """Run the verb `finetune`; `checkpoint` is the file's, where the caller has read it already."""
    protocol = load_protocol(request.protocol, ["finetune"], request.overrides)
    assert isinstance(protocol, Finetune)
    part = protocol.parts.get("100")
    if part is None:
        raise BadInput(
            f"--protocol {request.protocol}: has no part for all labels; use `finetune`,"
            " or `backbench semisup`"
        )
    images = catalog.load(request.dataset, request.data, seed=request.seed)
    splits.refuse_untrainable(request.dataset, images)
    return _run(
        request,
        checkpoint,
        protocol,
        part,
        images,
        task_name="finetune",
        dataset=request.dataset,
    )


def labelled_part(
    images: Splits, listed: Mapping[str, int], where: str, seed: int
) -> Splits:
    """Keep only the labels of the list `listed` (image -> line), for the choice of the rate as well.
    `where` names the list."""
    # Without an official val, a part of the list is held out to choose the rate. An official val
    # chooses, and trains nothing.
    train = images.both() if images.held_out else images.train
    part = train.subset(splits.select(train, listed, where=where))
    note = (*images.notes, f"{len(part)} labelled images from {Path(where).name}")
    if images.held_out:
        return splits.with_hold_out(part, images.test, seed=seed, notes=note)
    return Splits(part, images.val, images.test, False, note)


def _run(
    request: SemisupRequest | FinetuneRequest,
    checkpoint: Checkpoint | None,
    protocol: Finetune,
    part: Part,
    images: Splits,
    *,
    task_name: str,
    dataset: str,
) -> Outcome:
    if checkpoint is None:
        (checkpoint,) = read_checkpoints([request.checkpoint])
    machine = start_for(request)
    size = None
    if isinstance(protocol.geometry, TrunkGeometry):
        own = own_size(checkpoint)
        size = protocol.geometry.size(own.pixels)
        if machine.main:
            log.info(f"{checkpoint.name}: {own.told(size)}")
    task = Assignment(
        run=request.out,
        task=task_name,
        dataset=catalog.find(dataset),
        splits=images,
        protocol=protocol,
        seed=request.seed,
        checkpoints=(checkpoint,),
        own_size=size,
    )
    identity = identity_of([task]) | {"task": task_name}
    opening = open_run(request.out, verb=TASKS[task_name].verb, identity=identity)
    with (
        machine.rank_0_tells(),
        machine.agreement.together(opening if machine.main else None),
    ):
        if machine.main:
            splits.write_manifests(request.out, dataset, images)
            store.owe(request.out, len(task.dataset.metrics))
        rows = finetune(task, part, machine)
    if not machine.main:
        return Outcome()
    keeping.show(rows)
    return Outcome(document=keeping.recorded(request.out))


def finetune(task: Assignment[Finetune], part: Part, machine: Machine) -> list[Result]:
    """Try every rate of the grid, choose one, train the final network, and score test. Return the
    rows; ranks other than 0 return none."""
    (checkpoint,) = task.checkpoints
    done = task.done(keeping.recorded(task.run), task.dataset.metrics)
    if checkpoint.digest in done:
        return done[checkpoint.digest]
    p = task.protocol
    with StopFlag() as stop:
        work = Finetuning(task, part, machine, stop)
        if machine.main:
            used = []
            for lr in p.head_lr:
                used.append(f"{p.used(lr):g}/{p.used(lr) / part.head_over_trunk:g}")
            log.info(
                f"{task.dataset.name} {task.task}: head/trunk rates as used {', '.join(used)}"
                f" (declared for {p.reference_batch} images,"
                f" times {p.batch_size}/{p.reference_batch})"
            )
            work.announce()
        # 1. Each rate is tried on train and scored on val, unless there is nothing to choose.
        tried = work.try_rates()
        lr = p.head_lr[best_of(tried.scores)] if tried.scores else p.head_lr[0]
        # 2. The network that counts: trained again with val, or the one that was best.
        network = work.new_network()
        if work.refits:
            work.train(network, task.splits.both(), lr, "final")
        else:
            network.load(tried.best)
        # 3. The one look at test.
        ranking = work.predict(network, task.splits.test)
    if not machine.main:
        return []
    chosen = {
        "lr": lr,
        "lr_used": p.used(lr),
        "trunk_lr_used": p.used(lr) / part.head_over_trunk,
        "reference_batch": p.reference_batch,
        "batch_size": p.batch_size,
        "on": "val" if tried.scores else None,
        "trained_on": "train+val" if work.refits else "train",
        "scores": {f"{rate:g}": score for rate, score in zip(p.head_lr, tried.scores)},
        "at_edge": scoring.warn_edge(
            task, checkpoint, "head rate", lr, p.head_lr, scores=tried.scores
        ),
    }
    if tried.scores:
        # How much the choice among the rates would vary with other validation images
        label = np.asarray(task.splits.val.labels)
        classes = None if task.dataset.metric == "top1" else label
        hits = torch.stack(tried.predicted).numpy() == label
        chosen["choice_noise"] = training_noise.of_choice(hits, classes) ** 0.5
    predictions = CheckpointPredictions(
        checkpoint=checkpoint, ranking=ranking, chosen=chosen
    )
    rows = keeping.write(task, [predictions])
    work.tried_file.unlink(missing_ok=True)
    work.training_file.unlink(missing_ok=True)
    return rows


@dataclass
class TriedRates:
    """The part of the grid that is done."""

    scores: list[float] = field(default_factory=list)  # on val, of each finished rate
    # The classes (N,) of the val images by each finished rate
    predicted: list[Tensor] = field(default_factory=list)
    # The weights of the best network; none where the best rate trains again
    best: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Finetuning:
    """Trains one checkpoint on one part of the labels; each training can be stopped at any step.
    RUN/state holds two files: `tried_file` has the part of the grid that is done, and
    `training_file` the training in progress, with its rate and its number of images, so that no
    other training continues from it."""

    task: Assignment[Finetune]
    part: Part
    machine: Machine
    stop: StopFlag

    @property
    def tried_file(self) -> Path:
        return self.task.run / STATES / "grid.state"

    @property
    def training_file(self) -> Path:
        return self.task.run / STATES / "training.state"

    @property
    def refits(self) -> bool:
        """True if the best rate trains again, with val."""
        # A hold-out is a part of what may be trained on, and so is the official val in finetuning.
        # Semi-supervised training with an official val has used its whole list already.
        return self.task.splits.held_out or self.task.task == "finetune"

    def new_network(self) -> "Network":
        task = self.task
        classes = len(task.splits.train.classes)
        return Network(
            task.checkpoints[0], classes, task.protocol, task.seed, self.machine
        )

    def announce(self) -> None:
        """Say what is left to be trained, on how many images, in how many steps."""
        p, splits = self.task.protocol, self.task.splits
        length, batch = self.part.length, p.batch_size
        trainings = 0
        if len(p.head_lr) > 1 or not self.refits:
            trainings = len(p.head_lr)
            if self.tried_file.exists():
                trainings -= len(load_state(self.tried_file)["scores"])
        steps = trainings * length.steps(len(splits.train), batch)
        if self.refits:
            steps += length.steps(len(splits.both()), batch)
            trainings += 1
        cheaper = ""
        if self.machine.device.type == "cpu":
            cheaper = "`backbench linear --protocol logreg` trains a head alone and costs less"
        price.announce(
            f"{self.task.task} on {self.task.dataset.name}",
            f"{p.name} (all layers, {price.plural(trainings, 'training')}, {batch} images a step)",
            f"{len(splits.train)} + {len(splits.val)} labelled images, {len(splits.test)} to test",
            work={"step": steps},
            cheaper=cheaper,
        )

    def try_rates(self) -> TriedRates:
        """Train the rates that are left on train and score them on val. What is done is saved after
        each."""
        task, p = self.task, self.task.protocol
        tried = TriedRates()
        if self.tried_file.exists():
            tried = TriedRates(**load_state(self.tried_file))
        if len(p.head_lr) == 1 and self.refits:
            return tried  # nothing to choose
        label = np.asarray(task.splits.val.labels)
        classes = len(task.splits.train.classes)
        for index in range(len(tried.scores), len(p.head_lr)):
            lr = p.head_lr[index]
            network = self.new_network()
            what = f"rate {index + 1} of {len(p.head_lr)}"
            self.train(network, task.splits.train, lr, what)
            prediction = self.predict(network, task.splits.val)[:, 0].cpu()
            score = scoring.score(
                task.dataset.metric, prediction.numpy(), label, classes
            )
            tried.scores.append(score)
            tried.predicted.append(prediction)
            if not self.refits and best_of(tried.scores) == index:
                tried.best = network.state()
            if self.machine.main:
                log.info(
                    f"{task.checkpoints[0].name}: head rate {lr:g}: val {score:.2f}"
                )
                save_state(self.tried_file, vars(tried))
        return tried

    def train(
        self, network: "Network", images: ImageList, lr: float, what: str
    ) -> None:
        """Train at the head rate `lr` (as declared), from where a stopped training ended."""
        task, p, machine = self.task, self.task.protocol, self.machine
        batch = p.batch_size
        if batch % machine.world:
            raise BadInput(
                f"a batch of {batch} images on {machine.world} processes:"
                " use a number that divides it"
            )
        total = self.part.length.steps(len(images), batch)
        # A state with another key is of another training, and is not continued.
        key = json.dumps([what, lr, len(images)])
        first = self._resume(network, key)
        progress = None
        if machine.main:
            progress = Progress(task.run, total, f"{task.task} {what}", done=first)
        steps = ResumableSteps(
            first,
            total,
            stop=self.stop,
            agreement=machine.agreement,
            progress=progress,
            save=lambda done: self._save(network, key, done),
            due=lambda done, age: age > 60 * p.save_minutes,
        )
        labels = torch.tensor(images.labels, device=machine.device)
        peaks = {"trunk": p.used(lr) / self.part.head_over_trunk, "head": p.used(lr)}
        network.module.train()
        # This rank's share of each global batch
        seed = task.seed
        shares = batches.rank_batches(
            seed, len(images), batch, first, total, machine=machine
        )
        found = batches.training_pictures(
            images, task.views(p.augment), shares, seed=seed, machine=machine
        )
        for step, (pixels, index) in zip(steps, found):
            # 1. The rates of this step.
            factor = p.factor(step, total, len(images) / batch)
            for group in network.optimizer.param_groups:
                group["lr"] = peaks[group["of"]] * group["scale"] * factor
            # 2. The loss, summed over this rank's share and divided by the global batch: gradients
            #    then add up over ranks to those of the whole batch's mean.
            logits = network(pixels.to(machine.device, non_blocking=True))
            share = labels[distributed.sent(index, machine.device)]
            loss = F.cross_entropy(logits, share, reduction="sum") / batch
            network.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            network.sum_gradients(machine)
            network.optimizer.step()
            if machine.main and step % SHOW_EVERY == first % SHOW_EVERY:
                steps.show(loss=float(loss.detach()) * machine.world)

    def _save(self, network: "Network", key: str, step: int) -> None:
        if self.machine.main:
            momentum = network.optimizer.state_dict()["state"]
            state = {
                "key": key,
                "step": step,
                "network": network.state(),
                "momentum": momentum,
            }
            save_state(self.training_file, state)

    def _resume(self, network: "Network", key: str) -> int:
        """Return the step to start at: 0, or where a saved state of this training ends."""
        if not self.training_file.exists():
            return 0
        state = load_state(self.training_file)
        if state["key"] != key:
            return 0
        network.load(state["network"])
        whole = network.optimizer.state_dict()
        network.optimizer.load_state_dict({**whole, "state": state["momentum"]})
        return int(state["step"])

    @torch.no_grad()
    def predict(self, network: "Network", images: ImageList) -> Tensor:
        """Return the five best classes (N, 5) of every image; the ranks share the images."""
        p, machine = self.task.protocol, self.machine
        network.module.eval()
        size = p.feature_batch
        count = len(images)
        shares = batches.equal_shares(0, count, size, machine.rank, machine.world)
        centred = batches.Pictures(images, batches.centred(self.task.geometry))
        pictures = batches.loader(centred, shares, machine=machine)
        out = []
        for begin, (pixels, _) in zip(range(0, count, size), pictures):
            mine = network(pixels.to(machine.device, non_blocking=True))
            logits = distributed.gather_without_gradient(mine)
            real = min(size, count - begin)  # the rest is padding
            out.append(scoring.rank_classes(logits[:real]))
            machine.preempt(self.stop, "while scoring")  # where a signal has come
        ranking = torch.cat(out)
        # -1 stands where a network has no opinion, as its scores are no numbers
        if bool((ranking < 0).all()):
            log.warning(
                f"{images.root}: the network's scores are not finite; this rate diverged"
            )
        return ranking


class Network:
    """A trunk and a linear head, with their optimiser."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        classes: int,
        p: Finetune,
        seed: int,
        machine: Machine,
    ) -> None:
        self.pixels = checkpoint.pixels
        trunk = checkpoint.backbone()
        head = nn.Linear(trunk.feature_dim, classes)
        generator = seeding.generator(seed, "head", classes, trunk.feature_dim)
        nn.init.normal_(head.weight, 0, p.init_std, generator=generator)
        nn.init.zeros_(head.bias)
        module: nn.Module = nn.Sequential(trunk, head)
        if machine.world > 1:
            module = batchnorm.convert_sync_batchnorm(module)
        # On a CPU small maps train slower with channels last.
        on_gpu = machine.device.type == "cuda"
        self.layout = trunk.memory_format if on_gpu else torch.contiguous_format
        self.module = module.to(machine.device).to(memory_format=self.layout)
        # `Finetuning.train` sets the rates in each step.
        groups = parameter_groups(trunk, head, p)
        self.optimizer: torch.optim.Optimizer
        if p.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=p.betas)
        else:
            self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=p.momentum)
        precision.use(p.precision)
        self.bf16 = p.precision == "bf16"
        if self.bf16:
            precision.warn_if_slow(machine.device.type)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Map images (N, 3, H, W) uint8 to logits (N, C) float32."""
        images = normalise(pixels, self.pixels).contiguous(memory_format=self.layout)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return self.module(images).float()

    def sum_gradients(self, machine: Machine) -> None:
        """Add up the gradients of all ranks, in one exchange."""
        if machine.world == 1:
            return
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        torch.distributed.all_reduce(flat)
        parts = flat.split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts):
            gradient.copy_(part.view_as(gradient))

    def state(self) -> dict[str, Tensor]:
        whole = self.module.state_dict()
        return {name: value.detach().cpu().clone() for name, value in whole.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)


def parameter_groups(
    trunk: Trunk, head: nn.Linear, p: Finetune
) -> list[dict[str, Any]]:
    """Group the trunk's parameters by rate and weight decay, then the head's. `of` names the part
    whose rate a group has, `scale` is a factor on it. SGD decays everything alike. AdamW spares the
    parameters that the trunk names (norms, biases, tokens, positions) and the head's bias."""
    adamw = p.optimizer == "adamw"
    # 1. The trunk's parameters by their scale and decay
    depths = {}
    head_depth = 0
    if p.layer_decay < 1:
        depths = trunk.depths()
        head_depth = max(depths.values()) + 1  # one layer above the last of the trunk
    spared = trunk.undecayed() if adamw else set()
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trunk.named_parameters():
        scale = 1.0
        if depths:
            scale = p.layer_decay ** (head_depth - depths[name])
        decay = 0.0 if name in spared else p.weight_decay
        new = {"params": [], "of": "trunk", "scale": scale, "weight_decay": decay}
        groups.setdefault((scale, decay), new)["params"].append(parameter)
    # 2. The head's weight and bias
    bias_decay = 0.0 if adamw else p.weight_decay
    out = list(groups.values())
    for of_head, decay in ((head.weight, p.weight_decay), (head.bias, bias_decay)):
        out.append(
            {"params": [of_head], "of": "head", "scale": 1.0, "weight_decay": decay}
        )
    return out
