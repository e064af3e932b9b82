"""`smkern doctor`: what this machine can do. Every claim is tried, not inferred from versions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import click

import smkern
from smkern.errors import SmkernError

if TYPE_CHECKING:
    from rich.console import Console

    from smkern.device import DeviceInfo

Status = Literal["ok", "note", "absent", "failed"]

DISTRIBUTIONS = ("torch", "triton", "cuda-bindings", "numpy", "click", "rich")

PARTITION_BACKENDS: dict[str, dict[str, Any]] = {
    "green, spread pairs": {"backend": "green", "atom": 2},
    "green, atoms of 8": {"backend": "green", "atom": 8},
    "grid (no mask)": {"backend": "grid"},
}
"""Every way to confine work, as options of `smkern.ladder`."""

WITHOUT_GPU = (
    "plan: the cost model picks a GEMM configuration for any shape and SM budget of an H200 "
    "(shipped profile and tables)",
    "compute: operators on CPU tensors run their plain torch reference",
    "check kernels: Triton's interpreter runs them, and they compile ahead of time for "
    "sm_80 and sm_90a (make test)",
    "see: smkern demo draws the committed H200 results",
)

_MARKS: dict[Status, str] = {
    "ok": "[green]ok[/]",
    "note": "[cyan]·[/]",
    "absent": "[yellow]absent[/]",
    "failed": "[red]failed[/]",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: Status
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, in order, and what runs although something is missing."""

    findings: tuple[Finding, ...]
    runs_anyway: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Something that this machine should be able to do did not work."""
        return any(finding.status == "failed" for finding in self.findings)


def examine(device: int | None = None) -> Report:
    """Try everything on one GPU, or say what runs without one.

    Args:
        device: index of the GPU; the current one by default.
    """
    findings = list(_versions())
    try:
        info = smkern.device_info(device)
    except SmkernError as error:
        findings.append(Finding("GPU", "device", "absent", str(error)))
        findings.append(_try("Operators", "gemm on CPU tensors", _reference_gemm))
        findings += _tables(smkern.load_profile().info.name)
        return Report(tuple(findings), WITHOUT_GPU)
    findings += _device(info)
    for name, options in PARTITION_BACKENDS.items():
        findings.append(_try("Partitions", name, partial(_partition, info, device, options)))
    findings += _kernels(info)
    findings.append(_try("Operators", "gemm in a partition", partial(_gemm, info, device)))
    findings += _tables(info.name)
    return Report(tuple(findings))


def _versions() -> Iterator[Finding]:
    yield Finding("Versions", "smkern", "note", smkern.__version__)
    yield Finding("Versions", "python", "note", platform.python_version())
    for name in DISTRIBUTIONS:
        try:
            yield Finding("Versions", name, "note", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding("Versions", name, "failed", f"not installed; pip install {name}")


def _device(info: DeviceInfo) -> Iterator[Finding]:
    major, minor = info.capability
    memory_gb, l2_mb = info.memory_bytes / 1e9, info.l2_bytes / 2**20
    yield Finding(
        "GPU",
        info.name,
        "ok",
        f"sm_{major}{minor}, {info.num_sms} SMs in steps of {info.sm_granularity} (at least "
        f"{info.min_sms}), {info.sm_clock_mhz} MHz, {memory_gb:.0f} GB, {l2_mb:.0f} MiB of L2",
    )
    yield Finding("GPU", "driver", "ok", f"{info.driver}, CUDA {info.cuda}")
    profile = smkern.load_profile()
    bandwidth, rate = profile.bandwidth(info.num_sms), profile.flops(info.num_sms)
    text = f"{profile.info.name}: {bandwidth:.2f} TB/s, {rate:.0f} TFLOP/s on all SMs"
    if profile.info.name == info.name:
        yield Finding("GPU", "ceilings", "ok", text)
    else:
        remedy = "another GPU's; measure this one's: smkern bench ceilings"
        yield Finding("GPU", "ceilings", "absent", f"{text} ({remedy})")


def _partition(info: DeviceInfo, device: int | None, options: dict[str, Any]) -> str:
    """Split, verify both sides by %smid, and ask the budget of the current stream."""
    asked = max(info.min_sms, info.num_sms // 8 // 8 * 8)
    start = perf_counter()
    with smkern.ladder([asked], device=device, **options) as ladder:
        took_ms = 1e3 * (perf_counter() - start)
        split = ladder.split(decode=asked)
        sides = {"decode": split.decode, "prefill": split.prefill}
        for side in sides.values():
            side.verify()
        with split.decode:
            budget = smkern.current_num_sms()
        granted = " + ".join(str(side.num_sms) for side in sides.values())
        clusters = " and ".join(name for name, side in sides.items() if side.clusters)
    return (
        f"asked {asked}, got {granted} SMs in {took_ms:.0f} ms, verified by %smid; budget inside: "
        f"{budget}; clusters launch on: {clusters or 'neither side'}"
    )


def _kernels(info: DeviceInfo) -> Iterator[Finding]:
    families = {
        "pointer kernels": (8, 0),
        "TMA kernels": (9, 0),
    }
    for name, needed in families.items():
        fits = info.capability >= needed
        text = "this GPU runs them" if fits else f"need sm_{needed[0]}{needed[1]} or later"
        yield Finding("Kernels", name, "ok" if fits else "absent", text)


def _gemm(info: DeviceInfo, device: int | None) -> str:
    """A small GEMM in a partition against fp64."""
    import torch

    index = torch.cuda.current_device() if device is None else device
    generator = torch.Generator(device=f"cuda:{index}").manual_seed(0)
    a, w = (
        torch.randn(rows, 1024, device=f"cuda:{index}", generator=generator).bfloat16()
        for rows in (77, 768)
    )
    torch.cuda.synchronize(index)
    out = torch.full((77, 768), torch.nan, dtype=a.dtype, device=a.device)
    asked = max(info.min_sms, 16)
    with smkern.ladder([asked], device=device) as ladder:
        partition = ladder.split(decode=asked).decode
        with partition:
            smkern.gemm(a, w, out=out)
        torch.cuda.synchronize(index)
    return _error_text(out, a, w, f"on {partition.num_sms} SMs")


def _reference_gemm() -> str:
    import torch

    generator = torch.Generator().manual_seed(0)
    a, w = (torch.randn(rows, 128, generator=generator).bfloat16() for rows in (77, 96))
    return _error_text(smkern.gemm(a, w), a, w, "in plain torch")


def _error_text(out: object, a: object, w: object, where: str) -> str:
    """The relative error against fp64; raises above what one rounding to bf16 explains."""
    import torch

    assert isinstance(out, torch.Tensor)
    assert isinstance(a, torch.Tensor)
    assert isinstance(w, torch.Tensor)
    exact = a.double() @ w.double().T
    error = float((out.double() - exact).abs().max() / exact.abs().max())
    if not error < 2**-8:
        raise SmkernError(f"relative error {error:.1e} {where}, above 4e-3: please report it")
    return f"{a.shape[0]}x{w.shape[0]}x{a.shape[1]} {where}, relative error {error:.1e}"


def _tables(gpu: str) -> Iterator[Finding]:
    """The tuned tables that dispatch reads on `gpu`: the shipped one and the user's own."""
    from smkern.tuning.table import TableStore, shipped_path, user_path

    for name, path in (("shipped", shipped_path(gpu)), ("your own", user_path(gpu))):
        if not path.exists():
            remedy = "the cost model decides; smkern autotune writes one"
            yield Finding("Tuned tables", name, "absent", f"none for {gpu}: {remedy}")
            continue
        try:
            table = TableStore(path).load(gpu)
        except SmkernError as error:
            yield Finding("Tuned tables", name, "failed", str(error))
            continue
        budgets = sorted({key.num_sms for key in table.cells})
        yield Finding(
            "Tuned tables",
            name,
            "ok",
            f"{len(table.cells)} cells for {gpu} at {len(budgets)} SM budgets "
            f"({budgets[0]} to {budgets[-1]}), tuned {table.meta.get('date', '?')[:10]} with "
            f"driver {table.meta.get('driver')}, Triton {table.meta.get('triton')}"
            if budgets
            else f"empty, for {gpu}",
        )


