"""What of SGLang's multiplexing smkern's hooks meet, as its 0.5.17 has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from sys import modules
from typing import Any


@dataclass
class PDMuxConfig:
    sm_group_num: int = 8
    manual_divisions: list[list[int]] = field(default_factory=list)
    split_forward_token_budget: int = 65536
    decode_bs_divisor: int = 36


def _context() -> Any:
    return modules["sglang.srt.multiplex.pdmux_context"]


def initialize_stream_groups(gpu_id: int, config: PDMuxConfig) -> None:
    raise AssertionError("SGLang's own groups need a GPU")


def set_current_stream_idx(idx: int) -> None:
    _context().CURRENT_STREAM_IDX = idx
    _context().CURRENT_STREAM_GROUP = _context().STREAM_GROUPS[idx]


CONTEXT: dict[str, Any] = {
    "STREAM_GROUPS": [],
    "SM_COUNTS": [],
    "CURRENT_STREAM_IDX": 0,
    "PDMuxConfig": PDMuxConfig,
    "initialize_stream_groups": initialize_stream_groups,
    "set_current_stream_idx": set_current_stream_idx,
    "get_current_stream_idx": lambda: _context().CURRENT_STREAM_IDX,
    "get_stream_groups": lambda: _context().STREAM_GROUPS,
    "get_sm_counts": lambda: _context().SM_COUNTS,
}


class SchedulerMultiplexMixin:
    def init_pdmux(self: Any) -> None:
        raise AssertionError("asks SGLang's configuration")

    def adjust_stream_groups(self: Any, running_batch: Any) -> tuple[int, tuple[Any, Any]]:
        index = 0
        if not running_batch.is_empty() and self.split_prefill_batch:
            rows, last = running_batch.batch_size(), self.real_sm_group_num - 2
            index = max(1, min(last, rows * last // self.pdmux_config.decode_bs_divisor))
            for i, (_, _, least) in enumerate(self.pdmux_config.manual_divisions):
                index = i + 1 if rows >= least else index
        elif not running_batch.is_empty():
            index = self.real_sm_group_num - 1
        set_current_stream_idx(index)
        self.tp_worker.model_runner.update_decode_attn_backend(index)
        return index, self.stream_groups[index]

    def update_split_prefill_batch(
        self: Any, sm_count: int, running_batch: Any
    ) -> tuple[bool, Any]:
        raise AssertionError("asks SGLang's scheduler")
