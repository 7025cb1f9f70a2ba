"""Features of the authors' ViT files against their papers' equations, in float64, without timm.

    tokens = [class token, patches] + positions                       arXiv:2010.11929, eq. 1
    x = x + attention(LN(x));  x = x + W2 gelu(W1 LN(x))              eq. 2, 3
    attention = softmax(q k^T / sqrt(d)) v, d = width / heads         eq. 5 to 8 (A)

with gelu by the error function and LN's epsilon 1e-6: facebookresearch/mae, models_mae.py;
facebookresearch/moco-v3, vits.py; bytedance/ibot, models/vision_transformer.py.
"""

import math

import numpy as np
import pytest
import torch
from support import timm_fixtures as fx

from backbench.weights import archs, importing

EPS = 1e-6
_erf = np.vectorize(math.erf)


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * weight + bias


def attention(x, file, at, heads):
    """(N, T, D) -> (N, T, D)."""
    n, t, width = x.shape
    qkv = x @ file[f"{at}.qkv.weight"].T + file[f"{at}.qkv.bias"]
    # Three thirds, queries first, each of whole heads
    parts = (
        part.reshape(n, t, heads, width // heads) for part in np.split(qkv, 3, axis=-1)
    )
    q, k, v = (part.transpose(0, 2, 1, 3) for part in parts)
    logits = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = (shares @ v).transpose(0, 2, 1, 3).reshape(n, t, width)
    return mixed @ file[f"{at}.proj.weight"].T + file[f"{at}.proj.bias"]


def layers(file, images, heads):
    """Images (N, 3, H, W), normalised -> the tokens (N, 1 + T, D) of every layer, each normed."""
    kernel = file["patch_embed.proj.weight"]
    width, _, p, _ = kernel.shape
    n, _, h, w = images.shape
    # A convolution whose stride is its size: a product with each patch
    patches = images.reshape(n, 3, h // p, p, w // p, p).transpose(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(n, -1, 3 * p * p) @ kernel.reshape(width, -1).T
    patches = patches + file["patch_embed.proj.bias"]
    first = np.repeat(file["cls_token"], n, axis=0)
    x = np.concatenate([first, patches], axis=1) + file["pos_embed"]
    out = []
    while (block := f"blocks.{len(out)}") + ".norm1.weight" in file:
        layers = [f"{block}.{k}" for k in ("norm1", "norm2")]
        norms = [(file[f"{layer}.weight"], file[f"{layer}.bias"]) for layer in layers]
        x = x + attention(layer_norm(x, *norms[0]), file, f"{block}.attn", heads)
        inner = layer_norm(x, *norms[1]) @ file[f"{block}.mlp.fc1.weight"].T
        inner = inner + file[f"{block}.mlp.fc1.bias"]
        inner = inner * (1 + _erf(inner / math.sqrt(2))) / 2
        x = (
            x
            + inner @ file[f"{block}.mlp.fc2.weight"].T
            + file[f"{block}.mlp.fc2.bias"]
        )
        out.append(x)
    return [layer_norm(x, file["norm.weight"], file["norm.bias"]) for x in out]


# What each project saves: the table and prefix of the trunk; the last layers whose class tokens count
FILES = {
    fx.mae: ("model", "", 1),
    fx.moco_v3: ("state_dict", "module.base_encoder.", 1),
    fx.ibot: ("state_dict", "", 4),
}
maker_of = pytest.mark.parametrize(
    "maker", [pytest.param(m, id=m.__name__) for m in FILES]
)


def drawn(arch):
    """Draw a state dict in which every tensor matters; attention is neither even nor on one token."""
    generator = torch.Generator().manual_seed(2)
    out = {}
    for name, blank in archs.tensors(arch).items():
        value = torch.randn(blank.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            value = 1 + 0.2 * value
        elif value.dim() == 2 or value.dim() == 4:
            value = 1.5 * value / math.sqrt(value[0].numel())
        out[name] = value
    return out


def difference(maker, of, heads, tmp_path, **said):
    """Return the largest difference of features over the largest feature, for a file of trunk `of`."""
    made = maker(drawn(of))
    torch.save(made, tmp_path / "file.pth")
    checkpoint = importing.read(tmp_path / "file.pth", **said)
    table, prefix, last = FILES[maker]
    file = {
        k.removeprefix(prefix): v
        for k, v in made[table].items()
        if k.startswith(prefix)
    }
    file = {key: value.double().numpy() for key, value in file.items()}
    trunk = checkpoint.backbone().eval()
    images = torch.randn(
        2, 3, trunk.size, trunk.size, generator=torch.Generator().manual_seed(1)
    )
    every = layers(file, images.double().numpy(), heads)
    expected = np.concatenate([one[:, 0] for one in every[-last:]], axis=1)
    with torch.no_grad():
        found = trunk(images).numpy()
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


SMALL = fx.VIT.replace("depth=2", "depth=4")


@maker_of
def test_features_are_those_of_the_equations(maker, tmp_path):
    # By itself that of width 384 alone
    read = {"reading": "cls@4", "method": "ibot"} if maker is fx.ibot else {}
    assert difference(maker, SMALL, 2, tmp_path, arch=SMALL, **read) < 1e-5
    four = SMALL.replace("num_heads=2", "num_heads=4")
    assert difference(maker, SMALL, 4, tmp_path, arch=four, **read) < 1e-5
    assert difference(maker, SMALL, 2, tmp_path, arch=four, **read) > 1e-2
