"""A trunk and a head trained together at one rate, and what the network then says of images."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput, Preempted
from backbench.images.image_list import ImageList
from backbench.images.preprocess import normalise
from backbench.parallel import batchnorm, distributed, precision
from backbench.runs import seeding
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk
from transfer import scoring
from transfer.batches import Pictures, equal_shares, loader, rank_batches, training_pictures
from transfer.devices import Machine
from transfer.protocols import Finetune, Part
from transfer.scoring import Assignment

if TYPE_CHECKING:
    from PIL import Image

SHOW_EVERY = 20  # steps; reading a loss waits for the device


class Network:
    """Trunk and head with their optimiser, whose groups say of which part they are (`of`) and
    what their rates are multiplied by (`scale`)."""

    def __init__(
        self, checkpoint: Checkpoint, classes: int, p: Finetune, seed: int, machine: Machine
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
        self.module = module.to(machine.device)
        if machine.device.type == "cuda":  # on a CPU small maps train slower with channels last
            self.module = self.module.to(memory_format=trunk.memory_format)
        groups = parameter_groups(trunk, head, p)
        if p.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.0, betas=p.betas)
        else:
            self.optimizer = torch.optim.SGD(groups, lr=0.0, momentum=p.momentum)
        precision.use(p.precision)
        self.bf16 = p.precision == "bf16"

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (N, 3, H, W) -> logits (N, C) float32."""
        images = normalise(pixels, self.pixels)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return self.module(images).float()

    def state(self) -> dict[str, Tensor]:
        whole = self.module.state_dict()
        return {name: value.detach().cpu().clone() for name, value in whole.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)


def parameter_groups(trunk: Trunk, head: nn.Linear, p: Finetune) -> list[dict[str, Any]]:
    """The optimiser's groups: of the trunk, one for each rate and each weight decay; of the head.

    SGD decays everything alike. AdamW, as vision transformers are finetuned, leaves alone what the
    trunk says (norms, biases, tokens, positions) and the head's bias.
    """
    deepest, depths = 0, {}
    if p.layer_decay < 1:
        depths = trunk.depths()
        deepest = max(depths.values())
    spared = trunk.undecayed() if p.optimizer == "adamw" else set()
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trunk.named_parameters():
        # The head is one layer deeper than the deepest of the trunk
        scale = p.layer_decay ** (deepest + 1 - depths[name]) if depths else 1.0
        decay = 0.0 if name in spared else p.weight_decay
        row = {"params": [], "of": "trunk", "scale": scale, "weight_decay": decay}
        groups.setdefault((scale, decay), row)["params"].append(parameter)
    out = list(groups.values())
    if p.optimizer == "adamw":
        parts = [([head.weight], p.weight_decay), ([head.bias], 0.0)]
    else:
        parts = [(list(head.parameters()), p.weight_decay)]
    for parameters, decay in parts:
        out.append({"params": parameters, "of": "head", "scale": 1.0, "weight_decay": decay})
    return out


