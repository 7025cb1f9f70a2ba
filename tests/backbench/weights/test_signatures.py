"""What tells the models of a published format apart: widths, patches, stages."""

from types import SimpleNamespace

import pytest
import torch

from backbench.weights.families import timm_files
from backbench.weights.families.timm_layouts import layouts
from backbench.weights.families.timm_models import TimmFamily


def a_trunk(shapes, *, blocks="blocks", registers=False):
    """A trunk in a file of tensors of these shapes, by name."""
    local = {name: f"model.{name}" for name in shapes}
    tensors = {
        f"model.{name}": torch.empty(shape, device="meta")
        for name, shape in shapes.items()
    }
    layout = SimpleNamespace(blocks=blocks)
    return SimpleNamespace(local=local, layout=layout, has_registers=registers), tensors


PLAIN = {
    "patch_embed.proj.weight": (384, 3, 14, 14),
    "patch_embed.proj.bias": (384,),
    "blocks.0.norm1.weight": (384,),
    "blocks.0.norm1.bias": (384,),
    "blocks.0.mlp.fc1.bias": (1536,),
    "blocks.0.attn.qkv.weight": (1152, 384),
}


@pytest.mark.parametrize(
    ("more", "registers", "says"),
    [
        ({}, False, "384/14"),
        ({}, True, "384/14+reg"),
        ({"blocks.0.mlp.w3.weight": (384, 1024)}, True, "384/14+reg+glu"),
        ({"blocks.0.mlp.gate_proj.weight": (384, 1024)}, False, "384/14+glu"),
        ({"blocks.0.mlp.fc1_g.weight": (384, 1024)}, False, "384/14+glu"),
        ({"patch_embed.proj.weight": (384, 1)}, False, "384/16"),
    ],
)
def test_a_transformer_has_a_width_and_a_patch(more, registers, says):
    trunk, tensors = a_trunk(PLAIN | more, registers=registers)
    assert timm_files.signature(trunk, tensors) == says


def stages(width, depth, *, grn=False, start="stages"):
    shapes = {}
    for block in range(3):
        shapes[f"{start}.0.blocks.{block}.norm.weight"] = (width,)
        shapes[f"{start}.0.blocks.{block}.norm.bias"] = (width,)
        if grn:
            shapes[f"{start}.0.blocks.{block}.mlp.grn.weight"] = (4 * width,)
    for block in range(depth):
        shapes[f"{start}.2.blocks.{block}.norm.weight"] = (4 * width,)
    shapes[f"{start}.2.downsample.0.weight"] = (2 * width,)
    return shapes


@pytest.mark.parametrize(
    ("width", "depth", "grn", "says"),
    [
        (96, 9, False, "96x9"),
        (96, 27, False, "96x27"),
        (128, 27, False, "128x27"),
        (96, 9, True, "96x9+grn"),
        (40, 6, True, "40x6+grn"),
        (64, 8, True, "64x8+grn"),
        # A file without one block is no smaller model
        (96, 8, False, "96x9"),
        (96, 26, False, "96x27"),
        (128, 9, False, "128x27"),
        (40, 5, True, "40x6+grn"),
        (40, 7, True, "40x8+grn"),
    ],
)
def test_a_convnext_has_a_width_and_a_depth(width, depth, grn, says):
    trunk, tensors = a_trunk(
        stages(width, depth, grn=grn), blocks=r"stages\.\d\.blocks"
    )
    assert timm_files.signature(trunk, tensors) == says
    inside = {
        f"encoder.{name}": shape
        for name, shape in stages(width, depth, grn=grn).items()
    }
    trunk, tensors = a_trunk(inside, blocks=r"encoder\.stages")
    assert timm_files.signature(trunk, tensors) == says


def test_torchvisions_stages_are_every_other_of_its_features():
    shapes = {"features.0.0.weight": (96, 3, 4, 4)}
    for block in range(3):
        shapes[f"features.1.{block}.block.2.weight"] = (96,)
    for block in range(9):
        shapes[f"features.5.{block}.block.2.weight"] = (384,)
    shapes["features.3.0.block.2.weight"] = (192,)
    trunk, tensors = a_trunk(shapes, blocks="features")
    assert timm_files.signature(trunk, tensors) == "96x9"


# The side of the images, by the position embeddings


def position_side(shape, *, arch, folds=False):
    """The side that a file's position embeddings of this shape tell."""
    family = TimmFamily()
    key = "model.pos_embed"
    (layout,) = [each for each in layouts() if each.name == "timm's"]
    trunk = SimpleNamespace(family=family, layout=layout, local={"pos_embed": key})
    tensors = {key: torch.empty(shape, device="meta")}
    return timm_files._img_size(trunk, tensors, arch, folds)


SIXTEEN = "img_size=32,embed_dim=24,num_heads=2,depth=1,patch_size=8"  # patches
CLASS_TOKEN = f"timm:vit_tiny_patch16_224,{SIXTEEN}"
NO_CLASS_POSITION = f"timm:deit3_small_patch16_224,{SIXTEEN}"


@pytest.mark.parametrize(
    ("arch", "shape", "side"),
    [
        # The model's own 16 patches and its class token
        (CLASS_TOKEN, (1, 17, 24), None),
        # Four by four, five by five, and one
        (CLASS_TOKEN, (1, 26, 24), 40),
        (CLASS_TOKEN, (26, 24), 40),
        (CLASS_TOKEN, (1, 2, 24), 8),
        # No square, no patch, fewer rows than the class token's, and no rows at all
        (CLASS_TOKEN, (1, 25, 24), None),
        (CLASS_TOKEN, (1, 27, 24), None),
        (CLASS_TOKEN, (1, 1, 24), None),
        (CLASS_TOKEN, (1, 0, 24), None),
        (CLASS_TOKEN, (26,), None),
        # Patches alone have positions
        (NO_CLASS_POSITION, (1, 25, 24), 40),
        (NO_CLASS_POSITION, (1, 16, 24), None),
        (NO_CLASS_POSITION, (1, 26, 24), None),
        # Rotations and no embeddings
        ("timm:vit_small_patch16_dinov3,depth=1", (1, 26, 384), None),
        ("timm:test_convnext", (1, 26, 24), None),
    ],
)
def test_a_square_of_patches_tells_the_side_of_the_images(arch, shape, side):
    assert position_side(shape, arch=arch) == side


@pytest.mark.parametrize(("rows", "side"), [(17, None), (26, 40), (25, None)])
def test_a_folded_position_is_no_patch(rows, side):
    """The file has a position for its class token, and the model has none."""
    assert position_side((1, rows, 24), arch=NO_CLASS_POSITION, folds=True) == side
