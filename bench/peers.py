"""Who takes part beside smkern: FlashInfer and DeepGEMM where they are, and peers by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import click
import torch

from smkern.measure.timing import Call, first_line

DEEPGEMM, FLASHINFER = "deepgemm", "flashinfer"
INSTALLED = {
    DEEPGEMM: ("deep_gemm", "sgl-deep-gemm"),
    FLASHINFER: ("flashinfer.gemm", "flashinfer-python"),
}
"""Peers that are packages of their own: the module, and the distribution that has its version."""


def flashinfer_with(*parts: str) -> tuple[Any, str | None]:
    """FlashInfer, these modules of it imported, with its version; or None and why not."""
    try:
        flashinfer = import_module("flashinfer")
        for part in parts:
            import_module(f"flashinfer.{part}")
    except Exception as error:  # noqa: BLE001  its import runs much; any failure means: without it
        return None, first_line(error)
    return flashinfer, str(flashinfer.__version__)


def installed(names: tuple[str, ...], meta: dict[str, Any]) -> tuple[str, ...]:
    """The names of peers, without those of `INSTALLED` that cannot be imported; their versions are
    in `meta`, or it says why not."""
    found = []
    for name in names:
        if name in INSTALLED:
            module, distribution = INSTALLED[name]
            try:
                import_module(module)
                meta[name] = version(distribution)
            except Exception as error:  # noqa: BLE001  as above
                meta[name] = None
                click.echo(f"without {name}, its cells are left out: {first_line(error)}", err=True)
                continue
        found.append(name)
    return tuple(found)


def noted(found: tuple[Any, str | None], meta: dict[str, Any]) -> Any:
    """The FlashInfer that was found, its version kept in `meta`; or None, and says why."""
    flashinfer, about = found
    meta["flashinfer"] = None if flashinfer is None else about
    if flashinfer is None:
        click.echo(f"without FlashInfer, its cells are left out: {about}", err=True)
    return flashinfer


def once(make: Callable[[], Call]) -> Callable[[], Call]:
    """`make`, run at the first use and never again: a wrapper serves every place of its case.

    FlashInfer sizes its plan from the whole device, so it is the same in every partition. A failure
    is kept too.
    """
    kept: list[Call | Exception] = []

    def get() -> Call:
        if not kept:
            try:
                kept.append(make())
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  raised again below, each time
                kept.append(error)
        if isinstance(kept[-1], Exception):
            raise kept[-1]
        return kept[-1]

    return get
