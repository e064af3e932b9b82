"""SGLang's prefill-decode multiplexing (`--enable-pdmux`) on smkern's partitions.

SGLang keeps stream groups, a pair of streams for prompts and for decode each, with an attention
backend and decode graphs of its own, and runs layers of prompts on one stream while decode steps
run on the other. Its groups are made here of a ladder, and a limit may choose among them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from logging import getLogger
from time import perf_counter
from typing import Any

import torch

from smkern.device import DeviceInfo, device_info
from smkern.errors import ArgumentError, ConfigError, ProfileError
from smkern.integrations.sglang import NAME
from smkern.latency import Chunk, Corrected, Size
from smkern.latency.nearest import places_of, predictor_for
from smkern.limits import as_float
from smkern.models.config import ModelConfig
from smkern.partition import Ladder, ladder, plan_ladder

LIMIT = "SMKERN_PDMUX_TBT_MS"
"""Milliseconds between two tokens of a request, in the environment; unset: SGLang's own table."""
ATOM = 8
"""SMs that move together: SGLang's GEMMs are cuBLAS's, whose clusters need groups of 8."""
LEAST = 16
"""SMs of a decode side that nobody named, at least; at most half of the device, as in SGLang."""


class Multiplexing:
    """SGLang's stream groups as partitions; what it does is done in hooks of SGLang (`HOOKS`).

    Without `--attention-backend smkern` every hook is SGLang's own function.

    Attributes:
        ladder: The partitions; None before SGLang asks for groups.
    """

    def __init__(self) -> None:
        self.ladder: Ladder | None = None
        self._limit_us = 0.0
        self._predictor: Corrected | None = None
        self._pair: tuple[Size, int, Size, int] | None = None
        """A decode step and its SMs, and the prompts beside it and theirs."""
        self._since = 0.0

    def complete(self, scheduler: Any) -> None:
        """Give a scheduler of SGLang 0.5.17 what its multiplexing still asks for, and 0.5.23's
        does not: without these it ends at its start."""
        ranks = getattr(scheduler, "ps", None)
        if ranks is not None and _is_ours(scheduler.server_args):
            scheduler.gpu_id, scheduler.tp_size = ranks.gpu_id, ranks.tp_size

    def initialize(self, original: Callable[..., None], gpu_id: int, config: Any) -> None:
        """Make the groups: the whole device for prompts, each split, the whole one for decode.

        Raises:
            ConfigError: a division or option that cannot be served.
            DeviceError: no green contexts.
            ConfinementError: work left its partition.
        """
        from sglang.srt.multiplex import pdmux_context
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        if not _is_ours(args):
            return original(gpu_id, config)
        info = device_info(gpu_id)
        sides = decode_sides(info, config)
        check_args(args, len(sides) + 2)
        if os.environ.get(LIMIT):
            self._limit_us = 1000 * limit_ms(os.environ[LIMIT])
            places = places_of(sides, info.num_sms)
            self._predictor = Corrected(_predictor(args.get_model_config().hf_config, places))
        with torch.cuda.device(gpu_id):
            self.ladder = ladder(sides, atom=ATOM, backend="green")
            for side in (side for split in self.ladder for side in split):
                side.verify()
            whole = [(torch.cuda.Stream(), torch.cuda.Stream()) for _ in range(2)]
        splits = [self.ladder.split(decode=n) for n in sides]
        pdmux_context.STREAM_GROUPS = [
            whole[0], *((x.prefill.stream, x.decode.stream) for x in splits), whole[1]
        ]  # fmt: skip
        pdmux_context.SM_COUNTS = [
            (info.num_sms, 0), *((x.prefill.num_sms, x.decode.num_sms) for x in splits),
            (0, info.num_sms),
        ]  # fmt: skip
        pdmux_context.set_current_stream_idx(0)
        getLogger(__name__).info("smkern: partitions verified by %%smid, decode has %s SMs", sides)
        return None

    def adjust(self, original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
        """The group for what runs from now on: its index and its streams.

        Prompts on their way go on with a plan for the SMs that they have now.
        """
        if self.ladder is None:
            return original(scheduler, running_batch)
        runner = scheduler.tp_worker.model_runner
        index = self._fewest(scheduler, running_batch)
        if index is None:
            index, group = original(scheduler, running_batch)
        else:
            from sglang.srt.multiplex.pdmux_context import set_current_stream_idx

            set_current_stream_idx(index)
            runner.update_decode_attn_backend(index)
            group = scheduler.stream_groups[index]
        batch = scheduler.split_prefill_batch
        if batch is not None and batch.split_forward_batch is not None:
            with torch.cuda.stream(group[0]):
                runner.attn_backend.init_forward_metadata(batch.split_forward_batch)
        return index, group

    def begin_step(self, scheduler: Any, sm_count: int, running_batch: Any) -> None:
        """Order the streams, which SGLang's loop does not, and learn from the step that ended how
        long steps take here, the host's time included.

        Pages that a decode step freed are given to prompts, and what a prompt's end wrote is read
        by the decode step that it joins.
        """
        if self.ladder is None:
            return
        from sglang.srt.multiplex.pdmux_context import get_current_stream_idx

        prefill, decode = scheduler.stream_groups[get_current_stream_idx()]
        prefill.wait_stream(decode)
        if scheduler.split_prefill_batch is None:
            decode.wait_stream(prefill)
        if self._pair is None or self._predictor is None:
            return
        if scheduler.split_prefill_batch is None or running_batch.is_empty():
            self._pair = None
            return
        step, num_sms, prompts, beside_sms = self._pair
        now = perf_counter()
        self._predictor.observe(step, num_sms, 1e6 * (now - self._since), prompts, beside_sms)
        self._since = now

    def _fewest(self, scheduler: Any, running_batch: Any) -> int | None:
        """The group with the fewest decode SMs whose worst step keeps the limit, else with most;
        None: SGLang chooses."""
        self._pair, prompts = None, scheduler.split_prefill_batch
        if self._predictor is None or prompts is None or running_batch.is_empty():
            return None
        layers = scheduler.model_config.num_hidden_layers
        keys = int(running_batch.seq_lens_cpu.sum())
        step = Size((), layers, layers, False, running_batch.batch_size(), keys)
        chunks = tuple(map(Chunk, prompts.extend_lens, prompts.prefix_lens))
        beside = Size(chunks, layers, layers)
        splits = sorted(range(1, len(scheduler.sm_counts) - 1), key=lambda i: _sides(scheduler, i))
        for index in splits:
            decode, prefill = _sides(scheduler, index)
            if self._predictor.worst_us(step, decode, beside, prefill) <= self._limit_us:
                break
        self._pair, self._since = (step, decode, beside, prefill), perf_counter()
        return index


def _is_ours(args: Any) -> bool:
    """Whether prompts and decode steps both have smkern's attention."""
    return {*args.get_attention_backends()} == {NAME}


def _sides(scheduler: Any, index: int) -> tuple[int, int]:
    """SMs of a group, decode's first."""
    prefill, decode = scheduler.sm_counts[index]
    return decode, prefill


def decode_sides(info: DeviceInfo, config: Any) -> list[int]:
    """SMs of each split's decode side, prompts have the rest.

    Args:
        info: The device.
        config: SGLang's `PDMuxConfig`: `manual_divisions` as [prefill, decode, least batch], whose
            decode sides are rounded to what the device has, else `sm_group_num`.

    Raises:
        ConfigError: a division that the device cannot have, or none for a batch of 1.
    """
    rungs = plan_ladder(info, atom=ATOM).rungs
    if not config.manual_divisions:
        usual = [n for n in rungs if LEAST <= n <= info.num_sms // 2] or list(rungs)
        count = min(config.sm_group_num - 2, len(usual))
        return [usual[i * (len(usual) - 1) // max(count - 1, 1)] for i in range(count)]
    for prefill, decode, _ in config.manual_divisions:
        if min(prefill, decode) < 1 or prefill + decode > info.num_sms:
            raise ConfigError(
                f"manual_divisions has [{prefill}, {decode}] SMs for prompts and decode: this "
                f"{info.name} has {info.num_sms}, give each side one or more and both together "
                "no more than that"
            )
    least = min(batch for *_, batch in config.manual_divisions)
    if least > 1:
        raise ConfigError(
            f"manual_divisions begin with decode batches of {least}, so a batch of 1 has none: "
            "let one begin with 1"
        )
    return [min(rungs, key=lambda n: abs(n - decode)) for _, decode, _ in config.manual_divisions]


def check_args(args: Any, groups: int) -> None:
    """Raise ConfigError for options of SGLang that its multiplexing cannot have on partitions."""
    if args.tp_size > 1 or args.enable_dp_attention:
        raise ConfigError(
            f"--enable-pdmux on smkern's partitions serves one GPU, not --tp-size {args.tp_size} "
            "or --enable-dp-attention: leave these out, or take another --attention-backend"
        )
    if args.sm_group_num < groups:
        raise ConfigError(
            f"--sm-group-num {args.sm_group_num}: there are {groups} stream groups, each with an "
            f"attention backend: start with --sm-group-num {groups}"
        )


def limit_ms(text: str) -> float:
    """The limit in the environment, ms; ConfigError where it is none."""
    try:
        return as_float(LIMIT, float(text), positive=True)
    except (ValueError, ArgumentError):
        raise ConfigError(f"{LIMIT}={text!r}: give milliseconds above 0, or unset it") from None


def _predictor(hf_config: Any, sms: list[int]) -> Any:
    try:
        return predictor_for(ModelConfig.from_hf(hf_config), sms=sms)
    except (ConfigError, ProfileError) as reason:
        raise ConfigError(
            f"{LIMIT} is set, and no step times are known of this model on this GPU ({reason}): "
            "unset it, and SGLang chooses by the decode batch's size"
        ) from reason
