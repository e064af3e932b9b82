"""A device that is not there: places, families whose cells cost time of a clock, a noted log."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import nan
from types import SimpleNamespace
from typing import Any

from smkern.autotune import pipeline
from smkern.autotune.raw import Measurement
from smkern.device import Budget
from smkern.measure.partitions import Place

META = dict.fromkeys(("driver", "torch", "triton", "smkern_commit", "date", "command"), "x")


def place(num_sms: int) -> Place:
    return Place(Budget(num_sms, "mask", num_sms > 66), None)


@dataclass
class FakeDevice:
    """Measures in no time but its clock's; the first candidate takes 10 us, each other 1 us less.

    Args:
        profile: The dispatchers' profile.
        cell_s: What a cell takes.
        failing: Budgets where nothing runs.
        us: A configuration's time, where it is not as above.
    """

    profile: Any
    cell_s: float = 1.0
    failing: tuple[int, ...] = ()
    us: Any = None
    now_s: float = 0.0
    log: list[tuple[Any, ...]] = field(default_factory=list)
    after_cell: Any = None

    def install(self, monkeypatch: Any) -> FakeDevice:
        gpu = {"gpu": self.profile.info.name}
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("smkern.measure.provenance.collect_meta", lambda: META | gpu)
        monkeypatch.setattr(
            "smkern.measure.partitions.trim_memory", lambda: self.log.append(("trim",))
        )
        monkeypatch.setattr(pipeline, "Compiler", lambda workers: FakeCompiler(self))
        return self

    def family(self, family: Any) -> Any:
        """The same family, measured here."""
        dispatcher = SimpleNamespace(profile=self.profile)

        def tuner(cases: Any, given: Any, device: str) -> Any:
            assert given is dispatcher
            self.log.append(("tuner", *dict.fromkeys(case.name for case in cases)))
            return SimpleNamespace(measure=self.measure)

        def tasks(problem: Any, budget: Any, configs: Any, given: Any) -> Any:
            return {(family.name, problem): print}

        return replace(family, dispatcher=lambda index: dispatcher, tuner=tuner, tasks=tasks)

    def measure(self, problem: Any, where: Any, wanted: Any) -> Any:
        self.now_s += self.cell_s
        self.log.append(("cell", where.budget.num_sms))
        failed = where.budget.num_sms in self.failing
        found = []
        for index, (config, predicted_us) in enumerate(wanted.items()):
            us = self.us(config) if self.us else max(10.0 - index, 1.0)
            found.append(
                Measurement(
                    problem, where.budget, config, nan if failed else us, 0.0, predicted_us,
                    "no luck" if failed else None,
                )
            )  # fmt: skip
        if self.after_cell:
            self.after_cell()
        return found

    def cells(self) -> list[int]:
        """Budgets of the cells measured since the log was cleared."""
        return [event[1] for event in self.log if event[0] == "cell"]


@dataclass
class FakeCompiler:
    """Compiles in no time; notes what it is asked for."""

    device: FakeDevice

    def __enter__(self) -> FakeCompiler:
        return self

    def __exit__(self, *error: object) -> None:
        self.device.log.append(("compiler closed",))

    def start(self, tasks: Any) -> None:
        self.device.log.append(("compile", len(tasks)))

    wait = staticmethod(lambda variants, stop: stop.why is None)
    report = staticmethod(lambda: None)


def fake_opened(device: FakeDevice) -> Any:
    """Places of 16 and of 100 SMs; others are not there."""

    @contextmanager
    def opened(budgets: Any, confined: Any) -> Any:
        yield [place(16), place(100)]

    return opened


__all__ = ["META", "FakeCompiler", "FakeDevice", "fake_opened", "place"]
