"""The tables of `ranks.json`: a model over several GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.bench.ranks.rows import DECODE, GATHERED, PREFILL, RANDOM_STEPS, SERVED, SUMMED, TOKENS
from smkern.bench.rows import Cell
from smkern.bench.tables.markdown import pivot, rows_or_none


def sums_table(cells: Iterable[Cell]) -> str:
    """Microseconds by SMs: one kernel / NCCL and what follows it."""
    found = [c for c in cells if c["op"] in (SUMMED, GATHERED)]
    theirs = {_key(c): c["us"] for c in found if c["provider"] == "nccl"}
    entries = []
    for one in found:
        if one["provider"] != "smkern":
            continue
        case, us = one["case"], theirs.get(_key(one))
        shape = f"{case['rows']} x {case.get('hidden') or case['columns']}"
        what = "sum, residual, norm of" if one["op"] == SUMMED else "logits gathered,"
        text = f"{one['us']:.1f}" + ("" if us is None else f" / {us:.1f}")
        if us is not None and us < one["us"]:
            text = f"**{text}**"
        entries.append((f"{what} {shape}, {_gpus(one)}", one["num_sms"], text))
    return pivot("one kernel / NCCL, us, on so many SMs", entries)


def forwards_table(cells: Iterable[Cell]) -> str:
    """By SMs: milliseconds on one GPU, and the share of them on several."""
    found = [c for c in cells if c["op"] in (DECODE, PREFILL)]
    alone = {_key(c): c["us"] for c in found if c["case"]["ranks"] == 1}
    entries = []
    for one in found:
        case, ranks = one["case"], one["case"]["ranks"]
        what = f"{case['model']}, {case['layers']} layers, "
        what += (
            f"step of {case['batch']} x {case['context']}"
            if one["op"] == DECODE
            else f"prompt of {case['tokens']}"
        )
        if ranks == 1:
            entries.append((f"{what}: one GPU, ms", one["num_sms"], f"{one['us'] / 1e3:.3f}"))
        elif (us := alone.get(_key(one))) is not None:
            sums = "one kernel" if one["provider"] == "smkern" else "NCCL"
            share = f"{one['us'] / us:.3f}"
            entries.append((f"{what}: {_gpus(one)} over it, {sums}", one["num_sms"], share))
    return pivot("on so many SMs", entries)


def served_table(cells: Iterable[Cell]) -> str:
    """A row a policy and limit, then what was counted while random policies served."""
    rows = [
        [
            f"{c['case']['model']}, {_gpus(c)}, {c['case']['limit_ms']:g} ms: "
            f"`{c['case']['policy']}`, {c['setting']}",
            f"{c['tbt_p50_ms']:.2f}",
            f"{c['tbt_p99_ms']:.2f}",
            f"{c['value']:.2f}",
        ]
        for c in cells
        if c["op"] == SERVED
    ]
    return rows_or_none(["limit, policy and setting", "TBT p50, ms", "p99", "tokens/ms"], rows)


def counts_table(cells: Iterable[Cell]) -> str:
    """What random policies made of many requests and launches."""
    rows = []
    for one in cells:
        case = one["case"]
        if one["op"] == TOKENS:
            what = f"tokens that differ, of {one['tokens']:,}; {case['requests']:,} requests, "
            what += f"{case['model']}, {case['layers']} layers, sums by {case['sums']}"
        elif one["op"] == RANDOM_STEPS:
            what = f"launches, {one['switches']:,} changes of the split, {one['errors']} errors, "
            what += f"{case['shared']:.0%} of decisions ask for shared SMs"
        else:
            continue
        rows.append([what, f"{one['value']:,}"])
    return rows_or_none(["under random policies, two GPUs", ""], rows)


def _gpus(one: Cell) -> str:
    ranks = one["case"]["ranks"]
    return "one GPU" if ranks == 1 else f"{ranks} GPUs"


def _key(one: Cell) -> str:
    """What cells of several providers or numbers of GPUs have in common."""
    case = {name: value for name, value in one["case"].items() if name != "ranks"}
    return str([one["op"], case, one["num_sms"]])
