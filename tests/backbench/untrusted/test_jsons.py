"""JSON of strangers: what is read of it is bounded, by each of its readers."""

import json

import pytest

from backbench.untrusted import jsons

READERS = [jsons.decode, lambda text: jsons.decode(text.encode())]
READERS.append(lambda text: jsons.decode_line(text.encode()))


@pytest.fixture(params=READERS, ids=["text", "bytes", "line"])
def decode(request):
    return request.param


def nested(levels):
    """Lists and objects in turn, a number in the innermost."""
    begins = "".join('{"a": ' if i % 2 else "[" for i in range(levels))
    ends = "".join("}" if i % 2 else "]" for i in reversed(range(levels)))
    return f"{begins}1{ends}"


def test_sixty_levels_are_read(decode):
    assert decode(nested(60)) == json.loads(nested(60))
    for levels in (61, 100_000):
        with pytest.raises(ValueError, match="nested more than 60 levels deep"):
            decode(nested(levels))


def test_only_the_deepest_of_several_values_counts(decode):
    # Sixty brackets and more that stand beside one another, or in a text
    for shallow in ([[[0]] * 40, {"a": 1}] * 2, "[" * 61):
        assert decode(json.dumps(shallow)) == shallow
    with pytest.raises(ValueError, match="nested more than 60 levels deep"):
        decode(f'[[1], {{"a": 1}}, {nested(60)}, 2]')


@pytest.mark.parametrize("sign", ["", "-"])
def test_forty_digits_are_a_number(decode, sign):
    number = sign + "1234567890" * 4
    assert decode(f'{{"a": [{number}]}}') == {"a": [int(number)]}
    with pytest.raises(ValueError, match=f"a number of {len(number) + 1} digits"):
        decode(f'{{"a": [{number}9]}}')


def test_digits_of_texts_and_fractions_are_not_counted(decode):
    digits = "9876543210" * 5
    assert decode(f'["{digits}", 0.{digits}]') == [digits, float(f"0.{digits}")]


@pytest.mark.parametrize("text", ["", "{", "[1,]", "1 2", "{'a': 1}"])
def test_what_is_no_json_is_refused(decode, text):
    with pytest.raises(ValueError, match=r"line 1|EOF|Expecting|Extra|Illegal"):
        decode(text)


def test_a_file_may_have_so_many_bytes(tmp_path):
    file = tmp_path / "value.json"
    file.write_text('{"ü": [1, 2]}')
    size = file.stat().st_size
    assert jsons.read(file) == jsons.read(file, most=size) == {"ü": [1, 2]}
    with pytest.raises(OSError, match=f"{size} bytes, more than any such file has"):
        jsons.read(file, most=size - 1)
