"""`backbench linear` scores frozen features by linear heads, neighbours or a few labels; `backbench
ood` scores heads on other pictures. All checkpoints see the same decoded images, in one pass per
dataset. How a number is made stands in the file of its probe, `transfer/probes/<kind>.py`."""

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backbench.datasets import catalog, splits
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.recipes import own_probe
from backbench.records import store
from backbench.records.store import Result
from backbench.requests.options import Outcome
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.runs import price
from backbench.runs.folder import open_run
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log
from backbench.tasks import TASKS, by_kind
from backbench.transfer import keeping
from backbench.transfer.assignment import Assignment, identity_of
from backbench.transfer.devices import Machine, read_checkpoints, start_for
from backbench.transfer.features.cache import FeatureCache
from backbench.transfer.features.extractor import OWN_FEATURES, Extractor
from backbench.transfer.features.frozen import FrozenTrunk, kept_head
from backbench.transfer.probes.kind import Probe, probe_of
from backbench.transfer.probes.ood import RULES, Ood
from backbench.transfer.probes.sgd import Sgd, TokenProbe
from backbench.transfer.protocol import Protocol, TrunkGeometry
from backbench.transfer.protocols import load_protocol
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.own_size import own_size

TASK_OF = {
    task.kind: name for name, task in TASKS.items() if task.verb in ("linear", "ood")
}
# Checkpoints that are measured together on one dataset, by the same protocol
Group = tuple[str, Protocol, tuple[Checkpoint, ...]]


@dataclass(frozen=True)
class ProbeRun:
    """A run folder with all that is measured in it."""

    folder: Path
    verb: str
    groups: tuple[Assignment[Protocol], ...]


# (dataset, with label maps?, with several labels an image?) -> its images
Images = dict[tuple[str, bool, bool], Splits]


def run(request: LinearRequest | OodRequest) -> Outcome:
    """Run the verbs `linear` and `ood`."""
    # 1. A protocol or dataset that does not exist is reported before any file is read.
    protocols_of(request)
    catalog.names(request.datasets)
    checkpoints = read_checkpoints(request.checkpoints)
    machine = start_for(request)
    with machine.rank_0_tells():
        # 2. Everything is read and refused before the first feature is computed.
        planned = plan_run(request, checkpoints, {})
        # 3. The folder is this run's, or becomes it.
        rows = measure_runs([planned], machine)
    if not machine.main:
        return Outcome()
    keeping.show(rows)
    for line in sayings((row, request.out) for row in rows):
        print(line)
    return Outcome(document=keeping.recorded(request.out))


def sayings(rows: Iterable[tuple[Result, Path]]) -> list[str]:
    """Return what the rows of each reading say together. Each row has the folder of its run.

    Rows that follow from others, as those of `calibrate` and `rescore`, lie in the same folder and
    are no reading's."""
    of_kind: dict[str, list[tuple[Result, Path]]] = {}
    for row, folder in rows:
        kind = TASKS[row.task].kind
        if kind is None:
            continue
        of_kind.setdefault(kind, []).append((row, folder))
    lines = []
    for kind, together in of_kind.items():
        lines += probe_of(kind).sayings(together)
    return lines


def measure_runs(runs: Sequence[ProbeRun], machine: Machine) -> list[Result]:
    """Measure what is missing of each run, and return the rows of all. The price is said once. Only
    a run alone can take several processes."""
    assert machine.world == 1 or len(runs) == 1
    if machine.main:
        passes: list[list[Work]] = []
        for each in runs:
            together, alone = passes_of(each.groups, keeping.recorded(each.folder))
            passes += [*together, *([work] for work in alone)]
        announce(passes, on_cpu=machine.device.type == "cpu")
    rows: list[Result] = []
    for each in runs:
        identity = identity_of(each.groups)
        opening = open_run(each.folder, verb=each.verb, identity=identity)
        with (
            machine.agreement.together(opening if machine.main else None),
            StopFlag() as stop,
        ):
            if machine.main:
                write_down(each.folder, each.groups)
            recorded = keeping.recorded(each.folder)
            rows += evaluate(each.groups, recorded, machine, stop)
    return rows


