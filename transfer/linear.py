"""`backbench linear`: what frozen features are worth to a linear head, neighbours or a few labels.

All checkpoints see the same decoded images, in one pass per dataset. How a number is made stands in
the file of its probe, `transfer/probe_<kind>.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.datasets import catalog, splits
from backbench.images import contents
from backbench.recipes import config, own_probe
from backbench.results import store
from backbench.results.store import Result
from backbench.runs.folder import open_run
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log
from backbench.tasks import by_kind
from backbench.weights.checkpoint import Checkpoint
from transfer import scoring
from transfer.devices import Machine, read_checkpoints, start_for
from transfer.feature_cache import FeatureCache
from transfer.features import Extractor
from transfer.frozen import FrozenTrunk, kept_head
from transfer.probe_kind import probe_of
from transfer.protocols import Protocol, load_protocol, of_verb
from transfer.scoring import Assignment

TASKS = by_kind("linear")  # kind of protocol -> task


@dataclass(frozen=True)
class ProbeGroup:
    """Checkpoints that are probed together: by one protocol on some datasets."""

    protocol: Protocol
    checkpoints: tuple[Checkpoint, ...]
    datasets: tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    """The verb `linear`."""
    # A protocol or dataset that does not exist is said before files are read
    named = None if args.protocol == own_probe.OWN else _protocol(args.protocol)
    names = catalog.names(args.datasets)
    checkpoints = read_checkpoints(args.checkpoints)
    if named is not None:
        groups = [ProbeGroup(named, tuple(checkpoints), tuple(names))]
    else:
        groups = own_groups(checkpoints, names)
    machine = start_for(args)
    with machine.rank_0_tells():
        rows = evaluate(groups, data=args.data, out=args.out, seed=args.seed, machine=machine)
    if machine.main:
        scoring.show(rows)
    return 0


def _protocol(name: str) -> Protocol:
    return load_protocol(name, of_verb("linear"))


def own_groups(checkpoints: Sequence[Checkpoint], names: Sequence[str]) -> list[ProbeGroup]:
    """`--protocol own`: for each dataset, the checkpoints that share a protocol together."""
    groups = []
    for dataset in names:
        of_protocol: dict[str, list[Checkpoint]] = {}
        for c in checkpoints:
            own = own_probe.of_checkpoint(c.name, c.method, c.provenance, dataset)
            log.info(f"{c.name}: {dataset} by its own probe, {own}")
            of_protocol.setdefault(own, []).append(c)
        for own, together in of_protocol.items():
            groups.append(ProbeGroup(_protocol(own), tuple(together), (dataset,)))
    return groups


def evaluate(
    groups: Sequence[ProbeGroup], *, data: Path, out: Path, seed: int, machine: Machine
) -> list[Result]:
    """Every group's checkpoints on its datasets -> the rows of OUT/results.jsonl."""
    # 1. Everything is read and refused before the first feature is computed.
    work: list[tuple[Assignment[Protocol], ProbeGroup]] = []
    read: dict[str, splits.Splits] = {}
    for group in groups:
        for name in group.datasets:
            if name not in read:
                read[name] = catalog.load(name, data, seed=seed)
            work.append((_assignment(name, read[name], group.protocol, out=out, seed=seed), group))
    for task, group in work:
        probe_of(group.protocol.kind).refuse(group.protocol, task.dataset.name, task.splits)
    for group in groups:
        if group.protocol.head:
            for checkpoint in group.checkpoints:
                kept_head(checkpoint, group.protocol.head)
    # 2. The folder is this run's, or becomes it.
    opening = open_run(out, verb="linear", identity=_identity(work, seed))
    together = [pair for pair in work if probe_of(pair[1].protocol.kind).together]
    alone = [pair for pair in work if not probe_of(pair[1].protocol.kind).together]
    with machine.agreement.together(opening if machine.main else None), StopFlag() as stop:
        if machine.main:
            for task, _ in work:
                splits.write_manifests(out, task.dataset.name, task.splits)
            store.owe(out, sum(_owed(task, group) for task, group in work))
        # 3. One dataset after the other; first what all processes train together.
        rows: list[Result] = []
        for task, group in together:
            rows += _one_dataset(task, group.checkpoints, machine, stop)
        if machine.world > 1 and alone:
            machine = _share_features(alone, machine, stop)
            if not machine.main:
                return []
        for task, group in alone:
            rows += _one_dataset(task, group.checkpoints, machine, stop)
    return rows


def _assignment(
    name: str, found: splits.Splits, protocol: Protocol, *, out: Path, seed: int
) -> Assignment[Protocol]:
    return Assignment(
        run=out,
        task=TASKS[protocol.kind],
        dataset=catalog.find(name),
        splits=found,
        hashes=splits.digests(found),
        protocol=protocol,
        seed=seed,
    )


def _owed(task: Assignment[Protocol], group: ProbeGroup) -> int:
    """How many rows a group owes of one dataset."""
    kinds = probe_of(task.protocol.kind).metrics(task.protocol, task.dataset)
    return len(kinds) * len({c.digest for c in group.checkpoints})


def _identity(
    work: Sequence[tuple[Assignment[Protocol], ProbeGroup]], seed: int
) -> dict[str, object]:
    """What decides the numbers of a run: one recipe, or where `own` means several, each dataset's
    with the checkpoints that it is for."""
    recipes: list[dict[str, object]] = []
    digests: list[str] = []
    for task, group in work:
        recipe = config.to_dict(task.protocol)
        if recipe not in recipes:
            recipes.append(recipe)
        digests += [c.digest for c in group.checkpoints]
    identity: dict[str, object] = {
        "recipe": recipes[0] if len(recipes) == 1 else recipes,
        "checkpoints": list(dict.fromkeys(digests)),
        "datasets": {task.dataset.name: task.hashes for task, _ in work},
        "seed": seed,
        contents.KEY: {
            task.dataset.name: contents.of_splits(task.splits.items()) for task, _ in work
        },
    }
    return identity


def _share_features(
    work: Sequence[tuple[Assignment[Protocol], ProbeGroup]], machine: Machine, stop: StopFlag
) -> Machine:
    """All features into the cache, by all ranks together; then each is alone."""
    for task, group in work:
        names = probe_of(task.protocol.kind).metrics(task.protocol, task.dataset)
        pending = task.pending(group.checkpoints, names)
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
