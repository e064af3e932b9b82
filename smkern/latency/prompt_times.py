"""Times of prompts and of mixed forwards alone, between those that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from smkern.latency.curve import Curve, Filled
from smkern.latency.roofline import Roofline
from smkern.latency.step_times import KEPT, UNMEASURED, StepTimes
from smkern.latency.table import Timing
from smkern.latency.work import Kind, Size, padded_rows
from smkern.tuning.attention.shapes import PREFILL_MAX_PIECES, PREFILL_PIECE, PREFILL_ROWS

HEAD_ROWS = 8
"""Rows of the head's GEMM are told apart by so many."""
TILE = 16
"""Queries by which attention's prefill path goes: what is left of the last step costs as much."""
ATTENTION = 1.9
"""Time of attention over its roofline, for prompts with nothing cached."""
WALK = 0.75
"""Time of a tile of 128 rows that walks its keys, over its FLOPs at an SM's rate and attention's
factor: that factor also has SMs that wait."""
WHOLE_SMS = 132.0
UNEVEN = 1.05
"""More SMs that lie unevenly over the GPCs are up to 5% slower."""
_LEAST_OVER, _MOST_OVER = 0.8, 8.0
"""Bounds of what is said of attention by cells of which it is a small part."""


def _undelayed(cells: Mapping[Timing, float], kind: Kind) -> dict[Timing, float]:
    """Times of prompts or of mixed forwards, each at most that of one with more of everything, and
    hardly more than on fewer SMs: in small ones that were launched kernel by kernel are pauses of a
    host.
    """
    alike: dict[tuple[int, int], list[tuple[Timing, float]]] = {}
    for key, us in cells.items():
        if key.kind == kind:
            alike.setdefault((key.cached, key.layers), []).append((key, us))
    return {
        key: min(
            us if more.num_sms == key.num_sms else UNEVEN * us
            for more, us in others
            if more.num_sms <= key.num_sms
            and more.prompts * more.tokens >= key.prompts * key.tokens
            and more.batch >= key.batch
            and more.batch * more.context >= key.batch * key.context
        )
        for others in alike.values()
        for key, _ in others
    }


