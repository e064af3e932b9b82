"""How long the launches of a timeline should have taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from smkern.errors import SmkernError
from smkern.runtime.place import LANES, Lane
from smkern.runtime.timeline.trace import Span

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor


def predicted(spans: Iterable[Span], predictor: Predictor) -> list[Span]:
    """The same launches with a predicted time each, where they say what they are made of.

    A launch is priced beside what ran on the other lane when it began.
    """
    spans = list(spans)
    lanes = {lane: sorted(span for span in spans if span.lane == lane) for lane in LANES}
    next_of = dict.fromkeys(LANES, 0)
    priced = {}
    for span in sorted(spans, key=lambda span: (span.begin_us, span.number)):
        other: Lane = "prefill" if span.lane == "decode" else "decode"
        queue, index = lanes[other], next_of[other]
        while index < len(queue) and queue[index].end_us <= span.begin_us:
            index += 1
        next_of[other] = index
        beside = queue[index] if index < len(queue) else None
        if beside is not None and beside.begin_us > span.begin_us:
            beside = None
        priced[span.number] = span._replace(predicted_us=_price(span, beside, predictor))
    return [priced[span.number] for span in spans]


def _price(span: Span, beside: Span | None, predictor: Predictor) -> float | None:
    if span.size is None:
        return None
    num_sms = span.place.num_sms
    try:
        alone_us = predictor.alone_us(span.size, num_sms)
        if beside is None or beside.size is None:
            return alone_us
        return alone_us * predictor.slowdown(span.size, num_sms, beside.size, beside.place.num_sms)
    except SmkernError:
        return None  # a size that the predictor does not serve
