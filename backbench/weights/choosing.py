"""Chooses one trunk of a file, or says why there is not exactly one."""

import re

from backbench.errors import BadInput, nearest
from backbench.untrusted.printable import shown
from backbench.weights import archs
from backbench.weights.family import TrunkInFile, identical
from backbench.weights.file_contents import IN_IMPORT, SAY_WHAT_IT_IS, FileContents
from backbench.weights.tensor_names import first_names
from backbench.weights.tensor_tables import holds_nameless

# Networks of these authors take BGR pixels and have the stride in the 1x1 convolution. Neither shows
# in the tensors.
_FOREIGN_AUTHORS = ("Detectron2 Model Zoo", "Caffe2", "MSRA")
# A classifier, or a projector of a few layers
_OF_A_HEAD = 20  # tensors
_OF_HEADS = re.compile(
    r"(^|\.|_)(fc|head|heads|classifier|linear|projector|predictor)\b"
)


def choose(contents: FileContents, encoder: str | None = None) -> TrunkInFile:
    """Return the trunk to import, or raise BadInput that says why there is not exactly one."""
    with contents.refusals():
        return _chosen(contents, encoder)


def _chosen(contents: FileContents, encoder: str | None) -> TrunkInFile:
    # 1. There is a trunk, and it is one that backbench can build
    if contents.unknown:
        told = archs.advice(contents.tables)
        raise BadInput(f"{contents.unknown}; {told}" if told else contents.unknown)
    if not contents.trunks:
        keys = contents.keys()
        if not keys:
            if holds_nameless(contents.tree):
                raise BadInput(
                    "no trunk in it; its tensors have no names, by which a trunk is told: save"
                    " model.state_dict() where it was trained"
                )
            raise BadInput(
                "no trunk in it; it holds no tensors: save model.state_dict() where it was trained"
            )
        content = f"{len(keys)} tensors: {first_names(keys)}"
        if len(keys) <= _OF_A_HEAD and all(map(_OF_HEADS.search, keys)):
            raise BadInput(
                f"no trunk in it; it holds a head alone, {content}; give the file of the whole"
                " model"
            )
        told = archs.advice(contents.tables)
        if told:
            raise BadInput(f"in no known format: {told}")
        raise BadInput(
            f"no trunk in it; it holds {content}{contents.hint()}; {SAY_WHAT_IT_IS}"
        )
    author = contents.at_top("__author__")
    if author in _FOREIGN_AUTHORS:
        raise BadInput(
            f"weights of '{author}' take BGR pixels and have their stride in the 1x1"
            " convolution; such a network is not one of backbench's trunks"
        )
    # 2. The encoder that was asked for, or the only sensible one
    encoder = encoder or contents.default_encoder()
    if encoder is None:
        labels = " and ".join(f"'{trunk.label}'" for trunk in contents.trunks)
        choices = " or ".join(map(shown, contents.encoders))
        form = "in no known format"
        if contents.form is not None:
            form = f"format {contents.form.name} without its {contents.form.default}"
        raise BadInput(
            f"holds a trunk under {labels}, {form}{contents.hint()};"
            f" choose with --encoder {choices} {IN_IMPORT}"
        )
    if encoder not in contents.encoders:
        raise BadInput(
            f"no encoder '{encoder}' in it; {nearest(encoder, contents.encoders)}"
        )
    # 3. A format may write an encoder more than once; all copies must have the same weights
    first, *copies = contents.encoders[encoder]
    for copy in copies:
        for name, key in first.keys.items():
            twin = copy.keys.get(name)
            if twin is None or not identical(
                contents.tables[first.table][key], contents.tables[copy.table][twin]
            ):
                raise BadInput(
                    f"'{first.label}' and '{copy.label}' should be the same trunk"
                    f" but differ in {shown(key)}"
                )
    return first
