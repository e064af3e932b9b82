"""The worker of vLLM: what it refuses, on stubs of vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from smkern.errors import ConfigError
from tests.integrations.vllm import stubs


@pytest.fixture(autouse=True)
def worker() -> Iterator[Any]:
    with stubs.stubbed():
        from smkern.integrations.vllm import worker as found

        yield found


def config(**changes: Any) -> SimpleNamespace:
    """vLLM's configuration of one GPU, as the worker serves it."""
    values: dict[str, Any] = {
        "additional_config": {"smkern_decode_sms": 48},
        "parallel_config": SimpleNamespace(world_size=1, data_parallel_size=1),
        "use_v2_model_runner": True,
        "speculative_config": None,
        "lora_config": None,
        "model_config": SimpleNamespace(enforce_eager=False),
    }
    return SimpleNamespace(**values | changes)


def test_what_is_served_is_taken_as_it_is(worker: Any) -> None:
    assert worker.check_config(config()) == 48
    assert worker.Worker(config()).vllm_config.use_v2_model_runner


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"additional_config": {}}, "smkern_decode_sms=None"),
        ({"additional_config": {"smkern_decode_sms": "48"}}, "smkern_decode_sms='48'"),
        ({"use_v2_model_runner": False}, "VLLM_USE_V2_MODEL_RUNNER=1"),
        ({"parallel_config": SimpleNamespace(world_size=2, data_parallel_size=1)}, "several GPUs"),
        ({"parallel_config": SimpleNamespace(world_size=1, data_parallel_size=2)}, "several GPUs"),
        ({"speculative_config": object()}, "leave speculative_config out"),
        ({"lora_config": object()}, "leave enable_lora out"),
        ({"model_config": SimpleNamespace(enforce_eager=True)}, "enforce_eager"),
    ],
)
def test_options_that_are_not_served_are_refused_by_name(
    worker: Any, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        worker.Worker(config(**changes))


def test_layers_of_another_backend_are_refused(worker: Any) -> None:
    made = worker.Worker(config())
    group = SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"),
        get_metadata_builder=lambda index: object(),
    )
    made.model_runner = SimpleNamespace(attn_groups=[[group]])
    with pytest.raises(ConfigError, match=r"layers of FLASH_ATTN .* attention_backend=CUSTOM"):
        made.compile_or_warm_up_model()
