"""smkern's attention as a backend of SGLang; imported when SGLang is told to use it."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import sglang
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

import smkern
from smkern.errors import ConfigError
from smkern.integrations.plans import Heads, Step, rounded_length
from smkern.limits import HEAD_DIMS

PAGES = (16, 32, 64, 128, 256)

if not hasattr(AttentionBackend, "init_forward_metadata_out_graph"):
    raise ConfigError(
        f"SGLang {sglang.__version__}: smkern's backend is written for 0.5.17 and later; install "
        "one of those, or leave --attention-backend smkern out"
    )


class SmkernBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of all layers: keys and values are written and read by SGLang's own pages.

    Steps that only decode run in CUDA graphs: a graph keeps the addresses of its plans, so those
    of a batch size are made anew in place before each replay. Prompts run outside graphs. Under
    SGLang's multiplexing there is one for prompts, whose plans last for as many decode steps as
    their layers, and one for the decode steps of each stream group.

    Args:
        runner: SGLang's model runner, its model loaded and its pools made.

    Raises:
        ConfigError: an option or a layer that is not served, with what avoids it.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        layers = [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]
        check_runner(runner)
        for layer in layers:
            check_layer(layer)
        self._page_size = int(runner.page_size)
        self._context = int(runner.model_config.context_len)
        self._cache = runner.token_to_kv_pool
        # of each request the slot of each page's first token
        self._slots = runner.req_to_token_pool.req_to_token[:, :: self._page_size]
        self._heads = tuple(dict.fromkeys(heads_of(layer) for layer in layers))
        self.forward_metadata: Step | None = None
        self._graphs: dict[int, Step] = {}
        self._tables: Tensor | None = None
        if self._slots.is_cuda:
            self._warm(runner, layers)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A step outside graphs: its plans are its own."""
        batch = forward_batch
        if batch.forward_mode.is_idle():
            return
        longest = rounded_length(int(batch.seq_lens_cpu.max()), self._context)
        table = self._pages(batch.req_pool_indices, longest)
        cu_q_lens, tokens, most = None, int(batch.batch_size), 1
        if not batch.forward_mode.is_decode():
            cu_q_lens = torch.zeros(tokens + 1, dtype=torch.int32, device=table.device)
            torch.cumsum(batch.extend_seq_lens, 0, out=cu_q_lens[1:])
            tokens, most = sum(batch.extend_seq_lens_cpu), max(batch.extend_seq_lens_cpu)
        step = Step(tokens, table, batch.seq_lens.int(), cu_q_lens, most, {}, longest)
        step.plan(self._heads, self._page_size)
        self.forward_metadata = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Room for what graphs read."""
        pages = -(-self._context // self._page_size)
        made = {"dtype": torch.int32, "device": self._slots.device}
        self._tables = torch.zeros(max_bs, pages, **made)
        self._lens = torch.ones(max_bs, **made)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Where a graph of decode rows is captured or about to be replayed.

        Raises:
            ConfigError: prompts are captured.
        """
        batch = forward_batch
        if not batch.forward_mode.is_decode_or_idle():
            if in_capture:
                raise ConfigError(
                    "smkern's attention runs prompts outside CUDA graphs: start SGLang with "
                    "--disable-prefill-cuda-graph"
                )
            self.init_forward_metadata(batch)
            return
        rows = int(batch.batch_size)
        assert self._tables is not None
        table, lens = self._tables[:rows], self._lens[:rows]
        lens.copy_(batch.seq_lens[:rows])
        table.copy_(self._pages(batch.req_pool_indices[:rows], self._context))
        step = Step(rows, table, lens, None, 1, {}, self._context)
        # a size may be captured more than once: all its graphs read the first one's plans
        kept = self._graphs.setdefault(rows, step) if in_capture else self._graphs[rows]
        step.plan(self._heads, self._page_size, kept.plans or None)
        self.forward_metadata = step

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a row that is padding: its page is one that no request has."""
        return 1

    def forward_decode(self, *given: Any, **named: Any) -> Tensor:
        """See `forward_extend`."""
        return self.forward_extend(*given, **named)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Write the new keys and values, then attend.

        Args:
            q: [rows, q_heads * head_dim]; rows behind the step's tokens are padding.
            k: [rows, kv_heads, head_dim]; None where another layer has written them.
            v: As k.
            layer: Which one, and its options.
            forward_batch: The step; its metadata is what was made of it.
            save_kv_cache: Whether k and v are written.
            sinks: [q_heads] logits of keys that have no value.
            others: Not served, unless None.

        Returns:
            [rows, q_heads * head_dim].
        """
        asked = [name for name, value in others.items() if value is not None]
        _refuse(bool(asked), f"{', '.join(asked)} of an attention call", "--attention-backend fa3")
        step = self.forward_metadata
        assert isinstance(step, Step)
        heads, tokens = heads_of(layer), step.num_tokens
        k_cache, v_cache = (
            buffer.view(-1, self._page_size, heads.num_kv_heads, heads.head_dim)
            for buffer in self._cache.get_kv_buffer(layer.layer_id)
        )
        if save_kv_cache and k is not None and v is not None:
            smkern.append_kv(
                k[:tokens], v[:tokens], k_cache, v_cache, step.page_table, step.kv_lens,
                cu_q_lens=step.cu_q_lens,
            )  # fmt: skip
        rows = q.view(-1, heads.num_q_heads, heads.head_dim)
        out = torch.empty_like(rows)
        smkern.paged_attention(
            rows[:tokens], k_cache, v_cache, step.page_table, step.kv_lens,
            cu_q_lens=step.cu_q_lens, max_q_len=step.max_q_len, scale=float(layer.scaling),
            window=heads.window, softcap=layer.logit_cap or None,
            sinks=None if sinks is None else sinks.float(), plan=step.plans[heads],
            out=out[:tokens],
        )  # fmt: skip
        return out.view(-1, heads.num_q_heads * heads.head_dim)

    def _pages(self, requests: Tensor, longest: int) -> Tensor:
        """[requests, pages] int32 of pages that hold so many tokens."""
        slots = self._slots[:, : -(-longest // self._page_size)]
        return slots.index_select(0, requests).floor_divide_(self._page_size)

    def _warm(self, runner: Any, layers: list[Any]) -> None:
        """Compile and load all that steps may launch: a capture must find it there."""
        # which layers pass sinks is in their models' code
        has_sinks = any("sink" in x.rpartition(".")[2] for x, _ in runner.model.named_parameters())
        calls: dict[Any, None] = {}
        for layer, sinks in product(layers, (False, True) if has_sinks else (False,)):
            heads = heads_of(layer)
            sizes = (heads.num_kv_heads, heads.head_dim, self._page_size)
            attention = smkern.AttentionCalls(
                heads.num_q_heads, *sizes, max_q_len=self._context, window=heads.window,
                softcap=bool(layer.logit_cap), sinks=sinks, dtype=runner.dtype,
            )  # fmt: skip
            append = smkern.AppendCalls(0, *sizes, dtype=runner.dtype)
            calls |= {attention: None, append: None}
        _warm_up(tuple(calls), sms_of_groups() if runner.server_args.enable_pdmux else None)


@cache
def _warm_up(calls: tuple[Any, ...], sms: tuple[int, ...] | None) -> None:
    """Once for all backends of a process. A scheduler is a daemon, which may have no children."""
    smkern.warmup(calls=calls, budgets=sms, workers=1, progress=False)


def sms_of_groups() -> tuple[int, ...]:
    """The SM counts that SGLang's multiplexing may run on."""
    from sglang.srt.multiplex.pdmux_context import get_sm_counts

    return tuple(sorted({n for sides in get_sm_counts() for n in sides if n}))


def heads_of(layer: Any) -> Heads:
    """SGLang's window counts the keys in front of a token's own."""
    size = layer.sliding_window_size
    window = None if size is None or size < 0 else int(size) + 1
    return Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, window)


def check_runner(runner: Any) -> None:
    """Raise ConfigError for what the backend cannot serve."""
    pool = runner.token_to_kv_pool
    page = runner.page_size
    _refuse(page not in PAGES, f"page_size={page}", f"--page-size {PAGES[0]}")
    _refuse(
        type(pool) is not MHATokenToKVPool or pool.k_buffer[0].dim() != 3,
        f"a cache that is a {type(pool).__name__}",
        "a model with keys and values of each token in every layer, and "
        "--disable-hybrid-swa-memory",
    )
    _refuse(pool.dtype != runner.dtype, f"a cache of {pool.dtype}", "--kv-cache-dtype auto")
    _refuse(not runner.spec_algorithm.is_none(), "speculative decoding", "no draft model")
    _refuse(get_parallel().attn_dcp_size > 1, "decode context parallelism", "--dcp-size 1")
    _refuse(
        runner.server_args.enable_pdmux and not hasattr(runner.model, "forward_split_prefill"),
        f"--enable-pdmux with {type(runner.model).__name__}, which runs no prompts by layers",
        "no multiplexing",
    )


def check_layer(layer: Any) -> None:
    """Raise ConfigError for a layer whose attention is another."""
    what = f"layer {layer.layer_id}"
    instead = "another --attention-backend"
    _refuse(layer.head_dim not in HEAD_DIMS, f"{what}: head_dim={layer.head_dim}", instead)
    _refuse(layer.v_head_dim != layer.head_dim, f"{what}: values of another size", instead)
    _refuse(
        layer.is_cross_attention or layer.attn_type != AttentionType.DECODER,
        f"{what}: attn_type={layer.attn_type}", instead,
    )  # fmt: skip
    _refuse(layer.xai_temperature_len > 0, f"{what}: temperatures by length", instead)
    _refuse(layer.logit_capping_method != "tanh" and bool(layer.logit_cap),
            f"{what}: logits capped by {layer.logit_capping_method}", instead)  # fmt: skip


def _refuse(is_asked: bool, what: str, instead: str) -> None:
    if is_asked:
        raise ConfigError(f"{what} is not served by smkern's attention: start with {instead}")