def protocols_of(request: LinearRequest | OodRequest) -> list[Protocol]:
    """Load the protocols that a request names; none where each checkpoint has its own."""
    if request.protocol == own_probe.OWN:
        return []
    kinds = by_kind(request.verb)
    names = request.protocol.split(",")
    return [load_protocol(name, kinds, request.overrides) for name in names]


def plan_run(
    request: LinearRequest | OodRequest,
    checkpoints: Sequence[Checkpoint],
    images: Images,
) -> ProbeRun:
    """Say all that a request measures in its folder. Images that others have read are taken from
    `images`, and new ones are put there. BadInput for what cannot be measured."""
    several = protocols_of(request)
    chosen: list[Group] = []
    for name in catalog.names(request.datasets):
        if not several:
            chosen += own_groups(checkpoints, name)
        for named in several:
            if isinstance(named, Ood) and named.rule is None:
                for rule in catalog.find(name).rules or RULES[:1]:
                    one = replace(named, rule=rule)
                    chosen.append((name, one, tuple(checkpoints)))
            else:
                chosen.append((name, named, tuple(checkpoints)))
    groups = read_groups(
        chosen,
        data=request.data,
        out=request.out,
        seed=request.seed,
        heads=request.heads if isinstance(request, OodRequest) else None,
        images=images,
    )
    return ProbeRun(request.out, request.verb, tuple(groups))


def own_groups(checkpoints: Sequence[Checkpoint], dataset: str) -> list[Group]:
    """`--protocol own`: the checkpoints by the protocol of their recipe or method."""
    of_protocol: dict[str, list[Checkpoint]] = {}
    for c in checkpoints:
        own = own_probe.of_checkpoint(c.name, c.method, c.provenance, dataset)
        log.info(f"{c.name}: {dataset} by its own probe, {own}")
        of_protocol.setdefault(own, []).append(c)
    groups: list[Group] = []
    for own, together in of_protocol.items():
        groups.append((dataset, load_protocol(own, by_kind("linear")), tuple(together)))
    return groups


def read_groups(
    chosen: Iterable[Group],
    *,
    data: Path,
    out: Path,
    seed: int,
    heads: Path | None = None,
    images: Images,
) -> list[Assignment[Protocol]]:
    """Return the groups with their images; BadInput for data or a checkpoint that a protocol
    refuses."""
    groups = []
    for name, protocol, checkpoints in chosen:
        probe = probe_of(protocol.kind)
        key = (name, probe.dense, probe.multilabel)
        if key not in images:
            images[key] = catalog.load(
                name, data, seed=seed, dense=probe.dense, multilabel=probe.multilabel
            )
        dataset = catalog.find(name)
        if probe.multilabel:
            dataset = catalog.find_multilabel(name)
        group = Assignment(
            run=out,
            task=TASK_OF[protocol.kind],
            dataset=dataset,
            splits=images[key],
            protocol=protocol,
            seed=seed,
            checkpoints=checkpoints,
            heads=heads,
        )
        groups += of_one_size(group)
    for n, group in enumerate(groups):
        if not isinstance(group.protocol, Ood):
            splits.refuse_untrainable(group.dataset.name, group.splits)
        probe = probe_of(group.protocol.kind)
        if reads_features(group.protocol):
            for checkpoint in group.checkpoints:
                trunk = checkpoint.blank()
                trunk.refuse_size(group.geometry.crop, group.geometry.crop)
        probe.refuse(group.protocol, group.dataset.name, group.splits)
        groups[n] = replace(group, found=probe.fits(group))
        if group.protocol.head:
            for checkpoint in group.checkpoints:
                kept_head(checkpoint, group.protocol.head)
    return groups


