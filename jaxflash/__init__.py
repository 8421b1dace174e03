"""Flash attention for JAX from hand-written C++ and CUDA kernels.

Public are the names in __all__ and `jaxflash.flax`; other modules are private.
"""

from importlib.metadata import PackageNotFoundError, version

from jaxflash import checkpoint_policies
from jaxflash.attention import dot_product_attention
from jaxflash.explain import explain
from jaxflash.varlen import flash_attention_varlen

try:
    __version__ = version("jaxflash")
except PackageNotFoundError:  # imported from a source tree
    __version__ = "0+source"

__all__ = [
    "__version__",
    "checkpoint_policies",
    "dot_product_attention",
    "explain",
    "flash_attention_varlen",
]
