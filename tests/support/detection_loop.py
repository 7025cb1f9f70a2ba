"""An engine of a single number, for the training loop; and a rank that is stopped with it."""

import time

import torch

from backbench.detection import measure, process_group, train_net
from backbench.detection.engine import DetectionEngine
from backbench.errors import EXIT_PREEMPTED, Preempted
from backbench.runs.state import StopFlag


class OneNumber(DetectionEngine):
    """Descends on (x - iteration)^2, so that the last x depends on every rate and iteration."""

    def __init__(self, p, at=None):
        super().__init__(p, torch.device("cpu"))
        self.at = at or (lambda iteration: None)  # called in each step
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
        """A number has no maps."""
        return []

    def read(self, record):
        return record["image_id"]

    def detect(self, image, record):
        """It finds nothing."""
        return []

    def start(self, records, first, last):
        self.iteration = first

    def losses(self):
        return {"loss_square": (self.model.weight - self.iteration).square().sum()}

    def step(self):
        self.rates[self.iteration] = self.optimizer.param_groups[0]["lr"]
        losses = self.losses()
        self.amp.descend(losses["loss_square"], self.optimizer)
        value = self.at(self.iteration)
        self.iteration += 1
        return {
            k: v.detach() if value is None else v.detach() * value
            for k, v in losses.items()
        }


class SlowToSave(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        time.sleep(2 * process_group.GRACE_SECONDS)
        return super().state_dict(*args, **kwargs)


class SlowOneNumber(OneNumber):
    def build(self):
        return SlowToSave(1, 1, bias=False).double()


def stopped_while_saving(run, seat):
    """For ranks.spawn: a signal reaches rank 1 in iteration 3; rank 0 saves slowly."""
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
    """For ranks.spawn: rank 0 scores, twice, for longer than a collective would wait for it."""
    process_group.JOIN_MINUTES = 1 / 20
    record, values = measure.record, measure._scores

    def slow(action):
        def after_a_while(*args):
            time.sleep(5)
            return action(*args)

        return after_a_while

    measure.record, measure._scores = slow(record), slow(values)
    with process_group.joined(run, seat):
        p = train_net.prepare(run)
        train_net.work(run, p, OneNumber(p), seat.rank)
    return 0


def normalised_in_bfloat16(run, seat):
    """For ranks.spawn: Detectron2's batch norm in bfloat16 far from 0; 0 where it is float32's."""
    from backbench.detection.engine_detectron2 import WideSyncBatchNorm

    torch.manual_seed(seat.rank)
    x = (20 + torch.randn(8, 4, 9, 9)).bfloat16()
    with process_group.joined(run, seat):
        y = WideSyncBatchNorm(4).train()(x)
        wide = WideSyncBatchNorm(4).train()(x.float())
    return int(
        y.dtype is not torch.bfloat16 or not torch.allclose(y.float(), wide, atol=0.02)
    )


def stays(run, seat):
    """For ranks.spawn: at work for a minute."""
    time.sleep(60)
    return 0
