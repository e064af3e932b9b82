"""The least time of a forward pass, against sums made by hand."""

from __future__ import annotations

import pytest

from smkern.bench.model.floor import Forward, beside_floor_us, floor_us
from smkern.latency.cost import kernels_of, total_bytes, total_flops
from smkern.models import Quantization
from smkern.models.presets import preset
from smkern.profile import load_profile

L2 = 60 << 20
QWEN = preset("qwen3-8b")
LAYER = (6144 + 4096 + 3 * 12288) * 4096  # weights: qkv, o, gate, up and down
HEAD = 151936 * 4096
KV = 2 * 8 * 128  # elements a token and layer


def decode(batch: int, config=QWEN):
    return kernels_of(config, Forward(batch, 1, 2048).load, l2_bytes=L2)


def test_a_decode_step_reads_its_weights_and_keys_once():
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    by_hand = 2 * (36 * LAYER + HEAD + norms + 36 * 64 * 2048 * KV)
    assert total_bytes(decode(64)) == by_hand
    assert by_hand == pytest.approx(34.4e9, rel=3e-3)


def test_a_decode_step_s_arithmetic():
    products = 2 * 64 * (36 * LAYER + HEAD)
    attention = 36 * 4 * 32 * 128 * 64 * 2048
    assert total_flops(decode(64)) == products + attention


@pytest.mark.parametrize(
    ("num_sms", "tbps", "ms"), [(48, 4.5, 7.7), (32, 4.33, 8.2), (24, 3.96, 9.9), (16, 3.21, 13.5)]
)
def test_floors_of_64_requests(num_sms, tbps, ms):
    assert floor_us(decode(64), tbps, num_sms) / 1e3 == pytest.approx(ms, abs=0.05)


def test_the_floor_is_summed_kernel_by_kernel():
    """On 16 SMs products are bound by arithmetic, attention by bandwidth; no single bound."""
    kernels = decode(64)
    products = (2 * 64 * (36 * LAYER + HEAD)) / (8.1 * 16) / 1e6
    attention = 36 * 2 * 64 * 2048 * KV / 3.21 / 1e6
    assert floor_us(kernels, 3.21, 16) == pytest.approx(products + attention, rel=1e-3)
    one_bound = max(total_bytes(kernels) / 3.21, total_flops(kernels) / (8.1 * 16)) / 1e6
    assert floor_us(kernels, 3.21, 16) > 1.2 * one_bound


def test_beside_a_prompt_bandwidth_is_a_readers_and_arithmetic_slows_with_the_clock():
    profile, kernels = load_profile("h200"), decode(64)
    tbps = profile.bandwidth(24, beside=True)
    assert tbps < profile.bandwidth(24)
    assert beside_floor_us(kernels, profile, 24) == floor_us(kernels, tbps, 24)
    slow = beside_floor_us(kernels, profile, 24, profile.info.sm_clock_mhz / 2)
    assert slow == floor_us(kernels, tbps, 12)


def test_linear_layers_in_fp8():
    """A byte a weight and twice the FLOPs; head, norms and the cache stay."""
    config = QWEN.replace(quantization=Quantization("fp8-block"))
    plain, small = decode(64), decode(64, config)
    assert total_bytes(plain) - total_bytes(small) == 36 * LAYER
    assert total_bytes(small) / total_bytes(plain) == pytest.approx(0.80, abs=0.005)
    assert total_flops(small) == total_flops(plain)
    saved = floor_us(plain, 3.21, 16) - floor_us(small, 3.21, 16)
    assert saved == pytest.approx(64 * 36 * LAYER / (8.1 * 16) / 1e6, rel=1e-3)


def test_a_cache_in_fp8():
    config = QWEN.replace(quantization=Quantization("fp8-block"))
    load = Forward(64, 1, 2048).load
    small = kernels_of(config, load, l2_bytes=L2, cache_bytes=1)
    assert total_bytes(decode(64, config)) - total_bytes(small) == 36 * 64 * 2048 * KV
    assert total_bytes(small) / total_bytes(decode(64)) == pytest.approx(0.52, abs=0.005)


def test_experts_in_fp8():
    config = preset("qwen3-30b-a3b")
    small = config.replace(quantization=Quantization("fp8-block"))
    plain = {k.name: k.bytes_moved for k in decode(64, config)}
    for kernel in decode(64, small):
        halved = kernel.name in ("qkv", "o", "gate_up", "down")
        assert kernel.bytes_moved == plain[kernel.name] // (2 if halved else 1)


def test_activations_count_where_they_exceed_the_l2():
    inside = kernels_of(QWEN, Forward(1, 512, 512).load, l2_bytes=L2)
    outside = kernels_of(QWEN, Forward(1, 8192, 8192).load, l2_bytes=L2)
    norm = next(kernel for kernel in inside if kernel.name == "input_norm")
    assert norm.bytes_moved == 2 * 4096
    norm = next(kernel for kernel in outside if kernel.name == "input_norm")
    assert norm.bytes_moved == 2 * (4096 + 2 * 8192 * 4096)


def test_prefill_counts_visible_pairs_and_one_token_s_logits():
    prompt = kernels_of(QWEN, Forward(2, 512, 2048).load, l2_bytes=L2)
    kernels = {k.name: k for k in prompt}
    assert Forward(2, 512, 2048).pairs == 2 * sum(1536 + i + 1 for i in range(512))
    assert kernels["attention"].flops == 4 * 4096 * Forward(2, 512, 2048).pairs
    assert kernels["head"].flops == 2 * 2 * HEAD
    assert kernels["qkv"].flops == 2 * 1024 * 6144 * 4096
    downs = [(k.count, k.product) for k in prompt if k.name == "down"]
    assert downs == [
        (35, (1024, 4096, 12288, "residual")), (1, (2, 4096, 12288, "residual")),
    ]  # fmt: skip


def test_names_and_counts():
    assert [(k.name, k.count) for k in decode(1)] == [
        ("input_norm", 36), ("qkv", 36), ("append", 36), ("attention", 36), ("o", 36),
        ("post_norm", 36), ("gate_up", 36), ("down", 36), ("final_norm", 1), ("head", 1),
        ("sample", 1),
    ]  # fmt: skip


def test_experts_are_read_where_some_token_chose_them():
    config = preset("qwen3-30b-a3b")
    one = {kernel.name: kernel for kernel in decode(1, config)}
    expert = 2 * 768 * 2048
    assert one["gate_up"].bytes_moved == 2 * 8 * expert
    assert one["gate_up"].flops == 2 * 8 * expert
    many = {kernel.name: kernel for kernel in decode(512, config)}
    assert many["gate_up"].bytes_moved == pytest.approx(2 * 128 * expert, rel=1e-6)
    assert one["router"].flops == 2 * 128 * 2048
    assert "permute" in one
