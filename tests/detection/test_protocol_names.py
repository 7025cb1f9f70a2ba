"""The name of a run's protocol: a shipped one's, said with mixed precision or a frozen trunk."""

from pathlib import Path

import pytest

from backbench.detection import dialect, protocol
from backbench.errors import Failed

AMP = ("SOLVER.AMP.ENABLED", "True")
BF16 = ("SOLVER.AMP.PRECISION", "bf16")
FROZEN = ("MODEL.TRUNK.FROZEN", "True")


def named(*opts, name="mask_rcnn_R_50_FPN_1x"):
    return protocol.protocol(dialect.read(name, opts))


@pytest.mark.parametrize(
    ("opts", "name"),
    [
        ((), "detection-1x-v1"),
        (BF16, "detection-1x-v1"),
        (AMP, "detection-1x-fp16-v1"),
        ((*AMP, *BF16), "detection-1x-bf16-v1"),
        (FROZEN, "detection-1x-frozen-v1"),
        ((*AMP, *BF16, *FROZEN), "detection-1x-frozen-bf16-v1"),
        # Whatever is stated at its default, what the rows name and how often a run is looked at
        (("SOLVER.WARMUP_METHOD", "linear", *FROZEN), "detection-1x-frozen-v1"),
        (("MODEL.RESNETS.DEPTH", "18", "SEED", "7"), "detection-1x-v1"),
        (("TEST.EVAL_PERIOD", "50"), "detection-1x-v1"),
    ],
)
def test_a_shipped_config_has_its_name(opts, name):
    assert named(*opts) == name


def test_a_config_that_freezes_as_it_is_shipped_has_its_own_name():
    assert named(name="tiny_keypoint_rcnn_frozen") == "detection-tiny-frozen-v1"
    assert named(name="faster_rcnn_R_50_C4_VOC") == "detection-c4-voc-v2"


def test_any_other_has_a_fingerprint_of_its_own():
    rates = [named("SOLVER.BASE_LR", rate) for rate in ("0.03", "0.04")]
    both = named("SOLVER.BASE_LR", "0.03", *FROZEN)
    assert len({*rates, both}) == 3
    assert all(name.startswith("detection-") for name in rates)
    assert named("SOLVER.BASE_LR", "0.03", "TEST.EVAL_PERIOD", "9") == rates[0]


def test_keys_are_stated_in_order_without_those_that_are_free():
    values = {"TEST.EVAL_PERIOD": 5, "SEED": 3, "SOLVER.STEPS": (1, 2)}
    values |= {"INPUT.FORMAT": "RGB", "MODEL.WEIGHTS": "x", "A.KEY": 1}
    values |= {"SOLVER.WARMUP_METHOD": "linear", "SOLVER.OPTIMIZER": "ADAMW"}
    given = dialect.Given(Path("mine.yaml"), values)
    decisive = {"A.KEY": 1, "SOLVER.OPTIMIZER": "ADAMW", "SOLVER.STEPS": [1, 2]}
    assert protocol.decisive(given) == decisive
    stated = {"SOLVER.WARMUP_METHOD": "linear", "TEST.EVAL_PERIOD": 5}
    assert protocol.stated(given) == decisive | stated
    assert list(protocol.stated(given)) == sorted(decisive | stated)


def test_a_shipped_config_without_a_name_is_a_fault(tmp_path):
    (tmp_path / "_base.yaml").write_text("SEED: 1\n")
    (tmp_path / "a.yaml").write_text("# protocol:  mine-v3 \nA:\n  B: 2\n")
    assert protocol._shipped(tmp_path) == [("mine-v3", {"A.B": 2})]
    (tmp_path / "b.yaml").write_text("A:\n  B: 2\n")
    protocol._shipped.cache_clear()
    with pytest.raises(Failed) as error:
        protocol._shipped(tmp_path)
    said = "does not state its protocol; add a line `# protocol: NAME-v1`"
    assert str(error.value) == f"{tmp_path}/b.yaml: {said}"
