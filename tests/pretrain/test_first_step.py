"""Each rule of a method, broken once, is told before a second step, in one process and on ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backbench.errors import Failed
from backbench.parallel import distributed
from backbench.pretrain.first_step import FirstStep
from backbench.pretrain.method import Batch, Method


class Good(Method):
    """Keeps every rule, with a queue in a buffer, keys until `after_step`, and a still head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))
        self.still = nn.Parameter(torch.ones(4))
        self.copy = nn.Linear(4, 4).requires_grad_(False)
        # DINO's last layer; torch keeps the weight that it computes in an attribute
        self.head = nn.utils.weight_norm(nn.Linear(4, 4))
        self.register_buffer("queue", torch.zeros(6, 4))
        self.keys = []
        self.size = 6

    def forward(self, batch):
        z = self.head(self.backbone(batch.views[0]))
        still = self.still.detach() + 0.0 * self.still
        self.keys.append(distributed.gather_without_gradient(z))
        loss = distributed.mean_over_ranks((z * still).square().mean())
        return {"loss": loss, "norm": z.detach().norm()}

    def after_step(self, progress):
        keys = torch.cat(self.keys)
        self.queue.copy_(torch.cat([keys, self.queue])[: self.size])
        self.keys.clear()


def terms(change):
    """A method that returns change(method, batch, the right terms)."""

    class Changed(Good):
        def forward(self, batch):
            return change(self, batch, super().forward(batch))

    return Changed


def after(change):
    """A method that does `change` to itself after each step."""

    class Changed(Good):
        def after_step(self, progress):
            super().after_step(progress)
            change(self)

    return Changed


class UnusedBias(Good):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))


class Unused(Good):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 2)


def many_losses(method, batch, right):
    return right | {"loss": method.backbone(batch.views[0]).square().mean(1)}


def only_loss(method, batch, right):
    return right["loss"]


def no_loss(method, batch, right):
    return {"norm": right["norm"]}


def no_number(method, batch, right):
    return right | {"rate": 0.5}


def detached(method, batch, right):
    return {"loss": right["loss"].detach()}


def attached(method, batch, right):
    return right | {"norm": 2 * right["loss"]}


def keep_keys(method):
    method.keys.append(method.queue[:1].clone())


def keep_in_layer(method):
    method.backbone[1].last = {"rows": [method.queue.clone()]}


def keep_in_set(method):
    method.kept = ({method.queue}, {method.queue.clone()})


def say(method):
    method.said = "more"


def count(method):
    method.size += 1


def forget(method):
    method.size = None


BROKEN = {
    "a tensor": (terms(only_loss), "forward returns"),
    "no loss": (terms(no_loss), "forward returns"),
    "many losses": (
        terms(many_losses),
        r"'loss' must be a 0-dim tensor, not shape \(8,\)",
    ),
    "no number": (terms(no_number), "'rate' must be a 0-dim"),
    "detached": (terms(detached), "'loss' has no gradient"),
    "attached": (terms(attached), "'norm' is only logged"),
    "unused": (Unused, "no gradient reaches unused.weight and 1 more"),
    "unused alone": (UnusedBias, "no gradient reaches unused, and several processes"),
    "in a set": (after(keep_in_set), "attribute kept holds a tensor"),
    "a new word": (after(say), "attribute said has changed to 'more' in a step"),
    "keys": (after(keep_keys), "attribute keys holds a tensor"),
    "in a layer": (after(keep_in_layer), "attribute backbone.1.last holds a tensor"),
    "counts": (after(count), "attribute size has changed to 7"),
    "forgets": (after(forget), "attribute size has changed to None"),
}


def batch(step: int, count: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(step)
    views = [distributed.local_slice(torch.randn(count, 3, 2, 2, generator=generator))]
    return Batch(
        views=views,
        labels=None,
        index=torch.arange(len(views[0])),
        step=step,
        epoch=0,
        epochs=1,
        progress=step / 3,
    )


def train(method: Method, *, accumulate: int = 1, steps: int = 3) -> None:
    """The loop's order of calls."""
    model = method
    if distributed.world_size() > 1:
        model = DistributedDataParallel(method)
    trained = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)
    rules = FirstStep(method, "test")
    for step in range(steps):
        for _ in range(accumulate):
            terms = rules.terms(model(batch(step)))
            terms["loss"].backward()
        rules.gradients()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step((step + 1) / steps)
        rules.state()


def test_a_method_that_keeps_the_rules_is_let_through_and_left_alone():
    method = Good()
    before = torch.get_rng_state()
    train(method, accumulate=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert method.queue.abs().sum() > 0


@pytest.mark.parametrize(("kind", "said"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_rule_is_told_by_name(kind, said, accumulate):
    with pytest.raises(Failed, match=said) as caught:
        train(kind(), accumulate=accumulate, steps=1)
    assert "method 'test' breaks a rule of pretrain/method.py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_the_first_step_is_looked_at():
    method = Good()
    rules = FirstStep(method, "test")
    rules.terms(method(batch(0)))["loss"].backward()
    rules.gradients()
    method.after_step(0.5)
    rules.state()
    assert rules.terms({"nothing": torch.ones(3)})
    method.keys.append(torch.ones(1))
    rules.gradients()
    rules.state()


def test_a_loss_that_differs_between_ranks_is_told(monkeypatch):
    """As if a second rank had another loss."""
    monkeypatch.setattr(
        distributed, "gather_without_gradient", lambda x: torch.cat([x, 2 * x])
    )
    with pytest.raises(
        Failed, match=r"loss differs between ranks .*distributed.mean_over_ranks"
    ):
        train(Good(), steps=1)


@pytest.mark.parametrize("sign", [1, -1])
def test_losses_of_ranks_may_differ_by_rounding(monkeypatch, sign):
    """Of losses below 0, too."""
    loss = {"loss": torch.tensor(sign * 2.0, requires_grad=True)}

    def apart(share):
        both = torch.tensor([1.0, 1.0 - share], dtype=torch.float64)
        monkeypatch.setattr(distributed, "gather_without_gradient", lambda x: x * both)
        return FirstStep(Good(), "test")

    assert apart(0.9e-5).terms(loss) is loss
    with pytest.raises(Failed, match=r"differs between ranks \(\[-?2\.0, -?1\.99"):
        apart(1.1e-5).terms(loss)


def own_loss(method, batch, right):
    """The mean over this rank's samples: the gradient is right, the logged number is not."""
    still = method.still.detach() + 0.0 * method.still
    return right | {"loss": (method.backbone(batch.views[0]) * still).exp().mean()}


ON_RANKS = {
    "good": (Good, ""),
    "unused": BROKEN["unused"],
    "counts": BROKEN["counts"],
    "own loss": (
        terms(own_loss),
        "loss differs between ranks .*distributed.mean_over_ranks",
    ),
}


@pytest.mark.slow
def test_ranks_are_told_alike_and_at_once(tmp_path):
    """Under DDP, whose reducer waits for every parameter."""
    children = [
        subprocess.Popen([sys.executable, __file__, str(r), str(tmp_path)])
        for r in (0, 1)
    ]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one == two
    for name, (_, says) in ON_RANKS.items():
        assert re.search(says, one[name]), name
        assert bool(says) == bool(one[name]), name


if __name__ == "__main__":
    rank = int(sys.argv[1])
    folder = Path(sys.argv[2])
    told = dict.fromkeys(ON_RANKS, "")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    for name, (kind, _) in ON_RANKS.items():
        try:
            train(kind(), steps=2)
        except Failed as error:
            told[name] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
