"""Made-up cells: where they are, and those of a gemm results file."""

from __future__ import annotations

from typing import Any

from smkern.bench.cells import Ceiling

Cell = dict[str, Any]


def where(num_sms: int) -> Cell:
    """What a cell says of its place: a spread partition, or all 132 SMs."""
    mode, placement = ("full", None) if num_sms == 132 else ("green", "spread")
    return {"num_sms": num_sms, "mode": mode, "placement": placement, "group_sms": num_sms}


def cell(provider: str = "smkern", m: int = 2048, num_sms: int = 60, **values: Any) -> Cell:
    """A cell of 6144x4096 unless `values` say otherwise; 100 us, at its ceiling."""
    n, k = values.pop("shape", (6144, 4096))
    us = values.get("us", 100.0) or 100.0
    ceiling = Ceiling(min(4.5, 0.2 * num_sms), min(8.1 * num_sms, 790.0))
    flops, moved = 2 * m * n * k, 2 * (m * k + n * k + m * n)
    floor_us = max(flops / ceiling.tflops, moved / ceiling.tbps) / 1e6
    made = (
        {"op": "gemm", "case": {"m": m, "n": n, "k": k, "dtype": "bf16"}}
        | where(num_sms)
        | {
            "provider": provider,
            "us": us,
            "tflops": flops / us / 1e6,
            "tbps": moved / us / 1e6,
            "fraction_of_ceiling": floor_us / us,
            "fraction_of_bandwidth": moved / us / 1e6 / ceiling.tbps,
        }
    )
    return made | values
