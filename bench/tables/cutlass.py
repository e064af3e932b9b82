"""The table of `cutlass.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.cutlass import Groups, groups_of, over_cublas, over_triton
from smkern.bench.tables.markdown import pivot
from smkern.measure.timing import geomean


def ratios_table(cells: Iterable[dict[str, Any]]) -> str:
    """Speed over our Triton and Gluon kernels, and over cuBLAS: geomeans over the shapes."""
    found: dict[tuple[int, int], Groups] = {}
    for group in groups_of(cells):
        cell = group["smkern"]
        found.setdefault((cell["case"]["m"], cell["num_sms"]), []).append(group)
    entries = []
    for (m, num_sms), groups in sorted(found.items()):
        peers = [value for group in groups if (value := over_cublas(group)) is not None]
        means = geomean(map(over_triton, groups)), geomean(peers)
        text = " / ".join("-" if mean is None else f"{mean:.2f}" for mean in means)
        entries.append((str(m), num_sms, text))
    return pivot("M \\ SMs", entries)
