"""Compilations that begin while more is chosen."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from smkern.kernels import compile as compiling
from smkern.kernels.compile import Compilations, compile_all
from smkern.kernels.gemm_compile import compile_tasks
from smkern.kernels.gemm_variants import variant_of
from smkern.ops.warming import Bar, Work
from smkern.ops.warmup import run_all
from smkern.tuning import candidates
from smkern.tuning.config import GemmProblem


class Pool:
    """Runs what it is given at once, and notes it."""

    def __init__(self, events: list[str], workers: int, **options: Any) -> None:
        self.events = events
        events.append(f"{workers} processes")

    def submit(self, run: Any, task: Any) -> Future[None]:
        self.events.append(f"begin {task()}")
        future = Future[None]()
        future.set_result(None)
        return future

    def shutdown(self, *, cancel_futures: bool) -> None:
        self.events.append("over")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", partial(Pool, noted))
    return noted


def task(name: str) -> Any:
    return partial(str, name)


def test_what_is_chosen_first_is_compiled_while_the_rest_is_chosen(events: list[str]) -> None:
    shared = task("a")

    def works():
        for names in ([shared, task("b")], [], [shared, task("c")]):
            events.append("choose")
            yield Work(choices=1, variants=1, compile=names, launches=[])

    report = run_all(works(), 4, Bar(False), 0.0)
    assert events == [
        "choose", "4 processes", "begin a", "begin b", "choose", "choose", "begin c", "over"
    ]  # fmt: skip
    assert (report.compiled, report.choices) == (3, 3)


def test_a_variant_that_two_products_want_is_one_task() -> None:
    kinds = [*candidates.variants("bf16", True, (9, 0), ("ws",))[:3]]
    first, second = (
        [variant_of(GemmProblem(64, n, 4096), config, 90) for config in kinds] for n in (4096, 6144)
    )
    assert first == second
    compilations = Compilations(1)
    for variants in (first, second, first[:1]):
        compilations.begin(compile_tasks(variants))
    assert len(compilations) == 3


@pytest.mark.parametrize(("workers", "count"), [(1, 3), (8, 1), (8, 0)])
def test_few_tasks_and_one_worker_need_no_process(events, workers, count) -> None:
    ran: list[int] = []
    told: list[tuple[int, int]] = []
    tasks = [partial(ran.append, i) for i in range(count)]
    compile_all(tasks, workers=workers, done=lambda *now: told.append(now))
    assert ran == list(range(count))
    assert told == [(i + 1, count) for i in range(count)]
    assert events == []


def test_where_choosing_fails_nothing_waits_for_what_was_begun(events: list[str]) -> None:
    def works():
        yield Work(choices=1, variants=1, compile=[task("a"), task("b")], launches=[])
        raise KeyError

    with pytest.raises(KeyError):
        run_all(works(), 2, Bar(False), 0.0)
    assert events[-1] == "over"
