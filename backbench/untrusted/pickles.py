"""Reads pickles that torch has not written, such as CIFAR's batches and Detectron2's model files.

It returns plain values and numpy arrays and executes nothing. A file may name numpy's classes, but
gets the descriptions below instead, which check what it says before anything is allocated. It does
not get numpy's own classes, because a file can set an object's state, and a `numpy.ndarray` would
take its memory from where that state says.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from backbench.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

DEEPEST = 20  # levels of nested containers
# A tensor takes some 30 steps, and 5,000 tensors with an optimizer's have been seen. Each step costs
# microseconds in readers that are written in Python, so that longer files would be read for minutes.
MOST_STEPS = 500_000
# Numbers of this machine's byte order: float, int, uint and bool with their bytes
_DTYPES = re.compile(r"([<|=]?)([fiub])([1248])$")


def read(
    file: BinaryIO, *, array: Callable[[np.ndarray], object] = lambda array: array
) -> Any:
    """Read the next pickle as dicts, lists, plain values and what `array` makes of numpy's arrays.

    BadInput or UnpicklingError for what it may not hold; pickle's errors for what is no pickle.
    """
    return _materialise(load(file), array, {}, 0)


def load(file: BinaryIO) -> Any:
    """Read the next pickle as `read` does, but leave its arrays as descriptions."""
    start = file.tell()
    walk_through(file)
    file.seek(start)
    return _Unpickler(file).load()


def walk_through(file: BinaryIO) -> None:
    """Go to the end of the next pickle. Raises UnpicklingError for one of more than MOST_STEPS steps.

    pickletools reads every opcode with its data and does nothing else. It fails where a claimed length
    is longer than the file, before an unpickler allocates so much.
    """
    for step, _ in enumerate(pickletools.genops(file)):
        if step == MOST_STEPS:
            raise pickle.UnpicklingError(
                f"refused: it has more than {MOST_STEPS:,} steps, and a file of weights has"
                " thousands; write the trunk's state dict alone"
            )


def refusal(name: str) -> str:
    """Return the message that refuses a pickle for a name in it."""
    return (
        f"refused: it names {name}, which is not on the list of harmless names;"
        " nothing was executed"
    )


class _DType:
    """Describes a numpy dtype as its pickle does."""

    def __init__(self, name: object, *args: object) -> None:
        self.name = _text(name)
        self.order = "="

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2:
            raise BadInput("damaged: a dtype without its byte order")
        self.order = _text(state[1])

    def to_numpy(self) -> np.dtype:
        """Return NumPy's dtype. Only little-endian numbers and bool have one here."""
        import numpy as np

        # The byte order may stand apart from the name or in it
        if self.order == ">" or self.name.startswith(">"):
            raise BadInput(
                "holds big-endian arrays; write it again on a little-endian machine"
            )
        is_number = self.name == "bool" or _DTYPES.match(self.name)
        if not is_number:
            raise BadInput(
                f"refused: holds arrays of dtype '{self.name[:20]}', not numbers"
            )
        return np.dtype(self.name)


class _Array:
    """Describes a numpy array as its pickle does; `value` makes the array."""

    def __init__(self, *args: object) -> None:
        # (bytes, dtype, shape, order): None until numpy's pickle sets the state
        self.content: tuple[object, object, object, str] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise BadInput("damaged: an array without content")
        _version, shape, dtype, fortran, data = state
        order = "F" if fortran is True or fortran == 1 else "C"
        self.content = data, dtype, shape, order

    def value(self) -> Any:
        """Make the array, once: the bytes are let go as soon as they are copied."""
        content = self.content
        self.content = None
        if content is None:
            raise BadInput("damaged: an array without content")
        return _array(*content)


class _Scalar(_Array):
    """Describes a numpy scalar as its pickle does; `value` makes a Python number."""

    def __init__(self, dtype: object, data: object = b"") -> None:
        self.content = (data, dtype, (), "C")

    def value(self) -> Any:
        value = super().value()
        # The file may have set a state with another shape.
        return value.item() if value.ndim == 0 else value


def _frombuffer(data: object, dtype: object, shape: object, order: object) -> _Array:
    """Describe an array in one piece, as pickle protocol 5 writes it."""
    array = _Array()
    array.content = (data, dtype, shape, _text(order))
    return array