class PromptTimes:
    """Prompts take c_p times their GEMMs and what goes with them, and r times attention's roofline.

    c_p follows from cells of prompts by SMs and tokens; r from those behind cached tokens, by new
    tokens an SM and cached ones: few tiles leave SMs idle. Without such cells c_p counts for
    attention, too. Attention takes at least as long as one tile needs for the longest piece of
    keys. A mixed forward adds its decode rows' attention, which fills SMs that wait for such a
    tile, and takes at least what these rows take alone; cells of mixed forwards correct it by SMs,
    all its rows and its decode rows. What launching takes the host is not in these times.

    Args:
        cells: Times with nothing beside them, us; decode steps are passed over.
        roofline: Of the model on the device.
        steps: Its decode steps.
    """

    def __init__(self, cells: Mapping[Timing, float], roofline: Roofline, steps: StepTimes) -> None:
        self._roofline, self._steps = roofline, steps
        self._kept: dict[tuple[int, int, int, int, int, bool], _Forward] = {}
        self._others, self._attention, self._mixed = Filled([]), Curve((), ()), Curve((), ())
        self._has_cached = False
        layers = roofline.num_layers
        # In this order: what has more to it is told from what has less.
        prompts = _undelayed(cells, "prefill")
        plain = {key: us for key, us in prompts.items() if not key.cached} or prompts
        self._has_cached = len(plain) < len(prompts)
        self._others = Filled(
            (
                (key.num_sms, key.prompts * key.tokens),
                self._others_over(key.size(layers), key.num_sms, us),
            )
            for key, us in plain.items()
        )
        self._kept.clear()
        self._attention = Curve.of(
            (
                (_per_sm(key.prompts * key.tokens, key.num_sms), key.cached),
                self._attention_over(key.size(layers), key.num_sms, us),
            )
            for key, us in prompts.items()
            if key not in plain
        )
        self._kept.clear()
        self._mixed = Curve.of(
            self._mixed_over(
                [
                    (key, us / self.us(key.size(layers), key.num_sms))
                    for key, us in _undelayed(cells, "mixed").items()
                ]
            )
        )
        self._kept.clear()

    def over(self, roofline: Roofline, steps: StepTimes) -> PromptTimes:
        """The same times over another model's roofline."""
        other = PromptTimes({}, roofline, steps)
        other._others, other._attention, other._mixed = self._others, self._attention, self._mixed
        other._has_cached = self._has_cached
        return other

    def us(self, size: Size, num_sms: int) -> float:
        """Time of a launch that has chunks."""
        forward, batch = self._forward(size, num_sms), size.batch
        if not batch:
            return forward.us(size)
        steps_us = self._steps.attention_us(num_sms, batch, size.total_kv)
        us = forward.mixed * forward.us(size, steps_us)
        return max(us, self._steps.us(num_sms, batch, size.total_kv))

    def attention_share(self, size: Size, num_sms: int) -> float:
        """Attention's part of the time of prompts' layers."""
        forward = self._forward(size, num_sms)
        return forward.attention_us(size) / forward.us(size)

    def _forward(self, size: Size, num_sms: int) -> _Forward:
        new, rows, batch = 0, len(size.chunks) if size.head else 0, size.batch
        for chunk in size.chunks:
            new += chunk[0]
        layers = self._roofline.num_layers if batch else size.layers
        key = num_sms, new, batch, rows + batch, layers, size.ends
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[key] = self._make(*key)
        return found

    def _make(
        self, num_sms: int, new: int, batch: int, rows: int, layers: int, ends: bool
    ) -> _Forward:
        tokens, roofline = new + batch, self._roofline
        over = self._others.at(num_sms, tokens) if self._others else UNMEASURED
        drawing = -(-rows // HEAD_ROWS) * HEAD_ROWS
        padded = padded_rows(tokens)
        others_us = over * roofline.others_us(padded, drawing, layers, num_sms, ends)
        fixed, by_key = roofline.attention(tokens, layers, num_sms)
        attention = ATTENTION if self._has_cached else over
        behind, per_sm = self._attention, _per_sm(new, num_sms)
        mixed = self._mixed.at(num_sms, batch, tokens) if batch and self._mixed else 1.0
        walk = WALK * PREFILL_ROWS * num_sms / roofline.num_q_heads * by_key.flops_us
        return _Forward(new, others_us, fixed, *by_key, walk, attention, behind, per_sm, mixed)

    def _mixed_over(
        self, ratios: Iterable[tuple[Timing, float]]
    ) -> Iterator[tuple[tuple[float, float, float], float]]:
        """Times of mixed forwards over those predicted, by SMs, decode rows and all rows.

        Where times of GEMMs have the stair, what is left is of decode rows, none without any: their
        mean, as single forwards are 4% off to both sides.
        """
        if not self._roofline.knows_gemms:
            for key, ratio in ratios:
                yield (key.num_sms, key.batch, key.prompts * key.tokens + key.batch), ratio
            return
        found: dict[tuple[int, int], list[float]] = {}
        for key, ratio in ratios:
            found.setdefault((key.num_sms, key.batch), []).append(ratio)
            found.setdefault((key.num_sms, 1), [1.0])
        for (num_sms, batch), all_ in found.items():
            yield (num_sms, batch, 1.0), sum(all_) / len(all_)

    def _others_over(self, size: Size, num_sms: int, us: float) -> float:
        """c_p of a prompt with nothing cached."""
        forward = self._forward(size, num_sms)
        attention_us = forward.attention_us(size)
        others_us = forward.others_us / UNMEASURED
        if not self._has_cached:
            return us / (others_us + attention_us / UNMEASURED)
        return max(0.2, (us - attention_us) / others_us)

    def _attention_over(self, size: Size, num_sms: int, us: float) -> float:
        """r of a prompt behind cached tokens."""
        forward = self._forward(size, num_sms)
        over = ATTENTION * (us - forward.others_us) / forward.attention_us(size)
        return min(max(over, _LEAST_OVER), _MOST_OVER)


@dataclass(slots=True, eq=False)
class _Forward:
    """What is the same of all forwards of so many tokens and rows on so many SMs."""

    _new: int
    others_us: float
    _fixed: float
    _key_us: float
    _pair_us: float
    _walk_us: float
    _attention: float
    _behind: Curve
    _per_sm: float
    mixed: float

    def us(self, size: Size, steps_us: float = 0.0) -> float:
        return self.others_us + self.attention_us(size, steps_us)

    def attention_us(self, size: Size, steps_us: float = 0.0) -> float:
        """Of the chunks, and of decode rows that take `steps_us` by themselves."""
        keys = pairs = behind = longest = 0
        new: int
        cached: int
        for new, cached in size.chunks:
            tile = -(-new // TILE) * TILE
            keys += (kv_len := cached + new)
            pairs += tile * cached + tile * (new + 1) // 2
            behind += new * cached
            if kv_len > longest:
                longest = kv_len
        moved, computed = self._fixed + self._key_us * keys, self._pair_us * pairs
        over = self._attention
        if behind and self._behind:
            over = self._behind.at(self._per_sm, behind / self._new)
        walked = min(longest, max(PREFILL_PIECE, longest / PREFILL_MAX_PIECES))
        return max(over * max(moved, computed) + steps_us, over * self._walk_us * walked)


def _per_sm(tokens: int, num_sms: int) -> float:
    """Tokens on a whole device that make as many tiles an SM."""
    return tokens * WHOLE_SMS / num_sms
