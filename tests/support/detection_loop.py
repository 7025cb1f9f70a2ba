"""Defines an engine of a single number for tests of the training loop, and what ranks do with it."""

import time

import torch

from backbench.detection import measure, process_group, train_net
from backbench.detection.engine import DetectionEngine
from backbench.errors import EXIT_PREEMPTED, Preempted
from backbench.runs.state import StopFlag


class OneNumber(DetectionEngine):
    """Descends on (x - iteration)^2, so that the last x depends on every rate and iteration.

    `at` is called with the iteration in each step. What it returns, if not None, multiplies the loss
    that is told.
    """

    def __init__(self, p, at=None):
        super().__init__(p, torch.device("cpu"))
        self.at = at
        self.rates = {}

    @staticmethod
    def read_config(given):
        raise AssertionError("the tests hand over a config that is read already")

    def build(self):
        number = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(number.weight)
        return number

    def build_optimizer(self):
        return torch.optim.SGD(
            self.model.parameters(), lr=self.cfg.SOLVER.BASE_LR, momentum=0.9
        )

    def stages(self, x):
        return []  # a number has no maps

    def read(self, record):
        return record["image_id"]

    def detect(self, image, record):
        return []  # it finds nothing

    def start(self, records, first, last):
        self.iteration = first

    def losses(self):
        return {"loss_square": (self.model.weight - self.iteration).square().sum()}

    def step(self):
        self.rates[self.iteration] = self.optimizer.param_groups[0]["lr"]
        loss = self.losses()["loss_square"]
        self.amp.descend(loss, self.optimizer)
        told = loss.detach()
        if self.at is not None:
            factor = self.at(self.iteration)
            if factor is not None:
                told = told * factor
        self.iteration += 1
        return {"loss_square": told}


class SlowToSave(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        time.sleep(2 * process_group.GRACE_SECONDS)
        return super().state_dict(*args, **kwargs)


class SlowOneNumber(OneNumber):
    def build(self):
        return SlowToSave(1, 1, bias=False).double()


def stopped_while_saving(run, seat):
    """Train as a rank: a signal reaches rank 1 in iteration 3, and rank 0 saves slowly."""
    stop = StopFlag()

    def at(iteration):
        if iteration == 3 and seat.rank == 1:
            stop.requested = "SIGTERM"

    with process_group.joined(run, seat):
        p = train_net.prepare(run)
        engine = SlowOneNumber(p, at)
        try:
            train_net.train(run, p, engine, seat.rank, stop)
        except Preempted:
            return EXIT_PREEMPTED
    return 0


def long_scored(run, seat):
    """Train as a rank: rank 0 scores, twice, for longer than a collective would wait for it."""
    process_group.JOIN_MINUTES = 1 / 20

    def slow(action):
        def after_a_while(*args):
            time.sleep(5)
            return action(*args)

        return after_a_while

    measure.record = slow(measure.record)
    measure._scores = slow(measure._scores)
    with process_group.joined(run, seat):
        p = train_net.prepare(run)
        train_net.work(run, p, OneNumber(p), seat.rank)
    return 0


def normalised_in_bfloat16(run, seat):
    """Normalise as a rank, by Detectron2's batch norm, a bfloat16 batch that is far from 0.

    The result must be that of float32.
    """
    from backbench.detection.engine_detectron2 import WideSyncBatchNorm

    torch.manual_seed(seat.rank)
    x = (20 + torch.randn(8, 4, 9, 9)).bfloat16()
    with process_group.joined(run, seat):
        y = WideSyncBatchNorm(4).train()(x)
        wide = WideSyncBatchNorm(4).train()(x.float())
    if y.dtype is not torch.bfloat16:
        return 1
    if not torch.allclose(y.float(), wide, atol=0.02):
        return 1
    return 0


def stays(run, seat):
    """Be at work for a minute, as a rank."""
    time.sleep(60)
    return 0
