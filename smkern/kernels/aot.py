"""Triton kernels of the small operators: ahead-of-time compilation, loading, cheap launches."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smkern.kernels.compile import Artifact, check_shared
from smkern.kernels.driver import check, launcher, load_function
from smkern.kernels.ledger import ledger

_MAX_BOUND = 1024

Launch = Callable[..., None]
"""launch(stream, *values): the kernel's run-time parameters in its order."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Everything that determines a kernel's compiled code.

    Args:
        fn: Triton function.
        signature: Run-time parameters in order and their types in Triton's notation ("*bf16",
            "i32", "fp32").
        constants: Compile-time parameters.
        aligned: Names of parameters that are multiples of 16.
        num_warps: Warps per CTA.
        capability: Compute capability, such as 90.
        num_stages: Stages of Triton's software pipeline.
        maxnreg: Maximum registers per thread, or None.
    """

    fn: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    capability: int
    num_stages: int = 3
    maxnreg: int | None = None


def compile_source(source: KernelSource) -> Artifact:
    """Compile one kernel (or take it from Triton's cache). Needs no GPU.

    Raises:
        DeviceError: the kernel needs more shared memory than a CTA may have.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = source.fn.arg_names
    signature = dict(source.signature) | dict.fromkeys(source.constants, "constexpr")
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned}
    options: dict[str, Any] = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    if source.maxnreg is not None:
        options["maxnreg"] = source.maxnreg
    kernel = triton.compile(
        ASTSource(source.fn, signature, dict(source.constants), attrs),
        target=GPUTarget("cuda", source.capability, 32),
        options=options,
    )
    meta = kernel.metadata
    check_shared(f"{meta.name} with {dict(source.constants)}", meta.shared, source.capability)
    return Artifact(
        name=meta.name, cubin=kernel.asm["cubin"], num_threads=meta.num_warps * 32,
        shared_bytes=meta.shared, swizzles=(), boxes=(), unit=1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A loaded kernel, ready to launch."""

    artifact: Artifact
    function: ctypes.c_void_p

    def bind(self, fmt: str, num_ctas: int, *, overlap: bool = False) -> Launch:
        """A launch of `num_ctas` CTAs with its own parameter buffer; thread-safe.

        Args:
            fmt: `struct` format of the run-time parameters in 8-byte words: "Q" an address, "q" an
                integer of any width, "f4x" a float.
            num_ctas: Size of the grid.
            overlap: Whether the launch may start while the previous kernel still runs; the kernel
                itself waits (`smkern.kernels.driver.launcher`).
        """
        packed = struct.Struct("<" + fmt + "2Q")  # Triton's two scratch pointers, unused
        buffer = ctypes.create_string_buffer(packed.size)
        start = ctypes.addressof(buffer)
        words = packed.size // 8
        params = (ctypes.c_void_p * words)(*(start + 8 * i for i in range(words)))
        artifact, lock, pack = self.artifact, threading.Lock(), packed.pack_into
        run = launcher(
            self.function, num_ctas, artifact.num_threads, artifact.shared_bytes, overlap=overlap
        )

        def launch(stream: int, *values: Any) -> None:
            with lock:
                pack(buffer, 0, *values, 0, 0)
                code = run(stream, params)
            if code:
                check(code, f"launching {num_ctas} CTAs of {artifact.name}")

        return launch


@dataclass(slots=True)
class KernelSet:
    """The kernels of one device by key: compiled and loaded once, counted."""

    _loaded: dict[Hashable, LoadedKernel] = field(default_factory=dict)
    _bound: dict[tuple[Hashable, int, bool], Launch] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def is_loaded(self, key: Hashable) -> bool:
        """Whether `load` would compile and load nothing."""
        return key in self._loaded

    def load(self, key: Hashable, compiled: Callable[[], Artifact]) -> LoadedKernel:
        """The kernel for `key`; if new, `compiled` compiles it and it is loaded."""
        with self._lock:
            found = self._loaded.get(key)
            if found is None:
                artifact = compiled()
                function = load_function(artifact.cubin, artifact.name, artifact.shared_bytes)
                found = self._loaded[key] = LoadedKernel(artifact, function)
                ledger().append(key)
            return found

    def bind(self, key: Hashable, fmt: str, num_ctas: int, *, overlap: bool) -> Launch:
        """The launch of a loaded kernel, cached; see `LoadedKernel.bind`.

        All sizes that fill the budget have the same grid, so they share a launch.
        """
        with self._lock:
            found = self._bound.get((key, num_ctas, overlap))
            if found is None:
                if len(self._bound) >= _MAX_BOUND:
                    self._bound.clear()
                found = self._loaded[key].bind(fmt, num_ctas, overlap=overlap)
                self._bound[key, num_ctas, overlap] = found
            return found
