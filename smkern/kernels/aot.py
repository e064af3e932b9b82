"""Triton kernels of the small operators: ahead-of-time compilation, loading, cheap launches."""

from __future__ import annotations

import ctypes
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from smkern.kernels.compile import Artifact, artifact_of
from smkern.kernels.driver import (
    TENSOR_MAP_BYTES,
    check,
    encode_tensor_map,
    launcher,
    load_function,
    replace_address,
)
from smkern.kernels.ledger import ledger

_MAX_BOUND = 1024
P = TypeVar("P")

Launch = Callable[..., None]
"""launch(stream, *values): the kernel's run-time parameters in its order."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Everything that determines a kernel's compiled code.

    Args:
        fn: Triton or Gluon function.
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

    ast, options = ast_source(source)
    target = GPUTarget("cuda", source.capability, 32)
    kernel = triton.compile(ast, target=target, options=options)
    named = f"{kernel.metadata.name} with {dict(source.constants)}"
    return artifact_of(kernel, named, source.capability)


def ast_source(source: KernelSource) -> tuple[Any, dict[str, Any]]:
    """What `triton.compile` takes: the source and the options."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    names = source.fn.arg_names
    signature = dict(source.signature) | dict.fromkeys(source.constants, "constexpr")
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in source.aligned}
    options: dict[str, Any] = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    if source.maxnreg is not None:
        options["maxnreg"] = source.maxnreg
    kind = GluonASTSource if isinstance(source.fn, GluonJITFunction) else ASTSource
    return kind(source.fn, signature, dict(source.constants), attrs), options


def matrices(dtype: str, **boxes: Sequence[int]) -> dict[str, str]:
    """Types of a Gluon kernel's descriptors: matrices by name, each copied by boxes of its own."""
    from triton.experimental.gluon import language as gl

    kind = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    found = {}
    for name, box in boxes.items():
        layout = gl.NVMMASharedLayout.get_default_for(list(box), kind)
        found[f"{name}_desc"] = f"tensordesc<{dtype}{list(box)},{layout!r}>"
    return found


class Mapped(NamedTuple):
    """A matrix that a kernel reads by a tensor map.

    Attributes:
        dtype: Of its elements.
        sizes: Of its dimensions, the innermost first.
        strides: Of the outer dimensions, bytes.
        side: Which of the kernel's descriptors it is, 0 or 1.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    side: int


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

    def bind_mapped(
        self,
        num_ctas: int,
        a: Mapped,
        w: Mapped,
        addresses: int,
        numbers: Sequence[int],
        *,
        what: str,
        overlap: bool = False,
        bare: bool = False,
    ) -> Launch:
        """launch(stream, a, w, *addresses) with tensor maps of its own; thread-safe.

        Args:
            num_ctas: Size of the grid.
            a: One matrix.
            w: The other.
            addresses: How many other addresses a launch is given; the kernel's first parameters
                behind its descriptors.
            numbers: Its other run-time parameters.
            what: What is launched, for messages.
            overlap: As of `bind`.
            bare: Whether the kernel's parameters are these alone, as Triton's are not.
        """
        artifact, words = self.artifact, addresses + len(numbers) + 1
        buffer = ctypes.create_string_buffer(3 * TENSOR_MAP_BYTES + 8 * words)
        start = ctypes.addressof(buffer)
        a_map = start + -start % TENSOR_MAP_BYTES
        w_map, at = a_map + TENSOR_MAP_BYTES, a_map + 2 * TENSOR_MAP_BYTES
        for where, x in ((a_map, a), (w_map, w)):
            boxes, swizzle = artifact.boxes[x.side][::-1], artifact.swizzles[x.side]
            encode_tensor_map(where, x.dtype, x.sizes, x.strides, boxes, swizzle)
        struct.pack_into(f"{words}q", buffer, at - start, *[0] * addresses, *numbers, 0)
        *values, zero = (at + 8 * i for i in range(words))
        given: list[int] = []
        for where, x in sorted(((a_map, a), (w_map, w)), key=lambda pair: pair[1].side):
            # a descriptor has the map, shape and strides; the kernel reads the map only
            given += [where] if bare else [where, *[zero] * (2 * len(x.sizes))]
        given += values if bare else [*values, zero, zero]  # Triton's scratch pointers, unused
        params = (ctypes.c_void_p * len(given))(*given)
        run = launcher(
            self.function, num_ctas, artifact.num_threads, artifact.shared_bytes, overlap=overlap
        )
        replace: Callable[[int, int], int] = replace_address()
        pack, offset = struct.Struct(f"{addresses}Q").pack_into, at - start
        lock, mapped = threading.Lock(), (0, 0)

        def launch(stream: int, a: int, w: int, *values: int) -> None:
            nonlocal mapped
            with lock:
                code = 0
                pack(buffer, offset, *values)
                if mapped != (a, w):
                    code = replace(a_map, a) or replace(w_map, w)
                    mapped = (a, w)
                code = code or run(stream, params)
            if code:
                check(code, f"launching {what} (a {a:#x}, w {w:#x})")

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


class FamilyKernels(ABC, Generic[P]):
    """A family's kernels on one device; each variant is compiled and loaded once, and counted.

    Args:
        capability: Compute capability, such as 90.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self._set = KernelSet()

    @abstractmethod
    def variants(self, problem: P) -> tuple[Any, ...]:
        """All kernels for a problem's kind: of every configuration, budget and number of rows."""

    def is_loaded(self, problem: P) -> bool:
        """Whether `prepare` would compile and load nothing."""
        return all(self._set.is_loaded(variant) for variant in self.variants(problem))

    def _load(self, problem: P) -> None:
        """Compile and load what is new of `variants`."""
        for variant in self.variants(problem):
            self._set.load(variant, variant.compile)
