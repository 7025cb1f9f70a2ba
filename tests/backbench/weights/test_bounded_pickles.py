"""Pickles of strangers: what is read of them is bounded, whatever their bytes say."""

import io
import pickle

import numpy as np
import pytest

from backbench.errors import BadInput
from backbench.untrusted import pickles
from backbench.untrusted.pickles import BoundedUnpickler


def read(data):
    return BoundedUnpickler(io.BytesIO(data)).load()


# The key ((1,),) and the value 2, as opcodes
NESTED = (
    pickle.BININT1 + b"\x01" + pickle.TUPLE1 + pickle.TUPLE1 + pickle.BININT1 + b"\x02"
)
PLAIN = pickle.BININT1 + b"\x01" + pickle.BININT1 + b"\x02"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda pair: pickle.EMPTY_DICT + pair + pickle.SETITEM,
        lambda pair: pickle.EMPTY_DICT + pickle.MARK + PLAIN + pair + pickle.SETITEMS,
        lambda pair: pickle.MARK + PLAIN + pair + pickle.DICT,
    ],
    ids=["one item", "items", "whole"],
)
def test_a_key_whose_hash_may_take_long_is_refused(wrap):
    start = pickle.PROTO + b"\x02"
    assert read(start + wrap(PLAIN) + pickle.STOP) == {1: 2}
    with pytest.raises(
        pickle.UnpicklingError, match="a key that is neither text nor number"
    ):
        read(start + wrap(NESTED) + pickle.STOP)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read_as_they_are(protocol):
    value = {"a": [1, 2.5, None, True], b"b": ("x", {3: {}}), (1, "y"): "z", None: 1}
    data = io.BytesIO(pickle.dumps(value, protocol))
    assert pickles._Unpickler(data).load() == value


@pytest.mark.parametrize("value", [{1, 2}, frozenset({1}), [set()]])
def test_sets_are_refused(value):
    with pytest.raises(
        pickle.UnpicklingError, match=r"refused: it (holds a set|names)"
    ):
        read(pickle.dumps(value, 4))


def test_names_and_storage_outside_of_the_file_are_refused():
    with pytest.raises(
        pickle.UnpicklingError, match=r"refused: it names builtins\.print, which"
    ):
        read(pickle.dumps(print))
    outside = b"\x80\x02" + b"P1\n."
    with pytest.raises(
        pickle.UnpicklingError, match="refers to storage outside the file"
    ):
        read(outside)


def rebuilt(array, change=lambda state: state):
    """numpy's own description of an array, with its state changed."""
    ours = pickles._Array()
    dtype = pickles._DType(array.dtype.str[1:])
    state = (1, array.shape, dtype, False, array.tobytes())
    ours.__setstate__(change(state))
    return ours.value()


def replaced(index, value):
    def change(state):
        parts = list(state)
        parts[index] = value
        return tuple(parts)

    return change


def test_an_array_is_copied_in_its_order():
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    np.testing.assert_array_equal(rebuilt(array), array)
    turned = rebuilt(array, replaced(3, True))
    np.testing.assert_array_equal(turned, array.ravel().reshape(3, 2).T)
    assert turned.flags.c_contiguous
    # Python 2's pickles have bytes as text
    text = array.tobytes().decode("latin1")
    np.testing.assert_array_equal(rebuilt(array, replaced(4, text)), array)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state[:4], "damaged: an array without content"),
        (list, "damaged: an array without content"),
        (replaced(1, [2, 3]), "without shape or dtype"),
        (replaced(1, (2, -3)), "without shape or dtype"),
        (replaced(1, (2, 3.0)), "without shape or dtype"),
        (replaced(1, (True, 6)), "without shape or dtype"),
        (replaced(1, (1 << 40, 0)), "without shape or dtype"),
        (replaced(2, "f4"), "without shape or dtype"),
        (replaced(4, [1, 2]), "arrays of python objects, not numbers"),
        (replaced(4, None), "damaged: an array without content"),
        (replaced(1, (7,)), r"an array of shape \(7,\) has 24 bytes"),
    ],
)
def test_a_damaged_array_is_refused(change, says):
    with pytest.raises(BadInput, match=says):
        rebuilt(np.arange(6, dtype="<f4").reshape(2, 3), change)


@pytest.mark.parametrize(
    ("name", "order", "says"),
    [
        ("f4", ">", "holds big-endian arrays"),
        (">f4", "=", "holds big-endian arrays"),
        ("O", "<", "holds arrays of dtype 'O', not numbers"),
        ("M8", "<", "holds arrays of dtype 'M8', not numbers"),
    ],
)
def test_only_little_numbers_are_read(name, order, says):
    dtype = pickles._DType(name)
    dtype.__setstate__((3, order))
    with pytest.raises(BadInput, match=says):
        dtype.to_numpy()


@pytest.mark.parametrize("state", [None, (3,), [3, "<"]])
def test_a_dtype_without_its_order_is_damaged(state):
    with pytest.raises(BadInput, match="damaged: a dtype without its byte order"):
        pickles._DType("f4").__setstate__(state)


def test_a_name_is_text():
    assert pickles._DType(b"f4").to_numpy() == np.dtype("<f4")
    for name in (3, ["f4"], None):
        with pytest.raises(
            pickle.UnpicklingError, match="refused: a name that is no text"
        ):
            pickles._DType(name)


def test_a_scalar_is_a_number_of_python():
    scalar = pickles._Scalar(pickles._DType("f8"), np.float64(2.5).tobytes())
    value = scalar.value()
    assert (type(value), value) == (float, 2.5)
    with pytest.raises(BadInput, match="damaged: an array without content"):
        scalar.value()  # its bytes were let go
