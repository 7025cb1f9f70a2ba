"""Names of timm's models with options: the largest values that are taken, and their order."""

import pytest

from backbench.errors import BadInput
from backbench.weights.families.timm_model_names import OPTIONS, parse


def test_the_order_of_options_is_no_part_of_a_name():
    name = parse("timm:vit_tiny_patch16_224,num_heads=6,depth=2,eps=1e-6")
    assert name.model == "vit_tiny_patch16_224"
    assert name.options == {"num_heads": "6", "depth": "2", "eps": "1e-6"}
    assert str(name) == "timm:vit_tiny_patch16_224,depth=2,eps=1e-6,num_heads=6"
    assert parse(str(name)) == name
    assert str(parse("timm:resnet18")) == str(parse("resnet18")) == "timm:resnet18"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("img_size", "65536", 65536),
        ("embed_dim", "1", 1),
        ("depth", "200", 200),
        ("depths", "200-1-3", [200, 1, 3]),
        ("dims", "201-1-2-3-4-5-6-7", [201, 1, 2, 3, 4, 5, 6, 7]),
        ("mlp_ratio", "2.667", 2.667),
        ("init_values", "1e-05", 1e-5),
        ("eps", "999999.5", 999999.5),
        ("act_layer", "gelu_tanh", "gelu_tanh"),
        ("pos", "+0.1", "+0.1"),
    ],
)
def test_the_values_of_options(key, text, value):
    assert OPTIONS[key](text) == value
    assert parse(f"timm:resnet18,{key}={text}").options == {key: text}


@pytest.mark.parametrize(
    ("key", "text", "shown", "expected"),
    [
        ("img_size", "032", "032", "a whole number from 1 to 65536"),
        ("patch_size", "16.0", "16.0", "a whole number from 1 to 65536"),
        ("depths", "2-201", "201", "a whole number from 1 to 200"),
        ("depths", "2--2", "", "a whole number from 1 to 200"),
        ("eps", "1e6", "1e6", "a number above 0"),
        ("eps", "1e-999", "1e-999", "a number above 0"),
        ("mlp_ratio", "nan", "nan", "a number above 0"),
        ("act_layer", "", "", "gelu or quick_gelu or gelu_tanh or relu or silu"),
    ],
)
def test_what_is_no_value_is_shown_with_what_is_expected(key, text, shown, expected):
    with pytest.raises(BadInput) as refused:
        parse(f"timm:resnet18,{key}={text}")
    assert str(refused.value) == f"'{shown}' in the trunk's name: expected {expected}"
