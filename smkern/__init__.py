"""SM partitions for LLM serving, and kernels that know how many SMs they have.

Importing smkern loads neither torch nor Triton nor the driver; a public name does when it is
first used.

>>> import smkern
>>> ladder = smkern.ladder()                    # doctest: +SKIP
>>> with ladder.split(decode=32).prefill:       # doctest: +SKIP
...     y = smkern.gemm(x, w)                   # on the 100 SMs of this partition
>>> policy = smkern.policies.StaticSplit(32)
>>> mux = smkern.serve(decoder, pool, ladder=ladder, policy=policy)     # doctest: +SKIP
"""

from __future__ import annotations

import os.path

from smkern.lazy import attach_stub

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
__all__ += ["__version__"]


def _checkout_root() -> str | None:
    """The checkout this package is imported from, or None where it is installed."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    marks = ("pyproject.toml", "autotune", "bench")
    return root if all(os.path.exists(os.path.join(root, mark)) for mark in marks) else None


# autotune/, bench/ and examples/ install as children of smkern; in a checkout they lie beside
# smkern/, where Python finds them once the root is on the package's path.
if _root := _checkout_root():
    __path__.append(_root)
