"""Compiles variants as JSON from stdin, cubins `0.out`, `1.out`, … to a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from smkern.kernels.fp8.gemm_compile import ScaledVariant
from smkern.kernels.gemm_variants import Variant

_ROWS = 1 << 20
"""Rows and columns of the operands that the DSL is shown: of a map only its box is compiled in."""


def main(folder: Path) -> None:
    from cutlass import Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from smkern.kernels.cute.fp8_gemm import ScaledGemm
    from smkern.kernels.cute.gemm import Gemm

    for i, (kind, values) in enumerate(json.load(sys.stdin)):
        gemm = Gemm(Variant(**values)) if kind == "Variant" else ScaledGemm(ScaledVariant(**values))
        x, y = (
            make_fake_tensor(gemm.dtype, (_ROWS, _ROWS), (_ROWS, 1), assumed_align=16)
            for _ in range(2)
        )
        compiled = cute.compile(gemm.host, x, y, Int64(0), Int32(1), make_fake_stream())
        part = folder / f"{i}.part"
        part.write_bytes(compiled.artifacts.CUBIN)
        part.rename(folder / f"{i}.out")  # whole or not at all: who asked keeps what is there


if __name__ == "__main__":
    main(Path(sys.argv[1]))
