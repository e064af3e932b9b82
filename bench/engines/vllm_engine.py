"""vLLM as it starts, its token budget set between steps; its rows watched beside prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from platformdirs import user_cache_path

from smkern.bench.engines.cases import EngineLoad
from smkern.bench.engines.steps import Step, Steps
from smkern.bench.power import power_meter
from smkern.errors import ConfigError
from smkern.garbage import seldom_collected
from smkern.models import ModelConfig, preset

NO_BUDGET = 8192
"""Tokens of a step where none is set: several prompts at once."""
SETTLE = 8
"""Steps that do not count, after the rows have begun and after prompts have come beside them."""
KV_TOKENS = 152_000
"""Room for 64 rows of 2,200 tokens, and for two prompts."""
CAPTURED = (1, 2, 4, 8, 16, 32, *range(64, 513, 16), *range(544, 1025, 32))
"""Tokens of the steps that CUDA graphs are captured for: the budgets that are tried among them."""


class Vllm:
    """vLLM's engine of a preset's sizes and random weights, its core in a process of its own.

    Args:
        model: A preset's name.
        max_context: Tokens of a request.
        kv_tokens: Size of its cache.
        options: What else `vllm.LLM` takes.
    """

    def __init__(self, model: str, max_context: int, kv_tokens: int, **options: Any) -> None:
        from vllm import LLM

        is_ours = {"attention_backend", "quantization"} & {*options}
        if is_ours and not entry_points(group="vllm.general_plugins", name="smkern"):
            raise ConfigError(
                f"vLLM with {options}: its core finds smkern by its entry point, and there is "
                "none; pip install ."
            )
        config = preset(model)
        given: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": max_context,
            "max_num_batched_tokens": NO_BUDGET,
            "max_num_seqs": 256,
            "kv_cache_memory_bytes": kv_tokens * config.kv_bytes_per_token,
            "gpu_memory_utilization": 0.3,  # what must be free before it starts, no more
            "compilation_config": {"cudagraph_capture_sizes": [*CAPTURED]},
            "worker_extension_cls": "smkern.bench.engines.vllm_core.Extension",
            "seed": 0,
        }
        llm = LLM(str(write_config(config, model)), **given | options)
        llm.collective_rpc("draw_weights")
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core

    @property
    def is_busy(self) -> bool:
        """Whether requests are not through."""
        return bool(self._engine.has_unfinished_requests())

    def add(self, name: str, ids: Sequence[int], new: int) -> None:
        """Have a prompt served, and so many tokens drawn behind it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": list(ids)}, params)

    def step(self) -> list[Any]:
        """Wait for a step's outputs, new tokens alone in each."""
        return list(self._engine.step())

    def set_token_budget(self, tokens: int) -> None:
        """Tokens of a step, decode rows included."""
        self._core.call_utility("set_token_budget", tokens)

    def taken_steps(self) -> list[Step]:
        """Those since the last call; noted from the first on."""
        return [Step(*step) for step in self._core.call_utility("taken_steps")]

    def drain(self) -> None:
        """Abort all requests; what runs ends by itself."""
        ids = [*self._engine.output_processor.request_states]
        self._engine.abort_request(ids, internal=True)

    def forget_prefixes(self) -> None:
        """Empty the cache, once nothing runs."""
        while not self._engine.reset_prefix_cache():
            time.sleep(0.01)


class VllmEngine:
    """Rows that decode on vLLM, and prompts beside them.

    Args:
        load: What it serves.
        options: What else `vllm.LLM` takes.
    """

    def __init__(self, load: EngineLoad, **options: Any) -> None:
        self.load = load
        self._vllm = Vllm(load.model, NO_BUDGET, KV_TOKENS, **options)
        self._draw, self._numbers = Random(0), count()
        self._vocab = preset(load.model).vocab_size
        self._meter = power_meter(torch.cuda.current_device())
        self._own = [self._text(load.context) for _ in range(load.rows)]

    def watch(self, budget: int | None, steps: int) -> Steps:
        """Have all rows decode for so many steps, prompts beside them if there is a budget.

        Args:
            budget: Tokens of a step, rows included; None: no prompts come.
            steps: How many steps count.
        """
        load = self.load
        self._start(load.context - (steps + 2 * SETTLE) // 2)
        if budget is not None:
            self._vllm.set_token_budget(budget)
            per_step = max(budget - load.rows, 1)
            for _ in range(3 + (steps + 2 * SETTLE) * per_step // load.prompt):
                self._add("p", self._text(load.prompt), 1)
        with seldom_collected():
            self._run(SETTLE)
            self._vllm.taken_steps()
            self._run(steps + 1)
            self._meter()
        log = self._vllm.taken_steps()
        found = Steps.of(log, load.rows, has_prompt=budget is not None)
        found.sm_mhz, found.watts = self._meter.last
        self._vllm.drain()
        return found

    def prefill_rate(self) -> float:
        """Tokens a millisecond of prompts with no row beside them."""
        self._vllm.set_token_budget(NO_BUDGET)
        for _ in range(32):
            self._add("p", self._text(self.load.prompt), 1)
        with seldom_collected():
            self._run(2)
            self._vllm.taken_steps()
            while self._vllm.is_busy:
                self._vllm.step()
        log = [step for step in self._vllm.taken_steps() if step.prompt_tokens]
        tokens = sum(step.prompt_tokens for step in log[1:])
        return tokens / (1e3 * (log[-1].at_s - log[0].at_s))

    def _run(self, steps: int) -> None:
        """So many steps that have outputs."""
        while steps and self._vllm.is_busy:
            steps -= bool(self._vllm.step())

    def _start(self, context: int) -> None:
        """Have all rows decode, at about so many keys; their prompts are found again."""
        self._vllm.set_token_budget(NO_BUDGET)
        for text in self._own:
            self._add("d", text[:context], NO_BUDGET - context)
        began = set[str]()
        while len(began) < self.load.rows:
            began |= {found.request_id for found in self._vllm.step()}
        self._run(SETTLE)

    def _text(self, tokens: int) -> list[int]:
        return self._draw.choices(range(self._vocab), k=tokens)

    def _add(self, kind: str, ids: Sequence[int], new: int) -> None:
        self._vllm.add(f"{kind}{next(self._numbers)}", ids, new)


def write_config(config: ModelConfig, name: str) -> Path:
    """A folder with a `config.json` that vLLM builds this Qwen3 from.

    It is the same each time: what vLLM has compiled it finds again by the folder's name, and that
    takes it half a minute.
    """
    folder = user_cache_path("smkern") / "engines" / name
    folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "eos_token_id": [*config.eos_token_ids],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position,
        "num_attention_heads": config.num_q_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }
    if config.moe:
        said |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": config.moe.intermediate_size,
            "norm_topk_prob": config.moe.renormalize,
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.top_k,
        }
    (folder / "config.json").write_text(json.dumps(said))
    return folder
