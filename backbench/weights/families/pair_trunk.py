"""Builds the network of CMC's pair: a ResNet on luminance and one on colour."""

import functools

import torch
from torch import Tensor

from backbench.weights.families.resnet_trunk import build_backbone
from backbench.weights.trunk import Trunk

# sRGB's linear light -> CIE XYZ, and the white that it is relative to (IEC 61966-2-1; D65, 2 degrees)
_TO_XYZ = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)
_WHITE = (0.95047, 1.0, 1.08883)
# The middle and the half range of L, a and b (HobbitLong/CMC: train_CMC.py)
_MIDDLE = (50.0, 6.025, -6.6895)
_HALF_RANGE = (50.0, 92.208, 101.1675)


@functools.cache
def _constants(
    device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrix from linear RGB to shares of the white's XYZ (3, 3), and the middle and half
    range of L, a, b (3, 1, 1). They are sent to the device once."""
    white = torch.tensor(_WHITE, dtype=dtype).unsqueeze(1)
    matrix = torch.tensor(_TO_XYZ, dtype=dtype) / white
    middle = torch.tensor(_MIDDLE, dtype=dtype).view(3, 1, 1)
    half_range = torch.tensor(_HALF_RANGE, dtype=dtype).view(3, 1, 1)
    return matrix.to(device), middle.to(device), half_range.to(device)


def rgb_to_lab(images: Tensor) -> Tensor:
    """Convert RGB (N, 3, H, W) from 0 to 1 to CIE L*a*b* (N, 3, H, W), L from 0 to 100, white D65."""
    # 1. Take away the gamma of sRGB
    dark = images / 12.92
    bright = ((images.clamp_min(0.04045) + 0.055) / 1.055) ** 2.4
    linear = torch.where(images > 0.04045, bright, dark)
    # 2. XYZ, each as a share of the white's. Element by element, as autocast would compute a product
    # of matrices in half precision
    matrix, _, _ = _constants(images.device, images.dtype)
    xyz = (linear.unsqueeze(1) * matrix.view(1, 3, 3, 1, 1)).sum(2)
    # 3. What the eye sees: the cube root, or a straight line near black
    root = xyz.clamp_min(0.008856) ** (1 / 3)
    x, y, z = torch.where(xyz > 0.008856, root, 7.787 * xyz + 16 / 116).unbind(1)
    # 4. Lightness, green to red, blue to yellow
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=1)


class LabPair(Trunk):
    """A pair has two trunks, `l_to_ab` on L and `ab_to_l` on ab, as CMC calls them."""

    memory_format = torch.channels_last

    def __init__(self, half: str, stem: str, width: float) -> None:
        super().__init__()
        self.stem = stem
        self.l_to_ab = build_backbone(half, stem, channels=1, width=width)
        self.ab_to_l = build_backbone(half, stem, channels=2, width=width)
        self.feature_dim = self.l_to_ab.feature_dim + self.ab_to_l.feature_dim
        self.strides = self.l_to_ab.strides
        self.widths = tuple(
            a + b for a, b in zip(self.l_to_ab.widths, self.ab_to_l.widths)
        )

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split RGB (N, 3, H, W) from 0 to 1 into L (N, 1, H, W) and ab (N, 2, H, W), each scaled to
        about -1 to 1."""
        with torch.no_grad():
            # Half precision is too coarse for the conversion.
            precise = x if x.dtype == torch.float64 else x.float()
            lab = rgb_to_lab(precise)
            _, middle, half_range = _constants(lab.device, lab.dtype)
            lab = ((lab - middle) / half_range).to(x.dtype)
        return lab[:, :1], lab[:, 1:]

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to features (N, feature_dim), the luminance trunk's half first."""
        luminance, colour = self.split(x)
        return torch.cat([self.l_to_ab(luminance), self.ab_to_l(colour)], dim=1)

    def stages(self, x: Tensor) -> list[Tensor]:
        luminance, colour = self.split(x)
        pairs = zip(self.l_to_ab.stages(luminance), self.ab_to_l.stages(colour))
        return [torch.cat(pair, dim=1) for pair in pairs]

    def fuse(self) -> None:
        self.l_to_ab.fuse()
        self.ab_to_l.fuse()

    def dilate(self, stride: int) -> None:
        self.l_to_ab.dilate(stride)
        self.ab_to_l.dilate(stride)
        self.strides = self.l_to_ab.strides

    def depths(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for name in ("l_to_ab", "ab_to_l"):
            half = getattr(self, name).depths()
            out |= {f"{name}.{parameter}": depth for parameter, depth in half.items()}
        return out
