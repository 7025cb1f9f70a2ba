"""MoCo-M: MoCo with multi-crop, LORAC's baseline. It is LORAC's function and pairs without the
prior. (In the released MoCo-M code the second key is trained against its own view and never against
the first view's; here each key meets every other view.)"""

from dataclasses import dataclass

from backbench.pretrain.methods import lorac


@dataclass(frozen=True, kw_only=True)
class Config(lorac.Config):
    prior: lorac.Prior = "none"


Method = lorac.Method
