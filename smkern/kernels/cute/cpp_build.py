"""Builds `csrc/cutlass_gemm.cu` with nvcc and the headers of CUTLASS, and keeps the library.

Building needs nvcc, a C++ compiler and the headers; the library then loads on any machine. It lies
beside the cubins, under a hash of what it was made from, and is read as they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from smkern.errors import DeviceError
from smkern.kernels.cuda_source import (
    cubin_path,
    keep_cubin,
    kept_cubin,
    run_compiler,
    source_folder,
)
from smkern.kernels.cute.compile import ARCH, lacking

HEADERS, HEADERS_VERSION = "nvidia-cutlass", "4.2.0.0"
"""The headers' package, and the only version that was tried; the extra `cutlass` pins it."""
_INCLUDE = "cutlass_library/source/include"
SOURCE = "cutlass_gemm.cu"
# Hidden: other libraries in the process export templates of CUTLASS by the same names.
_FLAGS = (
    "-std=c++17", "-O3", f"-arch={ARCH}", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden",
    "--expt-relaxed-constexpr", "-DNDEBUG", "-Xlinker=-s",
)  # fmt: skip
COMPILE_S = 1800.0
"""It takes 110 s of one core."""
MEMORY_GB = 6.5
"""What nvcc takes at its peak."""
_RELEASE = re.compile(r"release .*, V([\d.]+)")
_KILLED = "died due to signal 9"


def headers() -> Path:
    """The headers' folder.

    Raises:
        DeviceError: the package is not there, or is another version.
    """
    if reason := lacking(HEADERS, HEADERS_VERSION):
        raise DeviceError(reason)
    folder = Path(str(metadata.distribution(HEADERS).locate_file(_INCLUDE)))
    if not (folder / "cutlass" / "cutlass.h").is_file():
        raise DeviceError(f"{HEADERS} has no headers in {folder}; install it again")
    return folder


def nvcc() -> tuple[str, str]:
    """The compiler on the PATH, and its release.

    Raises:
        DeviceError: there is none, or it does not run.
    """
    found = shutil.which("nvcc")
    if found is None:
        raise DeviceError(
            "no nvcc on the PATH; install the CUDA toolkit (13.0 was tried) and add its bin folder"
        )
    try:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{found} does not run: {error}") from None
    release = _RELEASE.search(told.stdout)
    if release is None:
        raise DeviceError(f"{found} --version names no release: {told.stdout.strip()[-200:]!r}")
    return found, release[1]


def absent() -> str:
    """Why nothing can be built here; empty if the headers and nvcc are there."""
    try:
        headers()
        nvcc()
    except DeviceError as error:
        return str(error)
    return ""


def build() -> Path:
    """The library by this machine's nvcc, built unless it is kept. Needs no GPU.

    Raises:
        DeviceError: headers or nvcc are missing, compiling failed or was killed, or the cache
            cannot be written.
    """
    include = headers()
    compiler, release = nvcc()
    path = _path(release)
    if kept_cubin(path) is None:
        keep_cubin(path, _compile(compiler, include))
        if kept_cubin(path) is None:
            raise DeviceError(
                f"{path} cannot be written, or others can write to it; point XDG_CACHE_HOME to a "
                "folder of yours"
            )
    return path


def built() -> Path | None:
    """The library of this source as kept, of the newest nvcc; None if it was never built."""
    kept = _path("*")
    for path in sorted(kept.parent.glob(kept.name), key=_release_of, reverse=True):
        if kept_cubin(path) is not None:
            return path
    return None


def load_library() -> ctypes.CDLL:
    """The library as kept. What stands behind it in its file, the seal, no loader reads.

    Raises:
        DeviceError: it was not built, or does not load.
    """
    path = built()
    if path is None:
        raise DeviceError(
            f"{SOURCE} was not built; run `smkern build --cpp`, or copy {_path('*')} from a "
            "machine with nvcc"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"{path} does not load: {error}; delete it, build again") from None


def _path(release: str) -> Path:
    source = (source_folder() / SOURCE).read_bytes()
    digest = hashlib.sha256(repr((HEADERS_VERSION, _FLAGS)).encode() + source).hexdigest()
    folder = cubin_path("", "").parent
    return folder / f"{Path(SOURCE).stem}-{digest[:24]}-nvcc{release}.so"


def _release_of(path: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", path.stem.partition("-nvcc")[2])]


def _compile(compiler: str, include: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "out.so"
        command = [compiler, *_FLAGS, f"-I{include}", str(source_folder() / SOURCE)]
        command += ["-o", str(library)]
        # Temporary files of its own (250 MB) lie there too, so that none is left however it ends.
        said, code = run_compiler(command, {**os.environ, "TMPDIR": folder}, COMPILE_S)
        if code < 0 or _KILLED in said:
            raise DeviceError(
                f"nvcc was killed while it compiled {SOURCE}: that takes {MEMORY_GB:g} GB of "
                "memory; free some, or build on another machine and copy the library"
            )
        if code or not library.is_file():
            raise DeviceError(
                f"nvcc does not compile {SOURCE} (exit status {code}): {said.strip()[-2000:]}"
            )
        return library.read_bytes()
