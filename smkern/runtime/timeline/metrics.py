"""Stats as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError
from smkern.runtime.place import LANES

if TYPE_CHECKING:
    from smkern.runtime.timeline.meters import Distribution
    from smkern.runtime.timeline.stats import Stats

SWITCH = "From a decision for another split"
QUANTILES = (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99"))


class StatsCollector:
    """A collector of prometheus-client that asks for stats when it is scraped.

    Args:
        read: Gives the stats, such as `Multiplexer.stats`.

    Example:
        >>> from prometheus_client import CollectorRegistry                    # doctest: +SKIP
        >>> registry = CollectorRegistry()                                     # doctest: +SKIP
        >>> registry.register(StatsCollector(mux.stats))                       # doctest: +SKIP
    """

    def __init__(self, read: Callable[[], Stats]) -> None:
        self._read = read

    def describe(self) -> tuple[()]:
        """Nothing: registering does not read."""
        return ()

    def collect(self) -> Iterator[Any]:
        """The families of metrics, `smkern_...`; times in seconds, as Prometheus has them."""
        core, stats = _core(), self._read()
        yield from _counters(core, stats)
        yield from _gauges(core, stats)
        for name, text, values in (
            ("ttft", "From a request's arrival to its first token", stats.ttft_us),
            ("tbt", "Gaps between two tokens of a request, as delivered", stats.tbt_us),
            ("switch_host", f"{SWITCH} to the first launch on it", stats.switches.host_us),
            ("switch_handover", f"{SWITCH} until both sides have launched on it",
             stats.switches.handover_us),
        ):  # fmt: skip
            yield _summary(core, name, text, values)


def metrics_text(read: Callable[[], Stats]) -> str:
    """Stats in Prometheus' text format, from a registry of their own.

    Args:
        read: Gives the stats, such as `Multiplexer.stats`.

    Raises:
        ArgumentError: prometheus-client is not installed.

    Example:
        >>> print(metrics_text(mux.stats))                                     # doctest: +SKIP
    """
    _core()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatsCollector(read))
    return generate_latest(registry).decode()


def _core() -> Any:
    try:
        from prometheus_client import core
    except ImportError as error:
        raise ArgumentError(
            f"metrics are written by prometheus-client ({error}): pip install prometheus-client, "
            "or read stats()"
        ) from error
    return core


def _counters(core: Any, stats: Stats) -> Iterator[Any]:
    for name, text, value in (
        ("requests", "Requests that came", stats.requests),
        ("prompt_tokens", "Tokens of their prompts", stats.prompt_tokens),
        ("tokens", "Tokens that were delivered", stats.tokens),
        ("preemptions", "Requests that gave way", stats.preemptions),
        ("switches", "Changes of the split", stats.switches.count),
    ):
        yield core.CounterMetricFamily(f"smkern_{name}", text, value)
    rates = stats.rates.items()
    lanes = [(lane, getattr(stats.bubbles, lane)) for lane in LANES]
    busy = [(lane, of.busy_us / 1e6) for lane, of in lanes]
    bubbles = [(lane, of.bubble_us / 1e6) for lane, of in lanes]
    families: tuple[tuple[str, str, str, Iterable[tuple[str, float]]], ...] = (
        ("finished", "Requests that left, by reason", "reason", sorted(stats.finished.items())),
        ("flops", "FLOPs of a lane's launches", "lane", [(x, of.flops) for x, of in rates]),
        ("bytes", "Bytes that they moved", "lane", [(x, of.bytes_moved) for x, of in rates]),
        ("busy_seconds", "Time with a launch on a lane", "lane", busy),
        ("bubble_seconds", "Time with none while work for the lane existed", "lane", bubbles),
    )
    for name, text, label, values in families:
        family = core.CounterMetricFamily(f"smkern_{name}", text, labels=[label])
        for key, number in values:
            family.add_metric([key], number)
        yield family


def _gauges(core: Any, stats: Stats) -> Iterator[Any]:
    state = stats.state
    for name, text, value in (
        ("requests_decoding", "Requests that decode", state.decoding),
        ("requests_prefilling", "Requests whose layers run", state.prefilling),
        ("requests_waiting", "Requests that wait", state.waiting),
        ("tokens_per_second", "Tokens a second since the first request", stats.tokens_per_s),
        ("bubble_ratio", "Share of the time with work without a kernel", stats.bubble_ratio),
        (
            "muxwise_bubble_ratio",
            "Share of all time without a kernel, mean of the lanes",
            stats.muxwise_bubble_ratio,
        ),
    ):
        yield core.GaugeMetricFamily(f"smkern_{name}", text, value)


def _summary(core: Any, name: str, text: str, values: Distribution) -> Any:
    full = f"smkern_{name}_seconds"
    family = core.SummaryMetricFamily(full, text)
    for quantile, field in QUANTILES:
        if values.count:
            family.add_sample(full, {"quantile": quantile}, getattr(values, field) / 1e6)
    family.add_metric([], values.count, values.count * values.mean / 1e6)
    return family
