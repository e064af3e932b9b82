"""Lists the packages: smkern/ as it stands; autotune/, bench/, csrc/, examples/ as its children."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

CHILDREN = ("autotune", "bench", "csrc", "examples")
REPO_ONLY = "bench.results."
"""What no installed command needs: measured results."""
DATA = ["*.pyi", "*.json", "*.cu", "*.cuh", "*.h", "py.typed"]


def packages() -> dict[str, str]:
    """Package name to folder. Folders of data alone (profiles, tables, csrc) are packages too."""
    found = {"smkern": "smkern"}
    found |= {f"smkern.{name}": f"smkern/{_folder(name)}" for name in _inside("smkern")}
    for child in CHILDREN:
        if Path(child).is_dir():
            found[f"smkern.{child}"] = child
            found |= {
                f"smkern.{child}.{name}": f"{child}/{_folder(name)}"
                for name in _inside(child)
                if not f"{child}.{name}".startswith(REPO_ONLY)
            }
    return found


def _inside(folder: str) -> list[str]:
    names = find_namespace_packages(folder)
    return [name for name in names if "__pycache__" not in name]


def _folder(name: str) -> str:
    return name.replace(".", "/")


setup(
    packages=list(packages()),
    package_dir=packages(),
    package_data={"": DATA},
    include_package_data=False,  # MANIFEST.in is the sdist's alone
)