def of_one_size(group: Assignment[Protocol]) -> list[Assignment[Protocol]]:
    """Split a group whose protocol measures each trunk at its own size by these sizes."""
    geometry = group.protocol.geometry
    if not isinstance(geometry, TrunkGeometry):
        return [group]
    if not reads_features(group.protocol) or isinstance(group.protocol, Ood):
        raise BadInput(
            f"{group.protocol.name}: geometry.of is for readings of pooled features that are"
            f" computed once, not for this one of kind '{group.protocol.kind}'; give resize and"
            " crop alone"
        )
    by_size: dict[int, list[Checkpoint]] = {}
    for checkpoint in group.checkpoints:
        size = geometry.size(own_size(checkpoint).pixels)
        by_size.setdefault(size, []).append(checkpoint)
    return [
        replace(group, checkpoints=tuple(those), own_size=size)
        for size, those in by_size.items()
    ]


def reads_features(protocol: Protocol) -> bool:
    """Return whether a probe reads pooled features that are computed once. Others train on views
    of the images, or read maps or tokens."""
    probe = probe_of(protocol.kind)
    if isinstance(protocol, Sgd) and not isinstance(protocol, TokenProbe):
        return protocol.augment is None
    return not (probe.together or probe.dense)


def write_down(run: Path, groups: Sequence[Assignment[Protocol]]) -> None:
    """Note in RUN the lists of images, and how many rows the run must deliver."""
    due = 0
    for group in groups:
        splits.write_manifests(run, group.dataset.name, group.splits)
        metrics = probe_of(group.protocol.kind).metrics(group.protocol, group.dataset)
        due += len(metrics) * len(group.checkpoints)
    store.owe(run, due)


@dataclass(frozen=True)
class Work:
    """A group, how it is probed, and how much of it is done."""

    group: Assignment[Protocol]
    probe: Probe[Protocol]
    done: dict[str, list[Result]]  # by digest
    pending: list[Checkpoint]


