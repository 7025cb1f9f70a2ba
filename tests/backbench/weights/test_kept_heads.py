"""Heads in a file: what they compute, and which of several is found."""

import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from backbench.errors import BadInput
from backbench.runs.folder import HEADS_FILE
from backbench.weights import kept_heads
from backbench.weights.kept_heads import KeptHead

CLASSES, WIDTH = 3, 6


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_head(seed=0, **more):
    weight, bias = drawn(CLASSES, WIDTH, seed=seed), drawn(CLASSES, seed=seed + 100)
    return KeptHead(weight, bias, **more)


def queried(queries=2):
    return a_head(
        query=drawn(queries, WIDTH, seed=1), value=drawn(WIDTH, WIDTH, seed=2)
    )


def test_logits_are_of_features_or_of_the_mean_of_tokens():
    head = a_head()
    tokens = drawn(4, 5, WIDTH, seed=3)
    weight, bias = head.weight.numpy().astype(float), head.bias.numpy().astype(float)
    mean = tokens.numpy().astype(float).mean(1)
    wanted = torch.from_numpy(mean @ weight.T + bias).float()
    torch.testing.assert_close(head.logits(tokens), wanted)
    torch.testing.assert_close(head.logits(tokens.mean(1)), wanted)
    half = head.logits(tokens.mean(1).bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, wanted, rtol=0.02, atol=0.02)


def test_each_query_attends_and_fills_its_slice_of_the_features():
    head = queried(queries=3)
    tokens = drawn(2, 5, WIDTH, seed=3)
    query, value = head.query.double().numpy(), head.value.double().numpy()
    for image, logits in zip(tokens.double().numpy(), head.logits(tokens)):
        features = []
        for j in range(3):
            scores = np.exp(image @ query[j])
            attended = (scores / scores.sum()) @ image
            features += list(value[2 * j : 2 * j + 2] @ attended)
        wanted = head.weight.double().numpy() @ features + head.bias.double().numpy()
        torch.testing.assert_close(
            logits.double(), torch.from_numpy(wanted), rtol=1e-4, atol=1e-4
        )


def test_a_digest_is_of_all_tensors():
    head = a_head()
    raw = head.weight.numpy().tobytes() + head.bias.numpy().tobytes()
    assert head.digest == hashlib.sha256(b"(3, 6)" + raw).hexdigest()
    pooling = queried()
    raw += pooling.query.numpy().tobytes() + pooling.value.numpy().tobytes()
    assert pooling.digest == hashlib.sha256(b"(3, 6)" + raw).hexdigest()
    assert list(pooling.tensors) == ["weight", "bias", "query", "value"]
    assert a_head(temperature=2.0).digest == head.digest
    assert kept_heads.classes_digest(("a", "b")) == hashlib.sha256(b"a\nb").hexdigest()


def about(protocol="p1", checkpoint="c" * 64, **more):
    return {"protocol": protocol, "checkpoint": checkpoint, **more}


def load(folder, asked=None):
    return kept_heads.load(folder, asked or about(), WIDTH, CLASSES)


def test_several_heads_are_kept_in_a_file_and_replaced_by_name(tmp_path):
    file = tmp_path / HEADS_FILE
    by_columns = a_head(5)
    by_columns = KeptHead(
        by_columns.weight.T.contiguous().T, by_columns.bias, 1.5, "twin"
    )
    kept_heads.keep(file, "linear/a", a_head(9), about())
    kept_heads.keep(file, "linear/b", queried(), about("p2"))
    kept_heads.keep(file, "linear/a", by_columns, about())
    for found, kept in (
        (load(tmp_path), by_columns),
        (load(file, about("p2")), queried()),
    ):
        assert found.tensors.keys() == kept.tensors.keys()
        for name, tensor in kept.tensors.items():
            assert torch.equal(found.tensors[name], tensor)
        assert found.temperature == kept.temperature
        assert found.temperature_from == kept.temperature_from
    assert set(load_file(file)) == {
        "linear/a/weight",
        "linear/a/bias",
        *(f"linear/b/{name}" for name in ("weight", "bias", "query", "value")),
    }


def test_of_a_folders_heads_the_one_that_is_asked_for_is_found(tmp_path):
    for run, seed, protocol in (("b/run", 1, "p1"), ("a", 2, "p2"), ("c", 3, "p3")):
        file = tmp_path / run / HEADS_FILE
        file.parent.mkdir(parents=True)
        kept_heads.keep(file, "head", a_head(seed), about(protocol))
    (tmp_path / "other.safetensors").write_bytes(b"no heads")
    assert load(tmp_path).digest == a_head(1).digest
    # The same head may be there twice
    again = tmp_path / "d" / HEADS_FILE
    again.parent.mkdir()
    kept_heads.keep(again, "copy", a_head(1), about())
    assert load(tmp_path).digest == a_head(1).digest
    kept_heads.keep(again, "another", a_head(4), about())
    with pytest.raises(BadInput) as refused:
        load(tmp_path)
    said = f"{tmp_path}: 2 heads fit; give the run folder of one of them"
    assert str(refused.value) == said


