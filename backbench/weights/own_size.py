"""Says at which size a trunk was trained: a trunk that is measured at another size is worth less."""

from collections.abc import Mapping
from dataclasses import dataclass

from backbench.weights.checkpoint import Checkpoint

UNKNOWN = 224  # pixels, as ImageNet's trunks have


@dataclass(frozen=True)
class OwnSize:
    """The side of the images on which a trunk was trained, in pixels, and who says so."""

    pixels: int
    source: str  # "its pretraining recipe"; "nobody" where the size is a guess

    @property
    def known(self) -> bool:
        return self.source != "nobody"

    def told(self, measured: int) -> str:
        """Say at which size a trunk is read, and whether that is its own."""
        if not self.known:
            return (
                f"read at {measured} pixels; nobody says at which size it was trained"
            )
        if measured == self.pixels:
            return f"read at {measured} pixels, its own size ({self.source})"
        return (
            f"read at {measured} pixels, away from its own size of {self.pixels}"
            f" ({self.source})"
        )


def own_size(checkpoint: Checkpoint) -> OwnSize:
    """Return a trunk's own size: that of its pretraining recipe, or of its architecture (position
    embeddings, timm's configuration); 224 where nobody says it."""
    pixels = _of_recipe(checkpoint.provenance.get("recipe"))
    if pixels is not None:
        return OwnSize(pixels, "its pretraining recipe")
    trunk = checkpoint.blank()
    if trunk.size is not None:
        return OwnSize(trunk.size, "its architecture")
    if trunk.trained_size is not None:
        return OwnSize(trunk.trained_size, "timm's configuration")
    return OwnSize(UNKNOWN, "nobody")


def _of_recipe(recipe: object) -> int | None:
    """Return the size of the first crops of a pretraining recipe, as plain values."""
    if not isinstance(recipe, Mapping):
        return None
    views = recipe.get("views")
    crops = views.get("crops") if isinstance(views, Mapping) else None
    first = crops[0] if isinstance(crops, list | tuple) and crops else None
    size = first.get("size") if isinstance(first, Mapping) else None
    return size if isinstance(size, int) and size > 0 else None
