"""A model, a device and a few timings whose predictions can be computed by hand."""

from __future__ import annotations

from smkern.device import DeviceInfo
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import Timing
from smkern.profile import Profile

LAYERS = 4

SIZES = ModelSizes(
    num_layers=LAYERS,
    hidden_size=1024,
    intermediate_size=4096,
    q_size=1024,
    kv_size=256,
    qkv_size=1536,
    head_dim=128,
    vocab_size=32_000,
)

PROFILE = Profile(
    DeviceInfo("small", 100, (9, 0), 2, 2, 50 << 20, 1000, 1 << 30),
    {
        "bandwidth_tbps_spread_alone": ((20, 1.0), (100, 2.0)),
        "flops_tflops_spread_alone": ((1, 4.0), (100, 400.0)),
    },
)

TIMINGS = {
    Timing("decode", 20, batch=1, context=1024): 150.0,
    Timing("decode", 20, batch=64, context=1024): 400.0,
    Timing("decode", 20, batch=64, context=1024, beside_sms=80, beside_tokens=2048): 600.0,
    Timing("decode", 100, batch=1, context=1024): 100.0,
    Timing("decode", 100, batch=64, context=1024): 200.0,
    Timing("prefill", 80, prompts=1, tokens=2048): 3000.0,
    Timing(
        "prefill", 80, prompts=1, tokens=2048, beside_sms=20, beside_batch=64, beside_context=1024
    ): 3600.0,
    Timing("prefill", 100, prompts=1, tokens=64): 180.0,
    Timing("prefill", 100, prompts=1, tokens=2048): 2600.0,
}