def evaluate(
    groups: Sequence[Assignment[Protocol]],
    recorded: Sequence[Result],
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    """Measure all that is not `recorded` yet; returns the rows of all groups."""
    # 1. What is done, and what is left.
    together, alone = passes_of(groups, recorded)
    # 2. Those passes come first.
    rows: list[Result] = []
    for of_pass in together:
        rows += measure(of_pass, machine, stop)
    # 3. For the others all processes compute the features, into the cache. The rest is rank 0's
    #    work alone, and may take longer than an exchange between processes waits.
    if machine.world > 1 and alone:
        for one in alone:
            if one.pending:
                extractor = _extractor(one, machine, stop)
                found, name = one.group.splits, one.group.dataset.name
                if one.probe.only_test:
                    extractor(found.test, f"{name} test features")
                else:
                    extractor.of_splits(found, name)
        machine = machine.alone()
        if not machine.main:
            return []
    for one in alone:
        rows += measure([one], machine, stop)
    return rows


def passes_of(
    groups: Sequence[Assignment[Protocol]], recorded: Sequence[Result]
) -> tuple[list[list[Work]], list[Work]]:
    """Split groups into passes and single ones. A pass holds probes that all processes train
    together on one stream of images."""
    passes: dict[tuple[str, str, tuple[str, ...]], list[Work]] = {}
    alone: list[Work] = []
    for group in groups:
        probe = probe_of(group.protocol.kind)
        done = group.done(recorded, probe.metrics(group.protocol, group.dataset))
        pending = [c for c in group.checkpoints if c.digest not in done]
        one = Work(group, probe, done, pending)
        if probe.together:
            digests = tuple(c.digest for c in pending)
            stream = (group.dataset.name, probe.stream(group.protocol), digests)
            passes.setdefault(stream, []).append(one)
        else:
            alone.append(one)
    return list(passes.values()), alone


def announce(passes: Sequence[Sequence[Work]], *, on_cpu: bool) -> None:
    """Say what the pending work is, all datasets and protocols in one line, and at which size a
    trunk is read where that is its own."""
    units: Counter[str] = Counter()
    pending: list[Work] = []
    computed: set[tuple[object, ...]] = set()  # features, by what decides them
    sizes: dict[str, str] = {}
    for works in passes:
        if not works[0].pending:
            continue
        pending += works
        # What is measured in one pass is paid once
        work = works[0]
        group = work.group
        price_of = dict(
            work.probe.work(
                group.protocol, group.dataset.name, group.splits, len(work.pending)
            )
        )
        # And so are features that two readings share
        features = features_of(work)
        if features is not None and features in computed:
            del price_of["image"]
        computed.add(features or ())
        units.update(price_of)
        if group.own_size is not None:
            sizes |= {c.name: own_size(c).told(group.own_size) for c in work.pending}
    if not pending:
        return
    for name, told in sizes.items():
        log.info(f"{name}: {told}")
    ways: list[str] = []
    names: list[str] = []
    digests: set[str] = set()
    for one in pending:
        ways.append(
            f"{one.group.protocol.name} ({one.probe.words(one.group.protocol)})"
        )
        names.append(one.group.dataset.name)
        digests |= {checkpoint.digest for checkpoint in one.pending}
    cheaper = "`--protocol fewshot` costs less (`--protocol list` shows all)"
    # The cheapest readings of such data
    if all(TASKS[one.group.task].cheap or one.probe.dense for one in pending):
        cheaper = "fewer images or a GPU would cost less"
    price.announce(
        f"{TASKS[pending[0].group.task].verb} on {', '.join(dict.fromkeys(names))}",
        ", ".join(dict.fromkeys(ways)),
        price.plural(len(digests), "checkpoint"),
        work=units,
        cheaper=cheaper if on_cpu else "",
    )


def features_of(work: Work) -> tuple[object, ...] | None:
    """Return all that decides the features that a reading takes from the cache: equal ones are
    computed once. None where it computes its own."""
    probe = work.probe
    if not reads_features(work.group.protocol) or probe.only_test:
        return None
    group = work.group
    return (
        group.dataset.name,
        group.geometry,
        group.protocol.precision,
        group.protocol.head,
        probe.reads,
        tuple(checkpoint.digest for checkpoint in work.pending),
    )


def measure(works: Sequence[Work], machine: Machine, stop: StopFlag) -> list[Result]:
    """Return the rows of groups that share one pass, in order, with those that were done before."""
    first = works[0]
    groups = [work.group for work in works]
    made: list[list[Result]] = [[] for _ in works]
    if first.pending:
        probe = first.probe
        extractor = _extractor(first, machine, stop)
        if len(works) > 1 and probe.measure_several is not None:
            made = probe.measure_several(groups, extractor, machine, stop)
        else:
            made = [probe.measure(first.group, extractor, machine, stop)]
        first.group.state_file.unlink(missing_ok=True)
        shutil.rmtree(first.group.run / OWN_FEATURES, ignore_errors=True)
    rows: list[Result] = []
    for work, new in zip(works, made):
        for checkpoint in work.group.checkpoints:
            rows += work.done.get(checkpoint.digest, [])
            # Only rank 0 has rows in `new`.
            rows += [row for row in new if row.checkpoint == checkpoint.digest]
    return rows


def _extractor(work: Work, machine: Machine, stop: StopFlag) -> Extractor:
    p = work.group.protocol
    cache = FeatureCache.default()
    if not all(c.family.lasting(c.arch) for c in work.pending):
        cache = FeatureCache(work.group.run / OWN_FEATURES, cache.limit)
    trunks = []
    for checkpoint in work.pending:
        trunk = FrozenTrunk.build(
            checkpoint, device=machine.device, precision=p.precision, head=p.head
        )
        trunks.append(work.probe.reads(trunk, work.group.geometry.crop))
    return Extractor(
        trunks=trunks,
        geometry=work.group.geometry,
        cache=cache,
        machine=machine,
        batch=p.feature_batch,
        run=work.group.run,
        stop=stop,
    )