def _array(data: object, dtype: object, shape: object, order: str) -> np.ndarray:
    """Copy `data` to an array, after a check that shape and dtype need exactly so many bytes."""
    import numpy as np

    # 1. Shape, dtype and data are what they should be
    if not isinstance(dtype, _DType) or not isinstance(shape, tuple):
        raise BadInput("damaged: an array without shape or dtype")
    for side in shape:
        if type(side) is not int or not 0 <= side < 1 << 40:
            raise BadInput("damaged: an array without shape or dtype")
    if isinstance(data, str):
        # Python 2's pickles have bytes as text.
        data = data.encode("latin1")
    if isinstance(data, list):
        raise BadInput("refused: holds arrays of python objects, not numbers")
    if not isinstance(data, bytes | bytearray):
        raise BadInput("damaged: an array without content")
    # 2. They fit together
    kind = dtype.to_numpy()
    if len(data) != math.prod(shape) * kind.itemsize:
        raise BadInput(f"damaged: an array of shape {shape} has {len(data)} bytes")
    flat = np.frombuffer(data, dtype=kind)
    return np.array(flat.reshape(shape, order="F" if order == "F" else "C"), order="C")


def _text(value: object) -> str:
    """Return a text or bytes as text. Anything else is refused: str() of nested lists has no end."""
    if isinstance(value, bytes):
        value = value.decode("latin1")
    if not isinstance(value, str):
        raise pickle.UnpicklingError("refused: a name that is no text")
    return value


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Do as `_codecs.encode`, with which protocol 2 writes bytes."""
    return _text(text).encode("latin1" if encoding == "latin1" else "ascii")


# What a file may name -> what it gets
_NUMPY: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _encode,
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _Scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _frombuffer for core in ("core", "_core")},
}
_PLAIN_KEYS = (str, bytes, int, float, type(None))
# Opcode -> what Python's own reader does for it
_ACTIONS: dict[int, Callable[..., None]] = dict(pickle._Unpickler.dispatch)


class BoundedUnpickler(pickle._Unpickler):
    """Python's own unpickler, with a check of each key before it is hashed, and without sets.

    A few bytes can make nested tuples whose hash takes forever. This is the unpickler that is written
    in Python, as the one in C cannot be changed so. A subclass's `find_class` says what a file may
    name; nothing by default.
    """

    stack: list[object]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_ACTIONS)

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(refusal(f"{module}.{name}"))

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("refused: it refers to storage outside the file")

    def _set_item(self) -> None:
        # The stack ends with a key and its value.
        _refuse_keys(self.stack[-2:-1])
        _ACTIONS[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
        # The stack holds keys and values in turn, from its last mark on.
        _refuse_keys(self.stack[0::2])
        _ACTIONS[pickle.SETITEMS[0]](self)

    def _whole_dict(self) -> None:
        _refuse_keys(self.stack[0::2])
        _ACTIONS[pickle.DICT[0]](self)

    def _no_set(self) -> None:
        raise pickle.UnpicklingError(
            "refused: it holds a set, which no weights or images need"
        )

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.DICT[0]] = _whole_dict
    for _code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        dispatch[_code[0]] = _no_set


def _refuse_keys(keys: Sequence[object]) -> None:
    """Refuse keys whose hash may take long: all but plain values, and flat tuples of these."""
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        for part in parts:
            # An object's own hash is its identity, whatever it holds.
            by_identity = type(part).__hash__ is object.__hash__
            if not isinstance(part, _PLAIN_KEYS) and not by_identity:
                raise pickle.UnpicklingError(
                    "refused: a key that is neither text nor number"
                )


class _Unpickler(BoundedUnpickler):
    """Reads plain values and descriptions of numpy arrays; a file may name nothing else."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        known = _NUMPY.get(f"{module}.{name}")
        if known is None:
            return super().find_class(module, name)  # refuses it
        return known


def _materialise(
    value: object,
    array: Callable[[np.ndarray], object],
    done: dict[int, tuple[object, object]],
    depth: int,
) -> Any:
    """Return `value` with an array in place of each description.

    `done` has what was made already, by id, so that a shared object is made once. It keeps the
    object, too: the id of an object that is gone may be given to another.
    """
    if depth > DEEPEST:
        raise BadInput(f"refused: nested more than {DEEPEST} levels deep")
    if not isinstance(value, dict | list | tuple | _Array):
        return value
    if id(value) in done:
        _, made = done[id(value)]
        return made
    made = None
    if isinstance(value, _Array):
        made = value.value()
        if hasattr(made, "dtype"):  # a scalar has become a Python number
            made = array(made)
    elif isinstance(value, dict):
        # Not `value.items()`: the file may have hung another `items` on an OrderedDict.
        pairs = dict.items(value)
        made = {k: _materialise(v, array, done, depth + 1) for k, v in pairs}
    else:
        made = [_materialise(v, array, done, depth + 1) for v in value]
    done[id(value)] = value, made
    return made
