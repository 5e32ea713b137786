"""Every operator. Importing this package fills the registry and declares them to torch."""

from ..philox import drop_path_mask, dropout_mask
from .activations import ACTIVATIONS, activation
from .attention import attention
from .layernorm import layernorm
from .linear_residual import linear_residual
from .mlp import mlp
from .norm_linear import norm_linear
from .patch_embed import patch_embed
from .rotary import rotary
from .swiglu import swiglu

__all__ = [
    "ACTIVATIONS",
    "activation",
    "attention",
    "drop_path_mask",
    "dropout_mask",
    "layernorm",
    "linear_residual",
    "mlp",
    "norm_linear",
    "patch_embed",
    "rotary",
    "swiglu",
]
