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
TITLES = {DEEPGEMM: "DeepGEMM", FLASHINFER: "FlashInfer"}
"""Peers that are packages of their own, by their name in cells and `meta`."""

Found = tuple[Any, str | None]
"""A peer's package and its version; or None and why it is not there."""


def flashinfer_with(*parts: str) -> Found:
    """FlashInfer, these modules of it imported."""
    return _found(lambda module: str(module.__version__), "flashinfer", *parts)


def _found(version_of: Callable[[Any], str], name: str, *parts: str) -> Found:
    try:
        module = import_module(name)
        for part in parts:
            import_module(f"{name}.{part}")
        return module, version_of(module)
    except Exception as error:  # noqa: BLE001  its import runs much; any failure means: without it
        return None, first_line(error)


def installed(names: tuple[str, ...], meta: dict[str, Any]) -> tuple[str, ...]:
    """The names of peers, without those of packages that cannot be imported; versions are in
    `meta`, or it says why not."""
    found = {
        DEEPGEMM: lambda: _found(lambda module: version("sgl-deep-gemm"), "deep_gemm"),
        FLASHINFER: lambda: flashinfer_with("gemm"),
    }
    return tuple(x for x in names if x not in found or noted(found[x](), meta, x) is not None)


def noted(found: Found, meta: dict[str, Any], name: str = FLASHINFER) -> Any:
    """The peer that was found, its version kept in `meta`; or None, and says why."""
    module, about = found
    meta[name] = None if module is None else about
    if module is None:
        click.echo(f"without {TITLES[name]}, its cells are left out: {about}", err=True)
    return module


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
