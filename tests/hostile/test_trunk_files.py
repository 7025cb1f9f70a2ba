"""Files of vision transformers by strangers, and what lies beside them."""

import json
import random

import pytest
import torch
from support import timm_fixtures as fx

from backbench.errors import BadInput
from backbench.weights import importing
from backbench.weights.family import TrunkMetadata
from backbench.weights.importing import FileContents
from backbench.weights.weight_file import Opened

TIMM = {"architecture": "test_vit"}
HUB = {"model_type": "clip"}
HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.mark.parametrize(("config", "said"), [
    ({"architecture": "hf-hub:nobody/nothing"}, "no model 'hf-hub:nobody/nothing'"),
    ({"architecture": "../../etc/passwd"}, "no model"),
    ({"architecture": {"a": 1}}, "no model"),
    (TIMM | {"model_args": {"depth": 9999}}, "from 1 to 200"),
    (TIMM | {"model_args": {"img_size": 10**30}}, "whole number"),
    (TIMM | {"model_args": {"norm_layer": "os.system"}}, "norm_layer=os.system"),
    (TIMM | {"model_args": 3}, "not a configuration that is known"),
    (TIMM | {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0, 1, 1]}}, "above 0"),
    (TIMM | {"pretrained_cfg": {"mean": "abc", "std": [1, 1, 1]}}, "finite numbers"),
    (TIMM | {"pretrained_cfg": [1]}, "not a configuration that is known"),
    (HUB | {"vision_config": {"num_attention_heads": "many"}}, "not a configuration"),
    (HUB | {"vision_config": {"hidden_act": "__import__"}}, "hidden_act '__import__'"),
    ([1, 2], "expected an object"),
])  # fmt: skip
def test_configuration_beside_a_file(config, said, tmp_path):
    from safetensors.torch import save_file

    save_file(fx.known("timm:test_vit"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput) as error:
        importing.read(tmp_path / "model.safetensors")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def mutated(table, dice):
    """One change to one table of a file: of a name, a shape, a type, a size."""
    key = dice.choice(sorted(table))
    value = table.pop(key)
    kind = dice.choice(["lost", "renamed", "cut", "scalar", "whole", "endless", "twice", "half"])
    cut = value[..., :0] if value.dim() else value.reshape(1, 1)
    changed = {
        "renamed": {key.replace("weight", "wieght") + "s": value},
        "cut": {key: cut},
        "scalar": {key: torch.zeros(())},
        "whole": {key: value.to(torch.int8)},
        "endless": {key: torch.ones((), dtype=torch.half).expand(*value.shape[:-1], 10**13)},
        "twice": {key: value, f"module.{key}": value, f"blocks.0.{key}": value},
        "half": {key: value.half()},
    }
    table |= changed.get(kind, {})
    return kind


@pytest.mark.parametrize(
    "maker",
    [fx.dinov2_registers, fx.dinov3, fx.hub_clip, fx.hub_siglip, fx.convnext, fx.mae],
    ids=lambda maker: maker.__name__,
)
def test_mutated_files_are_whole_or_refused(maker, tmp_path):
    """Whatever is changed: refused in one line, or every weight is what it was."""
    arch, state = fx.CASES[maker][1], fx.known(fx.CASES[maker][1])
    metadata = TrunkMetadata(arch=arch)
    for seed in range(15):
        dice = random.Random(seed)
        made = {k: dict(v) if isinstance(v, dict) else v for k, v in maker(state).items()}
        tables = [v for v in made.values() if isinstance(v, dict)] or [made]
        kinds = [mutated(tables[0], dice) for _ in range(dice.choice([1, 1, 2]))]
        opened = Opened(tmp_path / "x.pth", "torch zip", "0" * 64, 0, made, {})
        try:
            found = FileContents(opened, metadata)
            checkpoint = found.checkpoint(found.choose())
        except BadInput as error:
            assert "\n" not in str(error), kinds
            continue
        for name, tensor in checkpoint.state_dict.items():
            assert torch.allclose(tensor, state[name], atol=2e-3), (kinds, name)