def test_the_nearest_head_says_what_differs(tmp_path):
    file = tmp_path / HEADS_FILE
    kept_heads.keep(file, "far", a_head(1), about("p2", "d" * 64, size=1))
    kept_heads.keep(file, "near", a_head(2), about("p2", size=0))
    with pytest.raises(BadInput) as refused:
        load(tmp_path, about(size=0))
    ends = "; needed is one of p1 on the trunk cccccccccccc: `backbench linear` keeps it in its run"
    assert str(refused.value) == f"{file}: the head near has another protocol{ends}"
    with pytest.raises(BadInput) as refused:
        load(tmp_path, about("p1", "e" * 64, size=0))
    assert "the head near has another protocol, checkpoint; needed" in str(
        refused.value
    )
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(BadInput) as refused:
            load(nothing)
        assert str(refused.value) == f"{nothing}: no {HEADS_FILE} in it{ends}"


DAMAGED = "does not match its digest; the file is damaged, train it again"


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (
            KeptHead(drawn(2, WIDTH), drawn(2)),
            "has a weight of (2, 6) torch.float32, not (3, 6) float32; train it again",
        ),
        (
            KeptHead(drawn(CLASSES, 5), drawn(CLASSES)),
            "has a weight of (3, 5) torch.float32, not (3, 6)",
        ),
        (
            KeptHead(drawn(CLASSES, WIDTH), drawn(2)),
            "has a bias of (2,) torch.float32, not (3,) float32",
        ),
        (
            KeptHead(drawn(CLASSES, WIDTH).double(), drawn(CLASSES)),
            "has a weight of (3, 6) torch.float64",
        ),
        (
            KeptHead(drawn(CLASSES, WIDTH), drawn(CLASSES).half()),
            "has a bias of (3,) torch.float16, not (3,) float32",
        ),
        (
            a_head(query=drawn(2, WIDTH), value=drawn(WIDTH, WIDTH).half()),
            "has a value of (6, 6) torch.float16, not (6, 6) float32",
        ),
        (a_head(temperature=2), DAMAGED),
        (a_head(query=drawn(2, WIDTH)), DAMAGED),
        (a_head(value=drawn(WIDTH, WIDTH)), DAMAGED),
        (a_head(query=drawn(2, 5), value=drawn(WIDTH, WIDTH)), DAMAGED),
        (a_head(query=drawn(WIDTH), value=drawn(WIDTH, WIDTH)), DAMAGED),
        (a_head(query=drawn(4, WIDTH), value=drawn(WIDTH, WIDTH)), DAMAGED),
        (a_head(query=drawn(0, WIDTH), value=drawn(WIDTH, WIDTH)), DAMAGED),
        (a_head(query=drawn(2, WIDTH), value=drawn(WIDTH, 5)), DAMAGED),
        (
            KeptHead(drawn(CLASSES, WIDTH), torch.tensor([0.0, float("inf"), 0])),
            DAMAGED,
        ),
        (a_head(query=drawn(2, WIDTH) / 0, value=drawn(WIDTH, WIDTH)), DAMAGED),
    ],
)
def test_a_head_that_cannot_be_is_refused(tmp_path, head, says):
    kept_heads.keep(tmp_path / HEADS_FILE, "x", head, about())
    with pytest.raises(BadInput) as refused:
        load(tmp_path)
    assert f"{tmp_path / HEADS_FILE}: the head x {says}" in str(refused.value)


@pytest.mark.parametrize("queries", [1, 2, 3, 6])
def test_queries_divide_the_features_among_them(tmp_path, queries):
    kept_heads.keep(tmp_path / HEADS_FILE, "x", queried(queries), about())
    assert load(tmp_path).query.shape == (queries, WIDTH)


def test_other_numbers_than_were_kept_and_missing_words_are_refused(tmp_path):
    file = tmp_path / HEADS_FILE
    kept_heads.keep(file, "x", a_head(), about())
    tensors, metadata = kept_heads._read(file)
    save_file({**tensors, "x/bias": tensors["x/bias"] + 1}, file, metadata)
    with pytest.raises(BadInput, match=DAMAGED):
        load(tmp_path)
    whole = json.loads(metadata["x"])
    for key in ("temperature", "temperature_from"):
        less = {name: value for name, value in whole.items() if name != key}
        save_file(tensors, file, {"x": json.dumps(less)})
        with pytest.raises(BadInput, match=f"damaged .*{key}.*; train the head again"):
            load(tmp_path)
    for text in ("{", "[]"):
        save_file(tensors, file, {"x": text})
        with pytest.raises(BadInput, match=r"damaged .*; train the head again"):
            load(tmp_path)
    file.write_bytes(b"nothing")
    with pytest.raises(BadInput, match=f"{file}: no readable heads .*; remove it"):
        load(tmp_path)
