"""What this machine cannot run is not collected, and is named at the end."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from smkern.kernels.cute import compile as cute

TESTS = Path(__file__).parent
SERVER = ("openai", "prometheus_client", "pydantic", "starlette", "transformers", "uvicorn")
MARKS = {
    "fuzz": pytest.mark.slow,
    # they look at `Multiplexer.errors`; the warning has tests of its own
    "runtime": pytest.mark.filterwarnings("ignore:the policy .* failed"),
}
"""What all tests of a folder have."""
NOT_RUN = pytest.StashKey[Counter[str]]()

if find_spec("hypothesis"):  # absent from a GPU machine without a network
    from hypothesis import HealthCheck, settings

    # a busy machine is no failure
    settings.register_profile("smkern", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("smkern")


@cache
def _why_not(folder: str) -> str | None:
    """Why the tests of a folder cannot run in this process, or None."""
    if folder == "gpu" and not torch.cuda.is_available():
        return "tests/gpu: torch sees no GPU (make test-gpu, on a machine with one)"
    if folder == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        return "tests/interpreter: needs a process of its own (TRITON_INTERPRET=1; make test)"
    if folder == "server" and (lacking := [name for name in SERVER if find_spec(name) is None]):
        return f"tests/server: {', '.join(lacking)} not installed (pip install '.[serve,test]')"
    if folder == "cutlass" and (reason := cute.absent()):
        return f"tests/cutlass: {reason.partition(';')[0]} (make test-cute)"
    return None


@pytest.fixture(scope="session", autouse=True)
def only_what_is_always_there() -> Iterator[None]:
    """Choices must not turn with an extra that is installed, or with what the cache holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute, "is_there", lambda: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors without torch's threads, which cost several times what they save.

    The references of GPU tests are large; processes of xdist share the CPUs.
    """
    threads = torch.get_num_threads()
    share = threads // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(share, 1) if TESTS / "gpu" in request.path.parents else 1)
    yield
    torch.set_num_threads(threads)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_RUN] = Counter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.parent != TESTS or not collection_path.is_dir():
        return None
    why_not = _why_not(collection_path.name)
    if why_not is None:
        return None
    if files := len(list(collection_path.rglob("test_*.py"))):
        config.stash[NOT_RUN][why_not] = files
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file named on the command line is collected all the same: say why it is not run."""
    for item in items:
        if TESTS not in item.path.parents:
            continue
        folder = item.path.relative_to(TESTS).parts[0]
        if why_not := _why_not(folder):
            item.add_marker(pytest.mark.skip(reason=why_not))
        if folder in MARKS:
            item.add_marker(MARKS[folder])


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage has to look at it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist's tells the one that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = dict(session.config.stash[NOT_RUN])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[NOT_RUN] |= Counter(getattr(node, "workeroutput", {}).get("not_run", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.stash[NOT_RUN]:
        return
    terminalreporter.section("not run here")
    for why_not, files in sorted(config.stash[NOT_RUN].items()):
        terminalreporter.write_line(f"{files} files of {why_not}")
