"""Tables of `partitions.json`, `attention.json` and `ops.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from smkern.bench.attention.rows import settled as attention_ratio
from smkern.bench.ops import rows as ops
from smkern.bench.rows import Cell, settled
from smkern.bench.tables.markdown import pivot

READ_COUNTS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
READ_LABELS = {
    "smkern": "smkern",
    "driver": "the driver's own groups of 8",
    "flashinfer-way": "FlashInfer's way",
    "torch": "torch's green contexts",
}
OTHER_ORDERS = "best of the other orders tried"

ATTENTION_LABELS = {
    "smkern": "smkern",
    "flashinfer:fa2": "FlashInfer FA2",
    "flashinfer:cuda-cores": "FlashInfer, CUDA cores",
    "flashinfer:xqa": "FlashInfer XQA",
    "flashinfer:fa3": "FlashInfer FA3",
    "flashinfer:fa2-one-launch": "FlashInfer FA2, one launch",
    "sdpa:cudnn": "cuDNN, no pages",
    "sdpa:flash": "torch flash, no pages",
}
LATENCY_CASES = ("decode-8x1024",)
"""Cases told in microseconds: a rate would say little."""


def bandwidth_table(cells: Iterable[Cell]) -> str:
    """Read bandwidth in TB/s: who chose the SMs by rows, SM counts by columns."""
    labels = [*READ_LABELS.values(), OTHER_ORDERS]
    found = []
    for cell in cells:
        alone = cell["op"].startswith("read") and not cell["case"].get("beside")
        if alone and cell.get("tbps") and cell["num_sms"] in READ_COUNTS:
            label = READ_LABELS.get(cell["provider"], OTHER_ORDERS)
            found.append((labels.index(label), cell["tbps"], cell["num_sms"]))
    entries = ((labels[label], count, f"{tbps:.2f}") for label, tbps, count in sorted(found))
    return pivot("SMs chosen by \\ how many", entries)


def decode_rates_table(cells: Iterable[Cell]) -> str:
    """TB/s, or us where so marked: rows of cases and providers, columns of budgets.

    A peer counts by the better of its partitions.
    """
    return _attention_rates(cells, "TB/s", "{tbps:.2f}", decode=True)


def prefill_rates_table(cells: Iterable[Cell]) -> str:
    """TFLOP/s of prompts and mixed steps, in the same form."""
    return _attention_rates(cells, "TFLOP/s", "{tflops:.0f}", decode=False)


def _attention_rates(cells: Iterable[Cell], unit: str, style: str, *, decode: bool) -> str:
    wanted = [
        cell
        for cell in cells
        if cell["op"] == "paged_attention"
        and cell.get("us")
        and cell["provider"] in ATTENTION_LABELS
        and (cell["case"]["kind"] == "decode") == decode
    ]
    names = list(dict.fromkeys(cell["case"]["name"] for cell in wanted))
    providers = list(ATTENTION_LABELS)
    wanted.sort(
        key=lambda c: (names.index(c["case"]["name"]), providers.index(c["provider"]), -c["us"])
    )
    entries = []
    for cell in wanted:
        name, label = cell["case"]["name"], ATTENTION_LABELS[cell["provider"]]
        latency = name in LATENCY_CASES
        row = f"{name}{' (us)' if latency else ''}, {label}"
        entries.append((row, cell["group_sms"], ("{us:.1f}" if latency else style).format(**cell)))
    return pivot(f"{unit} \\ SMs", entries)


def attention_ratios_table(cells: Iterable[Cell]) -> str:
    """smkern's speed over the best of FlashInfer's ways: rows of cases, columns of budgets."""
    found = [cell for cell in cells if cell["op"] == "paged_attention"]
    ours = [cell for cell in found if cell["provider"] == "smkern" and cell.get("vs_flashinfer")]
    return _by_case("case \\ SMs", ours, lambda cell: f"{attention_ratio(cell):.2f}")


def plan_table(cells: Iterable[Cell]) -> str:
    """Microseconds of the plan on the device: rows of cases, columns of budgets."""
    plans = [cell for cell in cells if cell["op"] == "plan_attention" and cell.get("us")]
    return _by_case("plan, us \\ SMs", plans, lambda cell: f"{cell['us']:.1f}")


def _by_case(corner: str, cells: Iterable[Cell], text: Callable[[Cell], str]) -> str:
    return pivot(corner, ((cell["case"]["name"], cell["group_sms"], text(cell)) for cell in cells))


def ops_table(cells: Iterable[Cell]) -> str:
    """smkern's microseconds and speed over the best peer: rows of cases, columns of budgets.

    Bold where a peer is faster.
    """
    entries = []
    for cell in cells:
        op, case = cell["op"], cell["case"]
        if op in ops.OPS and cell["provider"] == "smkern" and cell.get("us"):
            row = f"{op} {case['name'].removeprefix(f'{op}-')}"
            entries.append((row, cell["group_sms"], f"{cell['us']:.1f}{_lead(cell)}"))
    return pivot("us (x best peer) \\ SMs", entries)


def _lead(cell: Cell) -> str:
    if not cell.get("vs_best"):
        return ""
    ratio = settled(cell)
    return f" ({ratio:.2f})" if ratio >= 1.0 else f" (**{ratio:.2f}**)"


def sample_table(cells: Iterable[Cell]) -> str:
    """What `sample` takes, as reads of the logits at the partition's bandwidth."""
    found = [
        (cell["case"]["batch"], cell["group_sms"], f"{ops.reads(cell):.1f}")
        for cell in cells
        if cell["op"] == "sample"
        and cell["provider"] == "smkern"
        and cell.get("fraction_of_bandwidth")
    ]
    entries = ((f"{batch} rows", budget, text) for batch, budget, text in sorted(found))
    return pivot("reads of the logits \\ SMs", entries)
