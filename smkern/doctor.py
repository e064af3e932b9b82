"""`smkern doctor`: what works on this machine, by trying it, not by comparing versions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

import smkern
from smkern.device import has_gpu
from smkern.doctor_device import (
    Finding,
    Status,
    cache_findings,
    device_findings,
    table_findings,
    tried,
)
from smkern.doctor_peers import peers
from smkern.errors import SmkernError
from smkern.kernels.cuda_source import cubin_path
from smkern.kernels.cute import cpp_build
from smkern.kernels.cute.compile import PACKAGE, VERSION, absent

if TYPE_CHECKING:
    from rich.console import Console

    from smkern.device import DeviceInfo

DISTRIBUTIONS = ("torch", "triton", "cuda-bindings", "numpy", "click", "rich")

PARTITION_BACKENDS: dict[str, dict[str, Any]] = {
    "green, least atoms": {"backend": "green"},
    "green, atoms of 8": {"backend": "green", "atom": 8},
    "grid (no mask)": {"backend": "grid"},
}
"""All ways to confine work, as options of `smkern.ladder`."""

WITHOUT_GPU = (
    "plan: which GEMM kernel an H200 would run for any shape and SM budget, by the shipped tables "
    "and the cost model (smkern.explain_gemm)",
    "simulate: smkern replay compares policies on a simulated H200 or H100",
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
class Report:
    """The findings in order, and what still runs where something is missing."""

    findings: tuple[Finding, ...]
    runs_anyway: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether something that should work on this machine failed."""
        return any(finding.status == "failed" for finding in self.findings)


def examine(device: int | None = None) -> Report:
    """Try everything on one GPU, or list what runs without one.

    Args:
        device: GPU index; the current GPU by default.
    """
    findings = list(_versions())
    try:
        info = smkern.device_info(device)
    except SmkernError as error:
        # GPUs exist, but not the requested one
        status: Status = "failed" if has_gpu() else "absent"
        findings.append(Finding("GPU", "device", status, str(error)))
        findings.append(_works("gemm on CPU tensors", _reference_gemm))
        info = smkern.load_profile().info
        findings += table_findings(info)
        findings += cache_findings()
        return Report(tuple(findings), WITHOUT_GPU)
    findings += device_findings(info, device)
    findings.append(tried("GPU", "peers", partial(peers, device)))
    for name, options in PARTITION_BACKENDS.items():
        check = partial(_partition, info, device, options)
        findings.append(tried("Partitions", name, check))
    findings.append(_works("gemm in a partition", partial(_gemm, info, device)))
    findings += table_findings(info)
    findings += cache_findings()
    return Report(tuple(findings))


def _versions() -> Iterator[Finding]:
    yield Finding("Versions", "smkern", "note", smkern.__version__)
    yield Finding("Versions", "python", "note", platform.python_version())
    for name in DISTRIBUTIONS:
        try:
            yield Finding("Versions", name, "note", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding("Versions", name, "failed", f"not installed; pip install {name}")
    kept = sum(1 for _ in cubin_path("cute", "").parent.glob("cute-*.cubin"))
    text = absent() or f"{VERSION}: compiles the GEMMs that Triton's tiles leave out"
    yield Finding("Versions", PACKAGE, "note", f"{text} ({kept} kernels that it compiled are kept)")
    text = cpp_build.absent() or f"{cpp_build.HEADERS_VERSION}: smkern build --cpp"
    library = cpp_build.built()
    said = "not built" if library is None else f"built: {library}"
    yield Finding("Versions", cpp_build.HEADERS, "note", f"{text} ({said})")


def _works(name: str, check: Callable[[], str]) -> Finding:
    """The result of an operator's check, which returns a text on success and raises on failure."""
    return tried("Operators", name, lambda: ("ok", check()))


def _asked(info: DeviceInfo, atom: int) -> int:
    """The SM count of a small decode side: an eighth of the SMs in steps of 8, or one atom."""
    return max(info.num_sms // 8 // 8 * 8, atom)


def _partition(info: DeviceInfo, device: int | None, options: dict[str, Any]) -> tuple[Status, str]:
    """Split, verify both sides by %smid, and read the current stream's budget."""
    atom = options.get("atom", info.sm_granularity)
    if 2 * atom > info.num_sms:
        return "absent", f"{info.num_sms} SMs are too few for two sides of {atom}"
    asked = _asked(info, atom)
    start = perf_counter()
    with smkern.ladder([asked], device=device, **options) as ladder:
        took_ms = 1e3 * (perf_counter() - start)
        split = ladder.split(decode=asked)
        sides = {"decode": split.decode, "prefill": split.prefill}
        for side in sides.values():
            side.verify()
        with split.decode:
            budget = smkern.current_num_sms(device)
        granted = " + ".join(str(side.num_sms) for side in sides.values())
        clusters = " and ".join(name for name, side in sides.items() if side.clusters)
    return "ok", (
        f"asked {asked}, got {granted} SMs in {took_ms:.0f} ms, verified by %smid; budget inside: "
        f"{budget}; clusters launch on: {clusters or 'neither side'}"
    )


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
    asked = _asked(info, info.sm_granularity)
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


def make_console() -> Console:
    """A console as wide as the terminal; 120 columns for a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def render(report: Report, console: Console) -> None:
    """Print the report as a table with one block per section."""
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