@dataclass(kw_only=True)
class NetworkTraining:
    """One network trained at one head rate; stoppable and continuable at any step."""

    network: Network
    task: Assignment[Finetune]
    part: Part
    images: ImageList
    lr: float  # the head's, as declared
    what: str
    machine: Machine
    stop: StopFlag
    file: Path

    def run(self) -> None:
        """All steps that are left."""
        p, machine, network = self.task.protocol, self.machine, self.network
        batch = p.batch_size
        if batch % machine.world:
            raise BadInput(
                f"a batch of {batch} images on {machine.world} processes:"
                " use a number that divides it"
            )
        steps = self.part.length.steps(len(self.images), batch)
        first, shown = self._resume(), 0.0
        labels = torch.tensor(self.images.labels, device=machine.device)
        progress = Progress(
            self.task.run if machine.main else None,
            steps,
            f"{self.task.task} {self.what}",
            done=first,
        )
        head_lr = p.used(self.lr)
        peaks = {"trunk": head_lr / self.part.head_over_trunk, "head": head_lr}
        network.module.train()
        saved = time.monotonic()
        for step, (pixels, index) in zip(range(first, steps), self._batches(first, steps)):
            # 1. The rates of this step.
            factor = p.factor(step, steps, len(self.images) / batch)
            for group in network.optimizer.param_groups:
                group["lr"] = peaks[group["of"]] * group["scale"] * factor
            # 2. The loss, summed over this rank's share and divided by the global batch: gradients
            #    then add up over ranks to those of the whole batch's mean.
            logits = network(pixels.to(machine.device, non_blocking=True))
            share = labels[distributed.sent(index, machine.device)]
            loss = F.cross_entropy(logits, share, reduction="sum") / batch
            network.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._sum_gradients()
            network.optimizer.step()
            if machine.main:
                if step % SHOW_EVERY == first % SHOW_EVERY:
                    shown = float(loss.detach()) * machine.world
                progress.advance(1, loss=shown)
            # 3. A signal reaches one of the ranks; all vote on it in every step, and rank 0 saves.
            stopping = machine.stopping(self.stop)
            if stopping or time.monotonic() - saved > 60 * p.save_minutes:
                self._save(step + 1)
                saved = time.monotonic()
            if stopping and step + 1 < steps:
                raise Preempted(
                    f"stopped by {stopping} at step {step + 1} of {steps};"
                    " the same command continues"
                )

    def _batches(self, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of each global batch: augmented pixels and the images' indices."""
        p, machine, seed = self.task.protocol, self.machine, self.task.seed
        shares = rank_batches(
            seed,
            len(self.images),
            p.batch_size,
            first,
            steps,
            rank=machine.rank,
            world=machine.world,
        )
        yield from training_pictures(self.images, p.augment, shares, seed=seed, machine=machine)

    def _sum_gradients(self) -> None:
        """Over ranks, in one exchange."""
        if self.machine.world == 1:
            return
        gradients = [p.grad for p in self.network.module.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        torch.distributed.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def _key(self) -> str:
        """What a state must be of to be this training's."""
        return json.dumps([self.what, self.lr, len(self.images)])

    def _save(self, step: int) -> None:
        if self.machine.main:
            state = {
                "key": self._key(),
                "step": step,
                "network": self.network.state(),
                "momentum": self.network.optimizer.state_dict()["state"],
            }
            save_state(self.file, state)

    def _resume(self) -> int:
        """The step to start at: 0, or where a saved state of this training ends."""
        if not self.file.exists():
            return 0
        state = load_state(self.file)
        if state["key"] != self._key():
            return 0
        self.network.load(state["network"])
        whole = self.network.optimizer.state_dict()
        self.network.optimizer.load_state_dict({**whole, "state": state["momentum"]})
        return int(state["step"])


@torch.no_grad()
def predict(
    network: Network, images: ImageList, p: Finetune, machine: Machine, stop: StopFlag
) -> Tensor:
    """The five best classes (N, 5) of every image; the ranks share the images."""
    network.module.eval()
    geometric = p.geometry.transform()

    def view(picture: Image.Image, _: None) -> Image.Image:
        return geometric(picture)

    size, count = p.feature_batch, len(images)
    shares = equal_shares(0, count, size, machine.rank, machine.world)
    pictures = loader(Pictures(images, view), shares, machine=machine)
    out = []
    for begin, (pixels, _) in zip(range(0, count, size), pictures):
        mine = network(pixels.to(machine.device, non_blocking=True))
        logits = distributed.gather_without_gradient(mine)
        out.append(scoring.rank_classes(logits[: min(size, count - begin)]))  # the rest is padding
        if stopping := machine.stopping(stop):
            raise Preempted(f"stopped by {stopping} while scoring; the same command continues")
    ranking = torch.cat(out)
    if bool((ranking < 0).all()):
        log.warning(f"{images.root}: the network's scores are not finite; this rate diverged")
    return ranking
