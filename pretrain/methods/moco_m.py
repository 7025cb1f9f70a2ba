"""MoCo-M: MoCo with multi-crop, LORAC's baseline. It is LORAC's function and pairs without the
prior."""

from dataclasses import dataclass

from backbench.errors import BadInput
from backbench.pretrain.method import Setup
from backbench.pretrain.methods import lorac
from backbench.weights.trunk import Trunk


@dataclass(frozen=True, kw_only=True)
class Config(lorac.Config):
    prior: lorac.Prior = "none"
    # Released code: no key meets view 1, so that key 0 meets its own view, and view 1 is never
    # a query
    released_pairs: bool = False


class Method(lorac.Method):
    config: Config

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        if config.released_pairs and config.keys != 2:
            raise BadInput(
                f"moco_m: released_pairs is for two keys, not {config.keys}; set method.keys=2"
            )
        super().__init__(config, backbone, setup)

    def meets(self, key: int, view: int) -> bool:
        if self.config.released_pairs:
            return view != 1
        return super().meets(key, view)
