"""The package as a user gets it: light to import, complete as a wheel, the same in a checkout."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import smkern
import smkern.runtime

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, cwd: Path = ROOT) -> str:
    """What a fresh interpreter prints, errors included."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PYTHONPATH": str(cwd), "PATH": ""},
    )
    return done.stdout + done.stderr


def test_import_is_light_and_silent() -> None:
    heavy = "{'torch', 'triton', 'cuda', 'numpy', 'rich', 'click', 'matplotlib'}"
    assert python(f"import sys, smkern; print({heavy} & set(sys.modules))") == "set()\n"


def stub_of(package: ModuleType) -> dict[str, str]:
    """Public name to the module that its package's stub takes it from, as a type checker reads."""
    tree = ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.name == alias.asname for node in imports for alias in node.names)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


LAZY = (smkern, smkern.runtime)
STUBS = {package.__name__: stub_of(package) for package in LAZY}


@pytest.mark.parametrize("package", LAZY, ids=STUBS)
def test_all_is_what_the_stub_has(package: ModuleType) -> None:
    more = ["__version__"] if package is smkern else []
    assert package.__all__ == [*STUBS[package.__name__], *more]
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in STUBS for name in STUBS[package]]
)
def test_public_name_is_its_modules_and_typed(package: str, name: str) -> None:
    found = getattr(import_module(package), name)
    source = STUBS[package][name]
    if source == package:
        assert found is import_module(f"{package}.{name}")
        return
    assert found is getattr(import_module(source), name)
    made = inspect.isclass(found) or inspect.isfunction(found)
    if not made or getattr(found, "_is_protocol", False):
        return
    signature = inspect.signature(found)
    parts = [one.annotation for one in signature.parameters.values()]
    parts += [] if inspect.isclass(found) else [signature.return_annotation]
    assert signature.empty not in parts


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'smkern' has no attribute 'gemv'"):
        smkern.gemv  # noqa: B018


def test_checkout_serves_bench_and_autotune_as_children() -> None:
    code = "import smkern.bench, smkern.autotune; print(smkern.bench.__file__)"
    assert Path(python(code).strip()) == ROOT / "bench" / "__init__.py"


def test_sibling_folders_of_an_installed_package_are_left_alone(tmp_path: Path) -> None:
    """In site-packages another distribution may own a folder called bench."""
    shutil.copytree(ROOT / "smkern", tmp_path / "smkern")
    for name in ("autotune", "bench"):
        (tmp_path / name).mkdir()
    assert python("import smkern; print(len(smkern.__path__))", tmp_path) == "1\n"


FOLDERS = ("smkern", "autotune", "bench", "csrc", "examples")
REPO_ONLY = "bench/results/"


def built(kind: str, source: Path) -> Path:
    """An sdist or a wheel of a folder, by setuptools alone (no network)."""
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return source / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an sdist of what git would clone unpacks to."""
    source = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.name in (*FOLDERS, ".ci", "docs", "tests"):
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / path.name, ignore=skip)
        elif path.is_file():
            shutil.copy(path, source)
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", source)) as archive:
        archive.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> zipfile.ZipFile:
    """A wheel built from the sdist, as pip builds it."""
    return zipfile.ZipFile(built("wheel", sdist))


@pytest.mark.slow
def test_sdist_holds_what_make_needs(sdist: Path) -> None:
    for name in ("constraints.txt", "Makefile", "CHANGELOG.md", ".ci/venv", ".ci/test"):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()
    assert (sdist / "tests" / "conftest.py").exists()
    assert (sdist / "bench" / "results" / "h200" / "gemm.json").exists()


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    inside = set(wheel.namelist())
    paths = [
        path.relative_to(ROOT)
        for folder in FOLDERS
        for pattern in ("*.py", "*.pyi", "*.json", "*.cu", "*.cuh", "*.h", "py.typed")
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts
    ]
    wanted = [path for path in paths if not str(path).startswith(REPO_ONLY)]
    assert wanted
    home = Path("smkern")
    assert {str(path if path.parts[0] == "smkern" else home / path) for path in wanted} <= inside
    assert not {name for name in inside if name.startswith(("tests/", *FOLDERS[1:]))}


@pytest.mark.slow
def test_wheel_leaves_measurements_out(wheel: zipfile.ZipFile) -> None:
    left = [name for name in wheel.namelist() if name.startswith(f"smkern/{REPO_ONLY}")]
    assert left == [f"smkern/{REPO_ONLY}__init__.py"]
    sizes = {info.filename: info.file_size for info in wheel.infolist()}
    tables = sum(size for name, size in sizes.items() if "/tables/" in name)
    assert tables < 4.2e6
    assert sum(sizes.values()) - tables < 4.2e6


@pytest.mark.slow
@pytest.mark.parametrize("data", ["py.typed", "profiles/h200.json"])
def test_wheel_holds_what_planning_needs(wheel: zipfile.ZipFile, data: str) -> None:
    assert f"smkern/{data}" in wheel.namelist()


@pytest.mark.slow
def test_wheel_works_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import smkern.bench.results, smkern.autotune; print(smkern.bench.results.__file__)"
    assert (
        Path(python(code, tmp_path).strip())
        == tmp_path / "smkern" / "bench" / "results" / "__init__.py"
    )


@pytest.mark.slow
def test_metadata(wheel: zipfile.ZipFile) -> None:
    folder = f"smkern-{smkern.__version__}.dist-info"
    metadata = wheel.read(f"{folder}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "smkern = smkern.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()


def test_linters_are_pinned_and_dependencies_have_the_bounds_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if "==" in name]
    moving = ("numpy", "torch", "triton")
    assert [name.split(">")[0] for name in project["dependencies"] if "<" in name] == list(moving)
    pins = (ROOT / "constraints.txt").read_text()
    assert all(f"{name}==" in pins for name in (*moving, "ruff", "mypy"))
