"""A hash of what a model launches: a profile holds for the kernels and cells that it timed."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from smkern.errors import TableError
from smkern.latency.cost import Load, kernels_of
from smkern.latency.sizes import ModelSizes
from smkern.tuning import cells
from smkern.tuning.cells import Cells
from smkern.tuning.cost_constants import load_constants
from smkern.tuning.families import FAMILIES
from smkern.tuning.family import Family
from smkern.tuning.fp8_table import FP8_FAMILY
from smkern.tuning.sample import VOCAB_STEP
from smkern.tuning.select import GEMM_FAMILY

_PACKAGE = Path(__file__).parents[1]
_C_WORDS = re.compile(rb"//.*$|/\*(?:.|\n)*?\*/", re.MULTILINE)
_PYTHON_WORDS = re.compile(rb'"""(?:.|\n)*?"""|^\s*#.*$|  #.*$', re.MULTILINE)
_WORDS = {".py": _PYTHON_WORDS, ".cu": _C_WORDS, ".cuh": _C_WORDS, ".h": _C_WORDS}
"""Docstrings and comments of a kernel's files: it is the same with other words."""
_SPACE = re.compile(rb"\s+")
_COMPILING = ("cuda_source.py", "compile.py")
"""What compiles kernels and keeps them: they are the same however."""
_UNTIMED = ("all_reduce", "cute", "cutlass_gemm.cu", "reader.cu")
"""Folders and files of kernels that no profile launches."""
_E4M3 = ("fp8",)
"""Those that only models with weights in e4m3 launch."""


@cache
def kernels_hash(gpu: str, sizes: ModelSizes) -> str:
    """A hash of the kernels' sources and of the tuned cells that serve a model, 16 hex digits.

    Cells are the shipped ones, overridden by the user's own. Those of the model's weights, heads,
    experts and vocabulary count: no look-up takes another's. Beside them the cost model decides, so
    its constants count, too. Comments, white space, the tables' provenance and kernels that no
    profile of the model launches do not.

    Args:
        gpu: The GPU's name or folder.
        sizes: The model.
    """
    found = hashlib.sha256(_sources(sizes.linear_bytes))
    # an H200's constants serve its whole generation; on another they say too much at worst
    found.update(repr(load_constants(gpu, (9, 0))).encode())
    weights, served = _weights(sizes), _served(sizes)
    for family in FAMILIES:
        wanted = weights.get(family.name)
        if wanted == []:
            continue  # the model has no weights of the family's dtype
        for key, cell in sorted(_cells(family, gpu).items()):
            if wanted is not None and (key.n, key.k) not in wanted:
                continue
            if all(getattr(key, name, None) in values for name, values in served.items()):
                found.update(json.dumps(family.codec.encode(key, cell)).encode())
    return found.hexdigest()[:16]


def _weights(sizes: ModelSizes) -> dict[str, list[tuple[int, int]]]:
    """The (n, k) of a model's weights whose products a family's table serves, by its name."""
    kernels = kernels_of(sizes, Load(1, 1, 1, 1), l2_bytes=0)
    found: dict[str, list[tuple[int, int]]] = {GEMM_FAMILY.name: [], FP8_FAMILY.name: []}
    for kernel in kernels:
        if kernel.product is not None:
            family = GEMM_FAMILY if kernel.flop_rate == 1 else FP8_FAMILY
            found[family.name].append((kernel.product.n, kernel.product.k))
    return found


def _served(sizes: ModelSizes) -> dict[str, tuple[int | None, ...]]:
    """The values of keys' fields in the cells that serve a model; None: keys without the field."""
    experts = () if sizes.moe is None else (sizes.moe.num_experts, 0)  # un-permuting counts none
    return {
        "num_q_heads": (sizes.q_size // sizes.head_dim, None),
        "num_kv_heads": (sizes.kv_size // sizes.head_dim, None),
        "head_dim": (sizes.head_dim, None),
        "num_experts": (*experts, None),
        "vocab": (-(-sizes.vocab_size // VOCAB_STEP) * VOCAB_STEP, None),
    }


def _cells(family: Family[Any, Any], gpu: str) -> dict[Any, Any]:
    """A family's cells; none of a file that is none, which launches and `smkern doctor` report."""
    found = _shipped(family.name, cells.shipped_path(gpu, family.name))
    with suppress(TableError):
        found = found.merged(family.file(cells.user_path(gpu, family.name)).load())
    return found.cells


@lru_cache(len(FAMILIES))
def _shipped(name: str, path: Path) -> Cells[Any, Any]:
    """A family's shipped cells, kept for the next model of the GPU: reading takes 0.1 s."""
    (family,) = (family for family in FAMILIES if family.name == name)
    with suppress(TableError):
        return family.file(path).load()
    return Cells()


@cache
def _sources(linear_bytes: int) -> bytes:
    """A digest of the kernels' sources that models with such weights launch."""
    found = hashlib.sha256()
    untimed = _UNTIMED if linear_bytes == 1 else (*_UNTIMED, *_E4M3)
    csrc = _PACKAGE / "csrc" if (_PACKAGE / "csrc").is_dir() else _PACKAGE.parent / "csrc"
    for folder in (csrc, _PACKAGE / "kernels"):
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if inside.parts[0] in untimed or path.name in _COMPILING or not path.is_file():
                continue
            if (words := _WORDS.get(path.suffix)) is not None:
                found.update(inside.as_posix().encode())
                found.update(_SPACE.sub(b"", words.sub(b"", path.read_bytes())))
    return found.digest()
