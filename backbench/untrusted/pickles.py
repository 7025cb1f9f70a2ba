"""Reads pickles that torch has not written: CIFAR's batches, Detectron2's model files. It returns
plain values and numpy arrays and executes nothing: a file may name only the descriptions below,
which check its words before anything is allocated. numpy's own classes are not among them: with a
state set by a file, `numpy.ndarray` would take its memory from where the file says."""

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

DEEPEST = 20  # of nested containers
_DTYPES = re.compile(r"([<|=]?)([fiub])([1248])$")


def read(
    file: BinaryIO, *, array: Callable[[np.ndarray], object] = lambda array: array
) -> Any:
    """Read the next pickle as dicts, lists, plain values and what `array` makes of numpy's arrays.
    BadInput or UnpicklingError for what it may not name; pickle's errors for no pickle."""
    return _materialise(load(file), array, {}, 0)


def load(file: BinaryIO) -> Any:
    """Do as `read`, arrays as descriptions; a first pass checks that claimed lengths are there."""
    start = file.tell()
    for _ in pickletools.genops(file):
        pass
    file.seek(start)
    return _Unpickler(file).load()


def refusal(name: str) -> str:
    why = "which is not on the list of harmless names; nothing was executed"
    return f"refused: it names {name}, {why}"


class _DType:
    """numpy's dtype as its pickle describes it."""

    def __init__(self, name: object, *args: object) -> None:
        self.name, self.order = _text(name), "="

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2:
            raise BadInput("damaged: a dtype without its byte order")
        self.order = _text(state[1])

    def to_numpy(self) -> np.dtype:
        import numpy as np

        if self.order == ">" or self.name.startswith(">"):
            raise BadInput(
                "holds big-endian arrays; write it again on a little-endian machine"
            )
        if not (self.name == "bool" or _DTYPES.match(self.name)):
            raise BadInput(
                f"refused: holds arrays of dtype '{self.name[:20]}', not numbers"
            )
        return np.dtype(self.name)


class _Array:
    """numpy's array as pickled; `value` checks sizes before anything is allocated."""

    def __init__(self, *args: object) -> None:
        # (bytes, dtype, shape, order); numpy's `_reconstruct` has them in its state
        self.content: tuple[object, object, object, str] | None = None

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise BadInput("damaged: an array without content")
        _, shape, dtype, fortran, data = state
        self.content = (
            data,
            dtype,
            shape,
            "F" if fortran is True or fortran == 1 else "C",
        )

    def value(self) -> Any:
        # The bytes go as soon as they are copied
        content, self.content = self.content, None
        if content is None:
            raise BadInput("damaged: an array without content")
        return _array(*content)


class _Scalar(_Array):
    def __init__(self, dtype: object, data: object = b"") -> None:
        self.content = (data, dtype, (), "C")

    def value(self) -> Any:
        found = super().value()
        return (
            found.item() if found.ndim == 0 else found
        )  # a file may give it another state


def _frombuffer(data: object, dtype: object, shape: object, order: object) -> _Array:
    """An array in one piece, as pickle protocol 5 writes it."""
    array = _Array()
    array.content = (data, dtype, shape, _text(order))
    return array


def _array(data: object, dtype: object, shape: object, order: str) -> np.ndarray:
    """A copy of `data` as an array, once its size is what shape and dtype make of it."""
    import numpy as np

    sides = shape if isinstance(shape, tuple) else None
    if not isinstance(dtype, _DType) or sides is None:
        raise BadInput("damaged: an array without shape or dtype")
    for side in sides:
        if type(side) is not int or not 0 <= side < 1 << 40:
            raise BadInput("damaged: an array without shape or dtype")
    data = (
        data.encode("latin1") if isinstance(data, str) else data
    )  # python 2's pickles
    if isinstance(data, list):
        raise BadInput("refused: holds arrays of python objects, not numbers")
    if not isinstance(data, bytes | bytearray):
        raise BadInput("damaged: an array without content")
    kind = dtype.to_numpy()
    if len(data) != math.prod(sides) * kind.itemsize:
        raise BadInput(f"damaged: an array of shape {sides} has {len(data)} bytes")
    flat = np.frombuffer(data, dtype=kind)
    return np.array(flat.reshape(sides, order="F" if order == "F" else "C"), order="C")


def _text(value: object) -> str:
    """Return a short text; others are refused, as the text of nested lists has no end."""
    if isinstance(value, bytes):
        value = value.decode("latin1")
    if not isinstance(value, str):
        raise pickle.UnpicklingError("refused: a name that is no text")
    return value


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """`_codecs.encode`, with which protocol 2 writes bytes."""
    return _text(text).encode("latin1" if encoding == "latin1" else "ascii")


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
_ACTIONS: dict[int, Callable[..., None]] = dict(pickle._Unpickler.dispatch)  # by opcode


class BoundedUnpickler(pickle._Unpickler):
    """Python's own reader, in Python, checks keys before hashing: nested tuples have an endless
    hash. A subclass's `find_class` says what a file may name; storage outside it is refused."""

    stack: list[object]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_ACTIONS)

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(refusal(f"{module}.{name}"))

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("refused: it refers to storage outside the file")

    def _set_item(self) -> None:
        _refuse_keys(self.stack[-2:-1])
        _ACTIONS[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
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
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        for part in parts:
            by_identity = type(part).__hash__ is object.__hash__
            if not isinstance(part, _PLAIN_KEYS) and not by_identity:
                raise pickle.UnpicklingError(
                    "refused: a key that is neither text nor number"
                )


class _Unpickler(BoundedUnpickler):
    """Plain values and numpy arrays; other globals are refused by name, nothing is called."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return _NUMPY[full] if full in _NUMPY else super().find_class(module, name)


def _materialise(
    value: object,
    array: Callable[[np.ndarray], object],
    done: dict[int, tuple[object, object]],
    depth: int,
) -> Any:
    """Arrays for their descriptions; `done` (by id) visits what is shared once."""
    if depth > DEEPEST:
        raise BadInput(f"refused: nested more than {DEEPEST} levels deep")
    if not isinstance(value, dict | list | tuple | _Array):
        return value
    if id(value) not in done:
        out: Any
        if isinstance(value, _Array):
            found = value.value()
            out = (
                array(found) if hasattr(found, "dtype") else found
            )  # a scalar is no array
        elif isinstance(value, dict):
            pairs = dict.items(
                value
            )  # the file may have hung another `items` on an OrderedDict
            out = {k: _materialise(v, array, done, depth + 1) for k, v in pairs}
        else:
            out = [_materialise(v, array, done, depth + 1) for v in value]
        done[id(value)] = value, out
    return done[id(value)][1]
