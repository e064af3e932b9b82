"""vLLM in this process, its scheduler's steps logged, its token budget set from step to step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from platformdirs import user_cache_path

from smkern.bench.engines.cases import EngineLoad
from smkern.bench.engines.steps import Step, Steps
from smkern.bench.power import power_meter
from smkern.bench.runtime.workload import frozen
from smkern.integrations.vllm import register
from smkern.models import ModelConfig, preset

NO_BUDGET = 8192
"""Tokens of a step where none is set: several prompts at once."""
SETTLE = 8
"""Steps that do not count, after the rows have begun and after prompts have come beside them."""
CACHE_BYTES = 26 << 30
"""Room for 64 rows of 2,200 tokens of an 8B model, and for two prompts."""
CAPTURED = (1, 2, 4, 8, 16, 32, *range(64, 513, 16))
"""Tokens of the steps that CUDA graphs are captured for: the budgets that are tried among them."""


class VllmEngine:
    """An engine of random weights.

    Args:
        load: What it serves.
        options: What else `vllm.LLM` takes.
    """

    def __init__(self, load: EngineLoad, **options: Any) -> None:
        self.load, self.log = load, list[Step]()
        self._engine = start_vllm(load.model, NO_BUDGET, CACHE_BYTES, **options)
        self._scheduler = scheduler_of(self._engine)
        self._draw, self._numbers = Random(0), count()
        self._vocab = preset(load.model).vocab_size
        self._meter = power_meter(torch.cuda.current_device())
        self._own = [self._text(load.context) for _ in range(load.rows)]
        self._logged(self._scheduler)

    def watch(self, budget: int | None, steps: int) -> Steps:
        """Have all rows decode for so many steps, prompts beside them if there is a budget.

        Args:
            budget: Tokens of a step, rows included; None: no prompts come.
            steps: How many steps count.
        """
        load = self.load
        self._start(load.context - (steps + 2 * SETTLE) // 2)
        if budget is not None:
            self._scheduler.max_num_scheduled_tokens = budget
            per_step = max(budget - load.rows, 1)
            for _ in range(3 + (steps + 2 * SETTLE) * per_step // load.prompt):
                self._add("p", self._text(load.prompt), 1)
        with frozen():
            self._run(SETTLE)
            self.log.clear()
            self._run(steps + 1)
            self._meter()
        found = Steps.of(self.log, load.rows, has_prompt=budget is not None)
        found.sm_mhz, found.watts = self._meter.last
        self._drain()
        return found

    def prefill_rate(self) -> float:
        """Tokens a millisecond of prompts with no row beside them."""
        self._scheduler.max_num_scheduled_tokens = NO_BUDGET
        for _ in range(32):
            self._add("p", self._text(self.load.prompt), 1)
        with frozen():
            self._run(2)
            self.log.clear()
            while self._engine.has_unfinished_requests():
                self._engine.step()
        log = [step for step in self.log if step.prompt_tokens]
        tokens = sum(step.prompt_tokens for step in log[1:])
        return tokens / (1e3 * (log[-1].at_s - log[0].at_s))

    def _run(self, steps: int) -> None:
        seen = len(self.log)
        while len(self.log) < seen + steps and self._engine.has_unfinished_requests():
            self._engine.step()

    def _start(self, context: int) -> None:
        """Have all rows decode, at about so many keys; their prompts are found again."""
        self._scheduler.max_num_scheduled_tokens = NO_BUDGET
        for text in self._own:
            self._add("d", text[:context], NO_BUDGET - context)
        while self._decoding(context) < self.load.rows:
            self._engine.step()
        self._run(SETTLE)

    def _decoding(self, context: int) -> int:
        return sum(x.num_computed_tokens >= context for x in self._scheduler.running)

    def _drain(self) -> None:
        self._scheduler.max_num_scheduled_tokens = NO_BUDGET
        drain(self._engine)

    def _text(self, tokens: int) -> list[int]:
        return self._draw.choices(range(self._vocab), k=tokens)

    def _add(self, kind: str, ids: Sequence[int], new: int) -> None:
        add(self._engine, f"{kind}{next(self._numbers)}", ids, new)

    def _logged(self, scheduler: Any) -> None:
        """Have the scheduler note each step when its tokens have come."""
        update = scheduler.update_from_output

        def noting(output: Any, *rest: Any, **named: Any) -> Any:
            made = update(output, *rest, **named)
            counts = output.num_scheduled_tokens
            rows = sum(n == 1 and key.startswith("d") for key, n in counts.items())
            tokens = sum(n for key, n in counts.items() if key.startswith("p"))
            self.log.append(Step(time.perf_counter(), rows, tokens))
            return made

        scheduler.update_from_output = noting


def start_vllm(model: str, max_context: int, cache_bytes: int, **options: Any) -> Any:
    """vLLM's engine of a preset's sizes, random weights, its core in this process.

    Args:
        model: A preset's name.
        max_context: Tokens of a request.
        cache_bytes: Of keys and values.
        options: What else `vllm.LLM` takes.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is in this process
    from vllm import LLM

    if "attention_backend" in options:
        register()  # where smkern is not installed, no entry point names it
    given: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max_context,
        "max_num_batched_tokens": NO_BUDGET,
        "max_num_seqs": 256,
        "kv_cache_memory_bytes": cache_bytes,
        "gpu_memory_utilization": 0.3,  # what must be free before it starts, no more
        "compilation_config": {"cudagraph_capture_sizes": [*CAPTURED]},
        "seed": 0,
    }
    llm = LLM(str(write_config(preset(model), model)), **given | options)
    llm.apply_model(draw_weights)
    return llm.llm_engine


def scheduler_of(engine: Any) -> Any:
    """The scheduler, whose token budget may be set between two steps."""
    return engine.engine_core.engine_core.scheduler


def add(engine: Any, name: str, ids: Sequence[int], new: int) -> None:
    """Have a prompt served, so many tokens drawn behind it; outputs hold what is new alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    engine.add_request(name, {"prompt_token_ids": list(ids)}, params)


def drain(engine: Any) -> None:
    """Abort all requests, and wait until nothing runs."""
    scheduler = scheduler_of(engine)
    ids = [x.request_id for x in (*scheduler.running, *scheduler.waiting)]
    engine.abort_request(ids, internal=True)
    while engine.has_unfinished_requests():
        engine.step()


def write_config(config: ModelConfig, name: str) -> Path:
    """A folder with a `config.json` that vLLM builds this Qwen3 from.

    It is the same each time: what vLLM has compiled it finds again by the folder's name, and that
    takes it half a minute.
    """
    folder = user_cache_path("smkern") / "engines" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "attention_bias": False,
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
        )
    )
    return folder


def draw_weights(model: torch.nn.Module) -> None:
    """Draw weights as `smkern.models.Weights.random` does: what the GEMMs burn depends on them."""
    draw = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02, generator=draw)
        else:
            parameter.data.fill_(1.0)
