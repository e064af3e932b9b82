"""Compiles CUDA C++ of `csrc/` by nvrtc, else nvcc; results are kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from smkern.atomic import read_whole, write_whole
from smkern.device import driver_version
from smkern.errors import DeviceError

MAX_COMPILE_S = 600.0
"""Longer than any variant of ours takes nvcc."""
SEAL_BYTES = 32


def source_folder() -> Path:
    """`csrc/`, in the checkout or in the installed package."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def compile_cuda(name: str, defines: Sequence[str], arch: str) -> bytes:
    """The cubin of `csrc/<name>` compiled with `defines`, from the cache if it is there.

    Args:
        name: file in `csrc/`, for example "attention_plan.cu".
        defines: "NAME=value" macros, passed with `-D`.
        arch: target architecture, such as "sm_90a".

    Raises:
        DeviceError: no compiler was found, or compilation failed; with each compiler's message.
    """
    path = _cache_path(name, defines, arch)
    cubin = kept_cubin(path)
    if cubin is None:
        cubin = _compile(name, defines, arch)
        keep_cubin(path, cubin)
    return cubin


def _compile(name: str, defines: Sequence[str], arch: str) -> bytes:
    said = []
    for compiler in (_by_nvrtc, _by_nvcc):
        try:
            return compiler(name, defines, arch)
        except (DeviceError, ImportError, RuntimeError, OSError) as error:
            said.append(f"{compiler.__name__.removeprefix('_by_')}: {error}")
    raise DeviceError(
        f"cannot compile {name} for {arch} ({'; '.join(said)}); "
        "install nvidia-cuda-nvrtc, or put nvcc on the PATH"
    )


def _cache_path(name: str, defines: Sequence[str], arch: str) -> Path:
    """Cache file, named by a hash of what affects the device code, and whether it loads here."""
    digest = hashlib.sha256(repr(("sealed", name, tuple(defines), arch, driver_version())).encode())
    folder = source_folder()
    source = folder / name
    for path in sorted({*folder.glob("*.cuh"), *source.parent.glob("*.cuh"), source}):
        digest.update(path.read_bytes())
    return cubin_path(Path(name).stem, digest.hexdigest())


def cubin_path(stem: str, digest: str) -> Path:
    """Cache file of a cubin, named by a hash of all that it was compiled from."""
    return _cubins(os.environ.get("XDG_CACHE_HOME")) / f"{stem}-{digest[:24]}.cubin"


@cache
def _cubins(home: str | None) -> Path:
    """The folder of cubins; where caches lie is asked once, a choice of kernels asks for many."""
    from platformdirs import user_cache_path

    return user_cache_path("smkern") / "cubins"


def keep_cubin(path: Path, cubin: bytes) -> None:
    """Write a cache file; a cache that cannot be written is not an error."""
    with suppress(OSError):
        write_whole(path, cubin + _seal(path, cubin))


def kept_cubin(path: Path) -> bytes | None:
    """The cubin of a cache file; None where it is cut, spoiled, another's or not there."""
    try:
        found = read_whole(path)
    except OSError:
        return None
    cubin, seal = found[:-SEAL_BYTES], found[-SEAL_BYTES:]
    return cubin if seal == _seal(path, cubin) else None


def _seal(path: Path, cubin: bytes) -> bytes:
    """What stands behind a cubin in its file: a hash of it and of what it was compiled from."""
    return hashlib.sha256(path.name.encode() + cubin).digest()


def _by_nvrtc(name: str, defines: Sequence[str], arch: str) -> bytes:
    from cuda.bindings import nvrtc

    def value(result: tuple[Any, ...], call: str) -> Any:
        code, *values = result
        if int(code):
            raise DeviceError(f"{call} failed with {code}")
        return values[0] if values else None

    source = (source_folder() / name).read_bytes()
    program = value(
        nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []), "nvrtcCreateProgram"
    )
    options = [
        f"--gpu-architecture={arch}".encode(),
        f"--include-path={source_folder()}".encode(),
        b"-default-device",  # or nvrtc takes generic lambdas for code of the host
        *(f"-D{define}".encode() for define in defines),
    ]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(code):
        log = b" " * value(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        value(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        raise DeviceError(f"{name} does not compile: {log.decode(errors='replace').strip()}")
    cubin = b" " * value(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    value(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def _by_nvcc(name: str, defines: Sequence[str], arch: str) -> bytes:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise DeviceError("no nvcc on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "out.cubin"
        flags = [f"-arch={arch}", "-cubin", f"-I{source_folder()}"]
        flags += [f"-D{define}" for define in defines]
        command = [nvcc, *flags, str(source_folder() / name), "-o", str(cubin)]
        # Temporary files of its own lie there too, so that none is left however it ends.
        said, code = run_compiler(command, {**os.environ, "TMPDIR": folder})
        if code:
            raise DeviceError(f"nvcc failed: {said.strip()[-2000:]}")
        return cubin.read_bytes()


def run_compiler(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float | None = None
) -> tuple[str, int]:
    """What a compiler said on stderr, and its exit status; `limit_s`: `MAX_COMPILE_S` by default.

    Raises:
        DeviceError: it did not end; it was killed, with what it had started.
    """
    limit_s = MAX_COMPILE_S if limit_s is None else limit_s
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environment, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            return running.communicate(timeout=limit_s)[1], running.returncode
        except BaseException as error:
            os.killpg(running.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise DeviceError(
                    f"{command[0]} did not end within {limit_s:g} s and was killed; run it "
                    f"by hand to see why: {' '.join(command)}"
                ) from None
            raise
