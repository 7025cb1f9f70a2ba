"""The pieces of a Parquet page by hand: Thrift's structs, packed numbers, Snappy's blocks."""

from types import SimpleNamespace

import pytest

from backbench.containers import parquet_pages
from backbench.containers.parquet_pages import BLOCK, codec_of, hybrid, snappy_blocks


def struct_of(*bytes_):
    return parquet_pages._Thrift(bytes(bytes_)).struct()


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ((0,), 0),
        ((127,), 127),
        ((128, 1), 128),
        ((0xAC, 2), 300),
        ((255,) * 9 + (1,), (1 << 64) - 1),
    ],
)
def test_a_number_takes_seven_bits_a_byte(data, value):
    assert parquet_pages._Thrift(bytes(data)).varint() == value


def test_a_number_does_not_go_on_for_ever():
    with pytest.raises(ValueError, match="more than 64 bits"):
        parquet_pages._Thrift(bytes([255] * 20)).varint()


def test_fields_are_counted_from_the_one_before():
    # 1: true, 2: false, 5: i32 of -3 (zigzag 5), 300: i64 of 4, whose number stands apart
    data = (0x11, 0x12, 0x35, 5, 0x06, 0xD8, 4, 8, 0)
    assert struct_of(*data) == {1: True, 2: False, 5: -3, 300: 4}


def test_what_no_caller_needs_is_passed_over():
    # 1: a byte, 2: a double, 3: a text of three bytes, 4: i16 of 1
    data = (0x13, 9, 0x17, *range(8), 0x18, 3, 65, 66, 67, 0x14, 2, 0)
    assert struct_of(*data) == {1: None, 2: None, 3: None, 4: 1}


def test_lists_and_structs_hold_values():
    # 1: a list of three i32, 2: a set of one struct {1: i32 of 2}, 3: {1: true}
    data = (0x19, 0x35, 2, 4, 6, 0x1A, 0x1C, 0x15, 4, 0, 0x1C, 0x11, 0, 0)
    assert struct_of(*data) == {1: [1, 2, 3], 2: [{1: 2}], 3: {1: True}}
    # A list of fifteen or more has its length behind the head
    assert struct_of(0x19, 0xF5, 16, *[2] * 16, 0) == {1: [1] * 16}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((0x1F, 0), "a field of type 15"),
        ((0x19, 0xF5, 0xFF, 0xFF, 0xFF, 0x7F), "a long list"),
        ((0x1C,) * 200, "nested too deep"),
    ],
)
def test_what_is_no_header_is_refused(data, says):
    with pytest.raises(ValueError, match=says):
        struct_of(*data)


def test_a_header_that_is_cut_off_is_refused():
    with pytest.raises(IndexError):
        struct_of(0x15)


def test_packed_numbers_and_runs():
    # One group of eight of 3 bits, 0 to 7: the example of Parquet's own documentation
    assert hybrid(bytes([0b11, 0b10001000, 0b11000110, 0b11111010]), 3, 8) == list(
        range(8)
    )
    # A run of four times 9 in a byte, and one of 300 in two bytes
    assert hybrid(bytes([8, 9]), 4, 4) == [9] * 4
    assert hybrid(bytes([4, 0x2C, 1]), 9, 2) == [300, 300]
    # Both, and no more than were asked for
    mixed = bytes([4, 5, 0b11, 0b10001000, 0b11000110, 0b11111010])
    assert hybrid(mixed, 3, 6) == [5, 5, 0, 1, 2, 3]
    assert hybrid(b"", 3, 0) == []


@pytest.mark.parametrize(
    ("data", "width", "says"),
    [
        (bytes([8, 9]), 33, "numbers of 33 bits"),
        (bytes([8, 9]), -1, "numbers of -1 bits"),
        (bytes([0, 9]), 4, "ends too early"),
        (bytes([0x03, 1]), 32, "ends too early"),
    ],
)
def test_numbers_that_are_not_there_are_refused(data, width, says):
    with pytest.raises(ValueError, match=says):
        hybrid(data, width, 8)


def literal(count):
    """A literal of so many bytes, as Snappy writes it."""
    if count <= 60:
        return bytes([(count - 1) << 2]) + bytes(count)
    return bytes([61 << 2]) + (count - 1).to_bytes(2, "little") + bytes(count)


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_blocks_of_snappy_begin_where_the_output_is_whole():
    whole = literal(BLOCK)
    head = varint(BLOCK + 100)
    data = head + whole + literal(60) + literal(40)
    assert snappy_blocks(data) == ([len(head), len(head) + len(whole)], BLOCK + 100)


def test_a_copy_from_its_own_block_leaves_blocks_alone():
    head = varint(BLOCK + 28)
    first = literal(BLOCK)
    near = bytes([(20 - 1) << 2 | 2, 8, 0])  # 20 bytes from 8 before
    data = head + first + literal(8) + near
    assert snappy_blocks(data) == ([len(head), len(head) + len(first)], BLOCK + 28)
    # From the block before it, there is one block only
    far = bytes([(20 - 1) << 2 | 2, 9, 0])
    assert snappy_blocks(head + first + literal(8) + far) == ([len(head)], BLOCK + 28)
    # The short form: 4 to 11 bytes, from up to 2047 before
    head = varint(BLOCK + 15)
    short = bytes([(7 - 4) << 2 | 1, 8])
    data = head + first + literal(8) + short
    assert snappy_blocks(data) == ([len(head), len(head) + len(first)], BLOCK + 15)
    short = bytes([1 << 5 | (7 - 4) << 2 | 1, 8])
    assert snappy_blocks(head + first + literal(8) + short)[0] == [len(head)]


def test_an_element_over_a_border_makes_one_block():
    head = varint(BLOCK + 1)
    data = head + literal(BLOCK - 59) + literal(60)
    assert snappy_blocks(data) == ([len(head)], BLOCK + 1)


@pytest.mark.parametrize("size", [9, 11])
def test_a_block_of_another_length_than_it_says_is_refused(size):
    with pytest.raises(ValueError, match="of another length than it says"):
        snappy_blocks(varint(size) + literal(10))


def test_codecs_have_our_names():
    assert codec_of(SimpleNamespace(compression="UNCOMPRESSED")) == "bare"
    assert codec_of(SimpleNamespace(compression="SNAPPY")) == "snappy"
    assert codec_of(SimpleNamespace(compression="LZ4")) == "lz4_raw"
    with pytest.raises(ValueError, match="compressed with lzo"):
        codec_of(SimpleNamespace(compression="LZO"))
