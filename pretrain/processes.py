"""Devices, precision and processes of a pretraining, by Lightning Fabric."""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Literal, TypeVar

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision.amp import MixedPrecision
from lightning_fabric.strategies import DDPStrategy

from backbench.errors import BadInput
from backbench.runs.terminal import log
from pretrain.recipe import PretrainConfig

T = TypeVar("T")
# Fabric's names of the precisions that autocast; fp32 and fp64 are the method's own dtype
AUTOCAST: dict[str, Literal["bf16-mixed", "16-mixed"]] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


class Autocast(MixedPrecision):
    """Autocast as Fabric does it, but a Batch goes in as it is: autocast casts where it must."""

    def convert_input(self, data: T) -> T:
        return data


def launch(config: PretrainConfig, args: argparse.Namespace) -> Fabric:
    """This process as one of devices x nodes, all of them started. Under Slurm or torchrun the
    processes are there already; otherwise Fabric starts this very command once for each device of
    the node."""
    accelerator = args.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda" and torch.cuda.device_count() < args.devices:
        raise BadInput(
            f"--devices {args.devices}: this machine has {torch.cuda.device_count()} GPUs"
        )
    autocast: Autocast | None = None
    if config.precision in AUTOCAST:
        autocast = Autocast(AUTOCAST[config.precision], accelerator)
    strategy: DDPStrategy | str = "auto"
    if args.devices * args.nodes > 1:
        # Methods keep the statistics of batch norm equal; broadcasting queues at every step would
        # cost more
        strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    # Nothing is said of what is as it should be: one process under no Slurm is fine, and torch 2.11
    # knows no other name for `broadcast_buffers`
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(
        accelerator=accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=strategy,
        plugins=autocast,
    )
    fabric.launch()
    if not fabric.is_global_zero:
        log.setLevel(logging.ERROR)
    return fabric
