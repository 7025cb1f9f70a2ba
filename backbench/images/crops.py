"""What a recipe says of a group of training views. It needs no torch, which is imported later."""

from dataclasses import dataclass
from typing import Literal

from backbench.requests.bounds import MOST_REPEATS, MOST_SIDE


@dataclass(frozen=True, kw_only=True)
class Crops:
    """A group of `count` views made alike. Numbers are those of torchvision's transforms."""

    count: int = 2
    size: int = 224
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (0.75, 1.3333333333333333)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    flip: float = 0.5
    # brightness, contrast, saturation, hue
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_p: float = 0.8
    gray_p: float = 0.2
    gray_first: bool = False  # gray before the jitter, as in MoCo v1
    blur_p: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    # Pixels, an odd number: torchvision's GaussianBlur with such a kernel. null: PIL's, unlimited
    blur_kernel: int | None = None
    solarize_p: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.size < 1:
            raise ValueError(
                f"count and size must be at least 1, not {self.count} and {self.size}"
            )
        if self.count > MOST_REPEATS or self.size > MOST_SIDE:
            raise ValueError(
                f"count must be at most {MOST_REPEATS} and size at most {MOST_SIDE},"
                f" not {self.count} and {self.size}"
            )
        for name in ("flip", "jitter_p", "gray_p", "blur_p", "solarize_p"):
            chance = getattr(self, name)
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} is a probability, from 0 to 1, not {chance}")
        scale_fits = 0 < self.scale[0] <= self.scale[1]
        ratio_fits = 0 < self.ratio[0] <= self.ratio[1]
        if not scale_fits or not ratio_fits:
            raise ValueError(
                f"scale {self.scale} and ratio {self.ratio} must be positive and increasing"
            )
        kernel = self.blur_kernel
        most = 2 * self.size - 1  # the picture is mirrored at its edges, once
        if kernel is not None and (kernel % 2 == 0 or not 0 < kernel <= most):
            raise ValueError(
                f"blur_kernel must be odd, not {kernel}, and from 1 to {most}"
            )
        if min(self.jitter) < 0 or self.jitter[3] > 0.5:
            raise ValueError(
                f"jitter {self.jitter} must not be negative, and that of the hue is at most 0.5"
            )
        if not 0 <= self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(
                f"blur_sigma {self.blur_sigma} must be from 0 on and increasing"
            )