def _try(section: str, name: str, check: Callable[[], str]) -> Finding:
    """The check's text, or its error: a broken part must not hide the others."""
    try:
        return Finding(section, name, "ok", check())
    except Exception as error:  # noqa: BLE001
        return Finding(section, name, "failed", f"{type(error).__name__}: {error}")


def make_console() -> Console:
    """As wide as the terminal; 120 columns into a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def render(report: Report, console: Console) -> None:
    """Print the report, a table with a block a section."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    previous = ""
    for found in report.findings:
        if previous and found.section != previous:
            table.add_row()
        section = found.section if found.section != previous else ""
        table.add_row(section, escape(found.name), _MARKS[found.status], escape(found.detail))
        previous = found.section
    console.print(table)
    if report.runs_anyway:
        console.print("\n[bold]No usable GPU here. What runs anyway:[/]")
        for line in report.runs_anyway:
            console.print(f"  - {escape(line)}")


@click.command("doctor")
@click.option("--device", type=click.IntRange(min=0), default=None, help="Index of the GPU.")
def command(device: int | None) -> None:
    """What this machine can do: each partition backend tried and verified, versions, tables.

    Exit status 0 also without a GPU; 1 when something that is there does not work.
    """
    report = examine(device)
    render(report, make_console())
    if report.failed:
        raise SystemExit(1)
