"""The rows and the table of `bench cutlass`, from cells written by hand."""

from __future__ import annotations

from smkern.bench.cutlass import BACKENDS, summarize
from smkern.bench.tables.gemm import cutlass_cpp_table, cutlass_table

US = {"smkern": 10.0, "smkern:triton": 15.0, "smkern:cutlass": 10.0}


def cells(m: int, num_sms: int, mode: str = "green", chosen: bool = True, **us: float):
    """One group: 15 us by Triton, 10 by CUTLASS, 12 by cuBLAS."""
    times = US | {name.replace("_", ":"): value for name, value in us.items()}
    for provider in BACKENDS:
        config = "cutlass:80x128x64" if chosen and provider == "smkern" else "ws:128x128x64"
        yield {
            "op": "gemm", "case": {"m": m, "n": 4096, "k": 4096}, "num_sms": num_sms, "mode": mode,
            "provider": provider, "us": times[provider], "config": config,
            "tflops": 2 * m * 4096 * 4096 / times[provider] / 1e6,
            "vs_cublas": 12 / times[provider],
        }  # fmt: skip


def test_rows_are_of_their_cells_alone():
    found = summarize(
        [
            *cells(77, 16),
            *cells(64, 16, smkern_cutlass=30.0, smkern=15.0, chosen=False),
            *cells(77, 132, "full", smkern_cutlass=20.0),
            *cells(2048, 60, smkern_cutlass=200.0, smkern_triton=200.0),
        ]
    )
    rows = {name: (row["value"], row["cells"]) for name, row in found.items()}
    # 15/10, 15/30 and 200/200 on partitions
    assert rows["cutlass_over_triton"] == (0.9086, 3)
    assert (found["cutlass_over_triton"]["worst"], found["cutlass_over_triton"]["best"]) == (
        0.5,
        1.5,
    )
    assert rows["cutlass_over_triton_whole_chip"] == (0.75, 1)
    assert rows["cutlass_over_triton_65_to_255_rows"] == (1.5, 1)
    # 343.6 TFLOP/s of 60 x 8.1
    assert rows["cutlass_tensor_fraction_m2048_up_to_60_sms"] == (0.707, 1)
    assert rows["cutlass_chosen_over_triton"][1] == 3
    assert found["cutlass_dispatched_over_cublas"]["worst"] == 0.8


def test_a_group_without_one_of_the_providers_does_not_count():
    two = [cell for cell in cells(77, 16) if cell["provider"] != "smkern:triton"]
    assert summarize(two)["cutlass_over_triton"]["cells"] == 0
    assert summarize([])["cutlass_dispatched_over_cublas"]["value"] is None


def test_the_table_has_both_ratios_and_none_where_cublas_cannot_run():
    alone = [{**cell, "vs_cublas": None} for cell in cells(96, 16)]
    table = cutlass_table([*cells(77, 16), *cells(77, 32), *alone])
    assert table.splitlines()[2:] == ["| 77 | 1.50 / 1.20 | 1.50 / 1.20 |", "| 96 | 1.50 / - |  |"]


def group(num_sms, mode, us, over_none):
    """A group in which CUTLASS's C++ kernels took part."""
    ours = list(cells(77, num_sms, mode))
    cpp = {**ours[0], "provider": "smkern:cutlass-cpp", "us": us, "vs_cublas": 12 / us}
    return [*ours, cpp | {"clusters_over_none": over_none}]


def test_cpp_kernels_have_rows_where_they_were_built():
    found = summarize([
        *group(16, "green", 5.0, None), *group(32, "green", 20.0, 1.1),
        *group(132, "full", 8.0, 1.3), *cells(77, 48),
    ])  # fmt: skip
    over = found["cutlass_cpp_over_dispatched"]  # 10 us over 5 and over 20
    assert (over["value"], over["target"], over["cells"], over["worst"]) == (1.0, None, 2, 0.5)
    assert found["cutlass_cpp_over_dispatched_whole_chip"]["value"] == 1.25
    clusters = found["cutlass_cpp_clusters_over_none"]
    assert (clusters["value"], clusters["cells"]) == (1.1, 1)
    assert found["cutlass_cpp_clusters_over_none_whole_chip"]["value"] == 1.3
    assert found["cutlass_over_triton"]["cells"] == 3
    assert not [name for name in summarize(cells(77, 16)) if "cpp" in name]


def test_the_table_of_cpp_kernels_has_only_their_groups():
    table = cutlass_cpp_table([
        *group(16, "green", 5.0, None), *group(32, "green", 20.0, 1.1), *cells(77, 48),
    ])  # fmt: skip
    assert table.splitlines()[2:] == ["| 77 | 2.00 / 2.40 / - | 0.50 / 0.60 / 1.10 |"]
