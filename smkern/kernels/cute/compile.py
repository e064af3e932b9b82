"""Compiles kernels of the CuTe DSL in processes of their own, and keeps their cubins.

The DSL's compiler is not thread-safe and may abort the process it runs in. Only compiling needs
the package: a cubin is found by a hash of the kernel's source and its variant on any machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

from smkern.errors import DeviceError
from smkern.kernels.compile import Artifact, check_shared
from smkern.kernels.cuda_source import cubin_path, keep_cubin, kept_cubin
from smkern.kernels.fp8.gemm_compile import ScaledVariant
from smkern.kernels.fp8.gemm_compile import variant_of as scaled_variant_of
from smkern.kernels.gemm_variants import Variant, variant_of
from smkern.tuning import fp8_cutlass
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.constraints import Capability, is_legal
from smkern.tuning.fp8 import ScaledProblem

PACKAGE, VERSION = "nvidia-cutlass-dsl", "4.7.1"
"""What compiles, and the only version that was tried; the extra `cutlass` pins it."""
ARCH = "sm_90a"
GROUP = 128
"""Threads of a warpgroup."""
THREADS = 3 * GROUP
BARRIER_BYTES = 1024
"""Shared memory before the stages, which the swizzle aligns to as much."""
BATCH = 16
"""Variants that a process compiles, as starting it takes as long as three of them."""
COMPILE_S = 120.0
"""Longer than any variant takes."""
_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
Kernel = Variant | ScaledVariant
_NAME = re.compile(rb"\.text\.(\w+)")


def lacking(package: str, version: str) -> str:
    """Why a package of the extra `cutlass` cannot be used; empty if that version is there."""
    remedy = f"pip install 'smkern[cutlass]' ({package}=={version})"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed; {remedy}"
    return "" if found == version else f"{package} is {found}, not {version}; {remedy}"


@cache
def absent() -> str:
    """Why nothing can be compiled here; empty if the package of the right version is there."""
    return lacking(PACKAGE, VERSION)


@cache
def is_there() -> bool:
    """Whether anything can be compiled here, or was before this process asked."""
    return not absent() or any(cubin_path("cute", "").parent.glob("cute-*.cubin"))


def serves(
    capability: Capability, problem: GemmProblem | ScaledProblem, config: GemmConfig
) -> bool:
    """Whether a configuration's kernel can be compiled here, or was: its cubin is kept."""
    if config.kernel != "cutlass":
        return False
    sm = 10 * capability[0] + capability[1]
    made: Kernel
    if isinstance(problem, ScaledProblem):
        if problem.epilogue.swiglu:  # gate and up are one kernel of our own
            return False
        made = scaled_variant_of(problem, config, sm)
    elif is_legal(problem, config, Budget(1, "mask"), capability):
        made = variant_of(problem, config, sm)
    else:
        return False
    return not absent() or _is_kept(_path(made))


