"""A worker of vLLM 0.26 that runs a step's decode rows beside its prompts, each on SMs of its own.

    vllm serve Qwen/Qwen3-8B --attention-backend CUSTOM --quantization smkern \
        --worker-cls smkern.integrations.vllm.worker.Worker \
        --additional-config '{"smkern_decode_sms": 48}' --max-num-batched-tokens 384

The scheduler's token budget says how many tokens of prompts a step has: the best is as many as
last as long as the decode rows do on theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.v1.worker.gpu_worker import Worker as StockWorker

from smkern.errors import ConfigError
from smkern.integrations.vllm import check_version
from smkern.integrations.vllm.metadata import SmkernMetadataBuilder
from smkern.integrations.vllm.split import SplitForward

check_version(vllm.__version__)

OPTION = "smkern_decode_sms"
"""In vLLM's `additional_config`: SMs of the decode rows while prompts run on the others."""


class Worker(StockWorker):  # type: ignore[misc]
    """vLLM's worker, its model's forward split where a step has both.

    Raises:
        ConfigError: options that are not served, with the one to change.
    """

    def __init__(self, vllm_config: Any, *given: Any, **named: Any) -> None:
        self._decode_sms = check_config(vllm_config)
        super().__init__(vllm_config, *given, **named)

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> Any:
        """As stock, then the graphs of decode rows on their SMs are captured."""
        times = super().compile_or_warm_up_model()
        builders = [
            (group.get_metadata_builder(0), group)
            for groups in self.model_runner.attn_groups
            for group in groups
        ]
        for builder, group in builders:
            if not isinstance(builder, SmkernMetadataBuilder):
                raise ConfigError(
                    f"layers of {group.backend.get_name()} cannot be split: start vLLM with "
                    "attention_backend=CUSTOM, or without this worker_cls"
                )
        self._split = SplitForward(self.model_runner, builders, self._decode_sms)
        self._split.install()
        return times

    def verify_split(self) -> dict[str, int]:
        """SMs of both sides, checked by where CTAs run, and steps that were split.

            llm.collective_rpc("verify_split")

        Raises:
            ConfinementError: work of a side ran outside its SMs.
        """
        return self._split.verify()


def check_config(vllm_config: Any) -> int:
    """SMs of the decode rows.

    Raises:
        ConfigError: options that are not served, with the one to change.
    """
    more = vllm_config.additional_config
    decode_sms = more.get(OPTION) if isinstance(more, dict) else None
    if not isinstance(decode_sms, int):
        raise ConfigError(
            f"{OPTION}={decode_sms!r}: say on how many SMs decode rows run beside prompts, as in "
            f'additional_config={{"{OPTION}": 48}}'
        )
    parallel = vllm_config.parallel_config
    refused = {
        "the V1 model runner (start with VLLM_USE_V2_MODEL_RUNNER=1)": (
            not vllm_config.use_v2_model_runner
        ),
        "several GPUs (start with one)": parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "speculative decoding (leave speculative_config out)": bool(vllm_config.speculative_config),
        "LoRA (leave enable_lora out)": bool(vllm_config.lora_config),
        "enforce_eager (leave it out)": bool(vllm_config.model_config.enforce_eager),
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"smkern's worker does not serve {what}, or leave worker_cls out")
    return decode_sms
