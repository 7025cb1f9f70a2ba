"""Loads protocols from their recipes under configs/transfer, checks those of a command, lists them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backbench.errors import BadInput, nearest
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.records import protocol_fingerprints
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.runs.terminal import log
from backbench.tasks import TASKS, by_kind
from backbench.transfer.finetune_protocol import Finetune
from backbench.transfer.protocol import Protocol


def all_kinds() -> list[str]:
    """List the values of `kind:` in recipes, of all verbs."""
    kinds = [task.kind for task in TASKS.values() if task.kind is not None]
    return list(dict.fromkeys(kinds))


def class_of(kind: str) -> type[Protocol]:
    """Return the dataclass that recipes of a kind are read into. That of a probe stands in its
    file, which imports torch."""
    if kind == "finetune":
        return Finetune
    from backbench.transfer.probes.kind import probe_of

    return probe_of(kind).protocol


def load_protocol(
    name: str, kinds: Collection[str], overrides: Sequence[str] = ()
) -> Protocol:
    """Load a protocol of one of `kinds` by its path or by its name under configs/transfer, changed
    by `key=value` words; a list may be written k=5,20."""
    path = config.find_recipe(name, "transfer")
    data = config.read_recipe(path)
    kind = str(data.get("kind"))
    if kind not in all_kinds():
        raise BadInput(f"{path}: kind '{kind}'; {nearest(kind, all_kinds())}")
    if kind not in kinds:
        raise BadInput(
            f"{path}: a protocol of kind '{kind}'; this command runs {', '.join(kinds)}"
        )
    cls = class_of(kind)
    protocol = config.build(cls, data, where=str(path))
    if not overrides:
        return protocol
    before = protocol_fingerprints.leaves(config.to_dict(protocol))
    written = []
    for text in overrides:
        key, _, value = text.partition("=")
        bare = isinstance(before.get(key), list) and not value.startswith(("[", "null"))
        written.append(f"{key}=[{value}]" if bare else text)
    changed = config.apply_overrides(data, written)
    return config.build(cls, changed, where=f"--protocol {name} {' '.join(overrides)}")


def listing(verb: str) -> list[str]:
    """Write a line for each shipped protocol of a verb: its name, and what it is."""
    lines = []
    for name in config.recipe_names("transfer"):
        path = config.find_recipe(name, "transfer")
        recipe = config.read_recipe(path)
        fits = recipe.get("kind") in by_kind(verb)
        # Both `semisup` and `finetune` run protocols of one kind; the parts of the labels tell
        # whose a protocol is.
        if fits and recipe["kind"] == "finetune":
            fits = ("100" in recipe["parts"]) == (verb == "finetune")
        if fits:
            about = config.first_sentence(path) or recipe["protocol"]
            lines.append(f"{name:<22} {about}")
    return lines


def check(
    request: LinearRequest | OodRequest | SemisupRequest | FinetuneRequest,
) -> None:
    """Raise BadInput for the protocols of `linear`, `ood`, `semisup` or `finetune`, before their
    module is imported. An unknown name is refused before torch is imported."""
    if request.protocol == OWN:  # that one is in the checkpoint
        if request.overrides:
            raise BadInput(
                f"'{request.overrides[0]}' after --protocol own: each checkpoint has another; name one"
            )
        return
    # Several names are allowed only where the verb measures several.
    names = [request.protocol]
    if isinstance(request, LinearRequest):
        names = request.protocol.split(",")
    tasks = by_kind(request.verb)
    found: set[tuple[str, str]] = set()
    for name in names:
        protocol = load_protocol(name, tasks, request.overrides)
        if (protocol.kind, protocol.name) in found:
            raise BadInput(
                f"--protocol {request.protocol}: {name} gives rows named {protocol.name}, as one"
                " before it does; leave one out, or give them a `protocol` of their own"
            )
        found.add((protocol.kind, protocol.name))
        if changed := changes(protocol, getattr(request, "dataset", None)):
            log.info(f"--protocol {name}: {changed}")
        if request.seeds > 1 and not TASKS[tasks[protocol.kind]].trains:
            raise BadInput(
                f"--seeds {request.seeds}: {name} trains nothing by chance, all seeds would give"
                " one number; leave --seeds out"
            )


def changes(protocol: Protocol, dataset: str | None = None) -> str:
    """List the keys in which a protocol differs from the shipped one of its name; empty where it is
    that one, or has a name of its own. `dataset` is what a protocol that names none measures."""
    known = protocol_fingerprints.shipped()
    recipe = config.to_dict(protocol)
    own = protocol_fingerprints.fingerprint_of(recipe, protocol.kind, known["defaults"])
    bound = known["fingerprints"].get(protocol.protocol, {})
    if bound.get(protocol.kind, own) == own:
        return ""
    # 1. The shipped recipe of this name
    for name, path in config.recipes("transfer"):  # noqa: B007 - it is told below
        data = config.read_recipe(path)
        same_name = data.get("protocol") == protocol.protocol
        if same_name and data.get("kind") == protocol.kind:
            break
    shipped = config.to_dict(config.build(type(protocol), data, where=name))
    # 2. The keys that change numbers, with both values
    before = protocol_fingerprints.leaves(shipped)
    now = protocol_fingerprints.leaves(recipe)
    parts = []
    for key in {**now, **before}:
        if now.get(key) != before.get(key) and key not in protocol_fingerprints.FREE:
            parts.append(f"{key} is {now.get(key)}, not {before.get(key)}")
    if dataset is not None and recipe.get("dataset", "") is None:
        # Rows hold the recipe with the dataset that it was run on
        measured = {**recipe, "dataset": dataset}
        own = protocol_fingerprints.fingerprint_of(
            measured, protocol.kind, known["defaults"]
        )
    mark = f"{protocol.name}~{own[: protocol_fingerprints.DIGITS]}"
    differs = "; ".join(parts)
    return f"{differs} as in the shipped {name}; its columns have a name of their own, {mark}"
