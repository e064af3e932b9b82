"""A hash of what was timed: a profile holds for the kernels and tables it was measured with."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from smkern.device import gpu_folder

_PACKAGE = Path(__file__).parents[1]
_KERNELS = (".py", ".cu", ".cuh", ".h")
_WORDS = {
    ".py": re.compile(rb'"""(?:.|\n)*?"""|^\s*#.*$|  #.*$', re.MULTILINE),
    ".json": re.compile(rb'"meta": \{[^\n]*\}, '),
}
"""Docstrings and comments, and a table's provenance: kernels are the same with other words."""
_COMPILING = ("cuda_source.py",)
"""What compiles kernels and keeps them: they are the same however."""
_UNTIMED = ("all_reduce", "cute", "cutlass_gemm.cu", "fp8", "gemm_fp8.json", "reader.cu")
"""Folders and files of kernels that no profile launches, and their tables."""
_C_WORDS = re.compile(rb"//.*$|/\*(?:.|\n)*?\*/", re.MULTILINE)
_SPACE = re.compile(rb"\s+")


@cache
def kernels_hash(gpu: str) -> str:
    """A hash of the kernels' sources and of a GPU's tuned tables, 16 hex digits.

    Comments, white space, the tables' provenance and kernels that no profile launches do not count.

    Args:
        gpu: The GPU's name or folder.
    """
    found = hashlib.sha256()
    csrc = _PACKAGE / "csrc" if (_PACKAGE / "csrc").is_dir() else _PACKAGE.parent / "csrc"
    for folder in (csrc, _PACKAGE / "kernels"):
        _add(found, folder, _KERNELS)
    _add(found, _PACKAGE / "tuning" / "tables" / gpu_folder(gpu), (".json",))
    return found.hexdigest()[:16]


def _add(found: hashlib._Hash, folder: Path, kinds: tuple[str, ...]) -> None:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if inside.parts[0] in _UNTIMED or path.name in _COMPILING:
            continue
        if path.suffix in kinds and path.is_file():
            found.update(inside.as_posix().encode())
            words = _WORDS.get(path.suffix, _C_WORDS)
            found.update(_SPACE.sub(b"", words.sub(b"", path.read_bytes())))
