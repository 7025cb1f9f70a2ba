"""DCL: debiased contrastive learning (arXiv:2007.00224), CLLR's baseline. It is HCL with all
negatives alike (Eq. 8, M = 1); lightly's DCL is the decoupled loss."""

from dataclasses import dataclass

from backbench.pretrain.methods import hcl


@dataclass(frozen=True, kw_only=True)
class Config(hcl.Config):
    beta: float = 0.0


Method = hcl.Method
