"""Compiles CUDA C++ of `csrc/` by nvrtc, else nvcc; results are kept in the user's cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from smkern.atomic import write_whole
from smkern.errors import DeviceError


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
    kept = _cache_path(name, defines, arch)
    try:
        return kept.read_bytes()
    except OSError:
        cubin = _compile(name, defines, arch)
        _keep(kept, cubin)
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
    """Cache file, named by a hash of everything that affects the device code."""
    from platformdirs import user_cache_path

    digest = hashlib.sha256(repr((name, tuple(defines), arch)).encode())
    folder = source_folder()
    for path in sorted((*folder.glob("*.cuh"), folder / name)):
        digest.update(path.read_bytes())
    kept = f"{Path(name).stem}-{digest.hexdigest()[:24]}.cubin"
    return user_cache_path("smkern") / "cubins" / kept


def _keep(path: Path, cubin: bytes) -> None:
    """Write atomically; a cache that cannot be written is not an error."""
    with suppress(OSError):
        write_whole(path, cubin)


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
        flags = [f"-arch={arch}", "-cubin", *(f"-D{define}" for define in defines)]
        command = [nvcc, *flags, str(source_folder() / name), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise DeviceError(f"nvcc failed: {done.stderr.strip()[-2000:]}")
        return cubin.read_bytes()
