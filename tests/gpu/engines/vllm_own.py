"""A plug-in of pytest: vLLM's own test of attention backends with smkern's in their place.

What smkern refuses by name is skipped with its reason; `VLLM_OWN_OUT` gets how many did what.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smkern.errors import ConfigError
from smkern.integrations.vllm import register

_counts: Counter[str] = Counter()
_failed: list[str] = []


def pytest_configure() -> None:
    from tests.v1.attention import test_attention_backends as theirs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    ours = AttentionBackendEnum.CUSTOM
    for name in ("BACKENDS_TO_TEST", "SLIDING_WINDOW_BACKENDS_TO_TEST"):
        getattr(theirs, name)[:] = [ours]
    theirs.NON_CAUSAL_BACKENDS_TO_TEST[:] = [ours]
    run, check = theirs.run_attention_backend, theirs._test_backend_correctness

    def with_a_layer(backend: Any, spec: Any, names: Any, config: Any, *more: Any, **given: Any):
        """The builder looks for its layers where an engine has them, which the test does not."""
        model, parallel = config.model_config, config.parallel_config
        head_size = model.get_head_size()
        try:
            impl = backend.get_class().get_impl_cls()(
                num_heads=model.get_num_attention_heads(parallel),
                head_size=head_size, scale=head_size**-0.5,
                num_kv_heads=model.get_num_kv_heads(parallel),
                sliding_window=given.get("sliding_window"),
                attn_type=given.get("attn_type", "decoder"),
            )  # fmt: skip
            layers = config.compilation_config.static_forward_context
            layers |= {name: SimpleNamespace(impl=impl) for name in names}
            return run(backend, spec, names, config, *more, **given)
        except ConfigError as refused:
            pytest.skip(f"refused: {refused}")

    def only_ours(batch: Any, model: str, backends: list[Any], *more: Any, **given: Any) -> None:
        if ours in backends:
            check(batch, model, backends, *more, **given)

    theirs.run_attention_backend = with_a_layer
    theirs._test_backend_correctness = only_ours


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.skipped or (report.failed and report.when == "setup"):
        name = report.nodeid.split("::")[1]
        reason = f": {report.longrepr[2]}" if report.skipped else ""
        _counts[f"{name.split('[')[0]} {report.outcome}{reason}"] += 1
        if report.failed:
            _failed.append(f"{name}: {str(report.longrepr)[-600:]}")


def pytest_sessionfinish() -> None:
    found = {"counts": dict(sorted(_counts.items())), "failed": _failed}
    Path(os.environ["VLLM_OWN_OUT"]).write_text(json.dumps(found))
