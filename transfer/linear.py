"""`backbench linear`: what frozen features are worth to a linear head, neighbours or a few labels.

All checkpoints see the same decoded images, in one pass per dataset. How a number is made stands in
the file of its probe, `transfer/probe_<kind>.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from backbench import config
from backbench.datasets import catalog, splits
from backbench.results import store
from backbench.results.store import Result
from backbench.runs.folder import open_run
from backbench.runs.state import StopFlag
from backbench.tasks import by_kind
from backbench.weights.checkpoint import Checkpoint
from transfer import scoring
from transfer.config import Protocol, load_protocol
from transfer.feature_cache import FeatureCache
from transfer.features import Extractor
from transfer.frozen import FrozenTrunk, kept_head
from transfer.machine import Machine, read_checkpoints, start_for
from transfer.probe import probe_of
from transfer.scoring import Assignment

TASKS = by_kind("linear")  # kind of protocol -> task


def run(args: argparse.Namespace) -> int:
    """The verb `linear`."""
    recipes = {kind: probe_of(kind).protocol for kind in TASKS}
    protocol = load_protocol(args.protocol, recipes)
    names = catalog.names(args.datasets)
    checkpoints = read_checkpoints(args.checkpoints)
    machine = start_for(args)
    where = {"data": args.data, "out": args.out}
    with machine.rank_0_tells():
        rows = evaluate(checkpoints, names, protocol, **where, seed=args.seed, machine=machine)
    if machine.main:
        scoring.show(rows)
    return 0


def evaluate(
    checkpoints: Sequence[Checkpoint],
    names: Sequence[str],
    protocol: Protocol,
    *,
    data: Path,
    out: Path,
    seed: int,
    machine: Machine,
) -> list[Result]:
    """All `checkpoints` on all datasets by one protocol -> the rows of OUT/results.jsonl."""
    # 1. Everything is read and refused before the first feature is computed.
    probe = probe_of(protocol.kind)
    tasks: list[Assignment[Protocol]] = []
    for name in names:
        found = catalog.load(name, data, seed=seed)
        tasks.append(
            Assignment(
                run=out,
                task=TASKS[protocol.kind],
                dataset=catalog.find(name),
                splits=found,
                hashes=splits.digests(found),
                protocol=protocol,
                seed=seed,
            )
        )
    for task in tasks:
        probe.refuse(protocol, task.dataset.name, task.splits)
    if protocol.head:
        for checkpoint in checkpoints:
            kept_head(checkpoint, protocol.head)
    # 2. The folder is this run's, or becomes it.
    identity = {
        "recipe": config.without_later(protocol),
        "checkpoints": [c.digest for c in checkpoints],
        "datasets": {task.dataset.name: task.hashes for task in tasks},
        "seed": seed,
    }
    opening = open_run(out, verb="linear", identity=identity)
    with machine.agreement.together(opening if machine.main else None), StopFlag() as stop:
        if machine.main:
            for task in tasks:
                splits.write_manifests(out, task.dataset.name, task.splits)
            kinds = sum(len(probe.metrics(protocol, task.dataset)) for task in tasks)
            store.owe(out, kinds * len({c.digest for c in checkpoints}))
        # 3. One dataset after the other.
        if machine.world > 1 and not probe.together:
            machine = _share_features(tasks, checkpoints, machine, stop)
            if not machine.main:
                return []
        rows: list[Result] = []
        for task in tasks:
            rows += _one_dataset(task, checkpoints, machine, stop)
    return rows


def _share_features(
    tasks: Sequence[Assignment[Protocol]],
    checkpoints: Sequence[Checkpoint],
    machine: Machine,
    stop: StopFlag,
) -> Machine:
    """All features into the cache, by all ranks together; then each is alone."""
    for task in tasks:
        names = probe_of(task.protocol.kind).metrics(task.protocol, task.dataset)
        pending = task.pending(checkpoints, names)
        if pending:
            extractor = _extractor(task, pending, machine, stop)
            extractor.of_splits(task.splits, task.dataset.name)
    # What follows is rank 0's work, and may outlast the patience of an exchange.
    return machine.alone()


def _one_dataset(
    task: Assignment[Protocol],
    checkpoints: Sequence[Checkpoint],
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    """The rows of all checkpoints, in their order; what RUN has already is not measured again."""
    probe = probe_of(task.protocol.kind)
    by_digest = task.done(checkpoints, probe.metrics(task.protocol, task.dataset))
    digests = [c.digest for c in checkpoints]
    pending = [c for c, digest in zip(checkpoints, digests) if digest not in by_digest]
    if pending:
        extractor = _extractor(task, pending, machine, stop)
        for r in probe.measure(task, extractor, machine, stop):
            by_digest.setdefault(r.checkpoint, []).append(r)
        task.state_file.unlink(missing_ok=True)
    rows: list[Result] = []
    for digest in digests:
        rows += by_digest.get(digest, [])  # ranks other than 0 have none of the fresh ones
    return rows


def _extractor(
    task: Assignment[Protocol],
    checkpoints: Sequence[Checkpoint],
    machine: Machine,
    stop: StopFlag,
) -> Extractor:
    p = task.protocol
    trunks = [
        FrozenTrunk.build(c, device=machine.device, precision=p.precision, head=p.head)
        for c in checkpoints
    ]
    return Extractor(
        trunks=trunks,
        geometry=p.geometry,
        cache=FeatureCache.default(),
        machine=machine,
        batch=p.feature_batch,
        run=task.run,
        stop=stop,
    )