@cache
def _is_kept(path: Path) -> bool:
    """Whether a cubin can be taken from the cache, which nothing adds to without the package."""
    if kept_cubin(path) is not None:
        return True
    if path.exists():
        warnings.warn(
            f"kernels {path.parent / 'cute-*'} are kept and not used: they are cut, spoiled, or "
            "other users may have written them (if yours, chmod go-w); other kernels serve",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


def shared_bytes(made: Kernel) -> int:
    """Shared memory of a CTA: barriers, scales of e4m3, stages of both operands."""
    variant = _twin(made)
    head = BARRIER_BYTES + fp8_cutlass.SCALE_BYTES * isinstance(made, ScaledVariant)
    return head + 2 * variant.block_k * variant.num_stages * (variant.block_x + variant.block_y)


def _threads(made: Kernel) -> int:
    return GROUP * (made.parts + 1) if isinstance(made, ScaledVariant) else THREADS


def _twin(made: Kernel) -> Variant:
    """What says how a kernel copies: of e4m3 the one of 16-bit elements."""
    return made.twin if isinstance(made, ScaledVariant) else made


def compile_variant(made: Kernel) -> Artifact:
    """A variant from the cache, or compiled. Needs no GPU.

    Raises:
        DeviceError: it is not kept and the package is absent or of another version, compiling
            failed or was killed, or the variant exceeds the shared memory of a CTA.
    """
    check_shared(str(made), shared_bytes(made), made.capability)
    cubin = kept_cubin(_path(made))
    if cubin is None:
        (cubin,) = _compile([made])
    variant = _twin(made)
    name = _NAME.search(cubin)
    assert name, "a cubin holds its kernel's name"
    return Artifact(
        name=name[1].decode(),
        cubin=cubin,
        num_threads=_threads(made),
        shared_bytes=shared_bytes(made),
        swizzles=(_SWIZZLE_128, _SWIZZLE_128),
        boxes=(
            _box(variant, variant.block_x, variant.swap),
            _box(variant, variant.block_y, not variant.swap),
        ),
    )


def _box(variant: Variant, rows: int, is_weights: bool) -> tuple[int, ...]:
    """What a copy brings, outermost first; SwiGLU's weights in pairs of 8 gate and 8 up rows."""
    pairs = variant.interleaves and is_weights
    return (rows // 16, 2, 8, variant.block_k) if pairs else (rows, variant.block_k)


def compile_many(
    variants: Iterable[Kernel], *, workers: int, done: Callable[[int, int], None] | None = None
) -> int:
    """Compile what is not kept yet, `BATCH` in a process, `workers` processes; returns how many.

    `done(finished, total)` is called after each process.
    """
    missing = [each for each in sorted(set(variants), key=repr) if kept_cubin(_path(each)) is None]
    batches = [missing[i : i + BATCH] for i in range(0, len(missing), BATCH)]
    finished = 0
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for cubins in pool.map(_compile, batches):
            finished += len(cubins)
            if done:
                done(finished, len(missing))
    return len(missing)


def _path(made: Kernel) -> Path:
    twin, kind = _twin(made), "fp8-" if isinstance(made, ScaledVariant) else ""
    return cubin_path(f"cute-{kind}{twin.block_x}x{twin.block_y}", _digest(made))


@cache
def _digest(made: Kernel) -> str:
    """Of what a kernel is compiled from; asked for each candidate of each problem."""
    about: tuple[object, ...] = VERSION, ARCH, THREADS, BARRIER_BYTES, made
    names = ["gemm", "epilogue"]
    if isinstance(made, ScaledVariant):
        of = fp8_cutlass
        about += _threads(made), *of.slots(made.blocks), of.registers(made.parts, made.ctas_per_sm)
        names.append("fp8_gemm")
    return hashlib.sha256(repr(about).encode() + b"".join(map(_source, names))).hexdigest()


@cache
def _source(name: str) -> bytes:
    return Path(__file__).with_name(f"{name}.py").read_bytes()


def _compile(variants: Sequence[Kernel]) -> list[bytes]:
    """Compile in one child process, and keep."""
    if reason := absent():
        raise DeviceError(f"{variants[0]} is not compiled, and cannot be: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "smkern.kernels.cute.worker", folder]
        # its dumps lie there, too, so that none is left however it ends
        environment = {**os.environ, "CUTE_DSL_ARCH": ARCH, "CUTE_DSL_KEEP": "cubin",
                       "CUTE_DSL_DUMP_DIR": folder, "TMPDIR": folder,
                       "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # fmt: skip
        asked = json.dumps([(type(each).__name__, asdict(each)) for each in variants])
        limit_s = COMPILE_S * len(variants)
        try:
            done = subprocess.run(
                command, input=asked, capture_output=True, text=True, errors="replace",
                env=environment, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            done = None
        cubins = []
        for i, variant in enumerate(variants):
            try:
                cubin = (Path(folder) / f"{i}.out").read_bytes()
            except FileNotFoundError:
                if done is None:
                    raise DeviceError(
                        f"{PACKAGE} did not compile {variant} within {limit_s:g} s and "
                        "was killed; run it again for the others, what came before is kept"
                    ) from None
                raise DeviceError(
                    f"{PACKAGE} {VERSION} does not compile {variant} (exit status "
                    f"{done.returncode}): {done.stderr.strip()[-2000:]}"
                ) from None
            keep_cubin(_path(variant), cubin)
            cubins.append(cubin)
    return cubins
