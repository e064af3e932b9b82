"""The cells of one model on one GPU, and the order in which they are measured.

A cell can win what its launches take of a step, times what tuning usually gains there, times how
often a server has that split: so what was measured when the time is up is what counts the most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smkern.autotune import append, attention, fp8, gemm, moe, sample
from smkern.autotune.attention_cases import Heads, case_of
from smkern.autotune.family import MeasuredFamily
from smkern.autotune.gemm import GemmCase
from smkern.autotune.moe import Experts, MoeCase, Op
from smkern.autotune.pipeline import Job
from smkern.autotune.places import Sides
from smkern.errors import ConfigError
from smkern.latency.cost import ATTENTION, Kernel, Load, kernels_of, visible_pairs
from smkern.measure.append import AppendCase
from smkern.measure.options import parse_epilogue
from smkern.measure.partitions import Place
from smkern.models.config import ModelConfig
from smkern.models.presets import presets
from smkern.policies.chunk_size import QUANTUM
from smkern.profile import Profile
from smkern.tuning.config import GemmProblem

Cases = Mapping[str, tuple[str, object]]
"""Name of a kernel to its table and case."""
Step = tuple[Sequence[Kernel], Cases]
"""A forward's kernels, and which of them are measured for it."""

DECODE_ROWS = (1, 8, 16, 32, 64, 128, 256)
PREFILL_ROWS = (512, 1024, 2048, 4096, 8192)
MIXED_ROWS = tuple(
    rows
    for rows in (*range(3 * QUANTUM, 1024, QUANTUM), *range(1152, 2048, 2 * QUANTUM))
    if rows not in (*DECODE_ROWS, *PREFILL_ROWS)
)
"""A chunk of a prompt and the decode rows, one forward on the whole device: multiples of what
policies grow chunks by, as many as a limit leaves room for."""
SIZES: Mapping[str, tuple[int, ...]] = {
    "gemm": (*DECODE_ROWS, *PREFILL_ROWS, *MIXED_ROWS),
    "gemm_fp8": (*DECODE_ROWS, *PREFILL_ROWS, *MIXED_ROWS),
    "append": (1, 8, 64, 512, 4096),
    "sample": (1, 8, 32, 64, 128),
    "moe": (1, 8, 32, 128, 512, 2048, 8192),
    "grouped_gemm": (*DECODE_ROWS, 512, 2048, 8192),
}
"""Rows at which a table's operators are measured. A GEMM's cell serves its own number of row tiles,
the others' two octaves around (`smkern.tuning.bucket_table.NEAR`)."""
CONTEXT = 2048
"""Keys of a decode row where the operator does not depend on them."""
DECODE_STEPS = tuple((n, length) for length in (1024, 4096, 32_768) for n in (1, 8, 64))[:-1]
"""(batch, keys) at which attention is measured; the last one would take 17 GB of keys."""
PROMPTS = (512, 2048, 8192)
"""The `PREFILL_ROWS` at which attention is measured."""

GAIN: Mapping[str, float] = {
    "gemm": 0.10, "gemm_fp8": 0.05, "grouped_gemm": 0.15, "attention": 0.05, "append": 0.10,
    "sample": 0.10, "moe": 0.10,
}  # fmt: skip
"""Share of an operator's time that tuning usually saves: rough, it only orders the work."""
COMMON, LESS_COMMON = (16, 32, 48), 64
"""Decode SMs of the splits that servers run the most; up to 64 they do now and then."""
LAUNCH_US = 2.0
"""Fixed cost of a launch."""


def model_config(name: str) -> ModelConfig:
    """The model of a folder with a config.json, or a preset.

    Raises:
        ConfigError: neither, an architecture that is not served, or another dtype than bf16.
    """
    known = presets()
    if Path(name).exists():
        config = ModelConfig.from_hf(name)
    elif name.lower() in known:
        config = known[name.lower()]
    else:
        raise ConfigError(
            f"--model {name!r} is no folder, and no preset: there is {', '.join(sorted(known))}; "
            "give one of these, or a folder with a Hugging Face config.json"
        )
    if config.dtype.itemsize != 2 or "bfloat" not in str(config.dtype):
        raise ConfigError(
            f"--model {name!r} has {config.dtype}: models are tuned in torch.bfloat16; set dtype "
            "in its config.json if you serve it so"
        )
    return config


def of_rank(config: ModelConfig, tp: int) -> ModelConfig:
    """The model of one of `tp` tensor-parallel ranks: heads, widths and vocabulary are shared out.

    With fewer KV heads than ranks each has one of them, as other ranks have too.

    Raises:
        ConfigError: a size that cannot be dealt.
    """
    inner = config.intermediate_size if config.moe is None else config.moe.intermediate_size
    sizes = {"num_q_heads": config.num_q_heads, "vocab_size": config.vocab_size}
    sizes["intermediate_size"] = inner
    for name, size in sizes.items():
        if tp < 1 or size % tp:
            raise ConfigError(f"{name}={size} for --tp {tp}: give a --tp that divides it")
    heads = config.num_kv_heads
    if heads % tp and tp % heads:
        raise ConfigError(
            f"num_kv_heads={heads} for --tp {tp}: give a divisor or a multiple of it, so that "
            "every rank has as many"
        )
    mixture = config.moe and replace(config.moe, intermediate_size=inner // tp)
    return config.replace(
        num_q_heads=config.num_q_heads // tp,
        num_kv_heads=max(1, heads // tp),
        vocab_size=config.vocab_size // tp,
        intermediate_size=0 if mixture else inner // tp,
        moe=mixture,
    )


def families(most: int) -> dict[str, MeasuredFamily]:
    """All tables by name, `most` candidates a cell."""
    found = (
        gemm.FAMILY, fp8.FAMILY, append.FAMILY, attention.FAMILY, sample.FAMILY, moe.MOE,
        moe.GROUPED,
    )  # fmt: skip
    return {family.name: replace(family, most=most) for family in found}


@dataclass(frozen=True, slots=True)
class ModelCells:
    """The cells of a model.

    Args:
        config: One rank's model.
        vocab_size: The whole model's, which the sampler sees.
        profile: The device.
        families: Families by name.
    """

    config: ModelConfig
    vocab_size: int
    profile: Profile
    families: Mapping[str, MeasuredFamily]

    def jobs(self, sides: Sides) -> list[Job]:
        """All cells on these places where there is a choice, what can win the most first."""
        wins: dict[tuple[str, object, Place], float] = {}
        total = self.profile.info.num_sms
        forwards: tuple[tuple[bool, Iterator[Step], Sequence[Place]], ...] = (
            (True, self._decode_steps(), (*sides.decode, sides.whole)),
            (False, self._prompts(PREFILL_ROWS), (*sides.prefill, sides.whole)),
            (False, self._prompts(MIXED_ROWS), (sides.whole,)),
        )
        for decode, made, places in forwards:
            steps = list(made)
            for place in places:
                often = common(place.budget.num_sms, total, decode=decode)
                for kernels, cases in steps:
                    times = [self._us(kernel, place) for kernel in kernels]
                    for kernel, us in zip(kernels, times, strict=True):
                        if (found := cases.get(kernel.name)) is not None:
                            win = often * GAIN[found[0]] * us / sum(times)
                            wins[*found, place] = wins.get((*found, place), 0.0) + win
        order = sorted(wins, key=lambda key: -wins[key])
        jobs = [Job(self.families[name], case, place) for name, case, place in order]
        return [job for job in jobs if len(job.wanted(self.profile)) > 1]

    def _decode_steps(self) -> Iterator[Step]:
        for batch in DECODE_ROWS:
            kernels = self._kernels(Load(batch, batch, batch * CONTEXT, batch * CONTEXT))
            yield kernels, self._cases(kernels, batch)
        for batch, length in DECODE_STEPS:
            if length <= self.config.max_position:
                load = Load(batch, batch, batch * length, batch * length)
                yield self._kernels(load), self._attention(batch, 1, length)

    def _prompts(self, rows: Sequence[int]) -> Iterator[Step]:
        """Without the head: a prompt's logits are of one row, as a decode step's."""
        for tokens in rows:
            if tokens <= self.config.max_position:
                kernels = self._kernels(Load(tokens, 0, tokens, visible_pairs(tokens, tokens)))
                yield kernels, self._cases(kernels, tokens)
                if tokens in PROMPTS:
                    yield kernels, self._attention(1, tokens, tokens)

    def _kernels(self, load: Load) -> Sequence[Kernel]:
        return kernels_of(self.config, load, l2_bytes=self.profile.info.l2_bytes)

    def _us(self, kernel: Kernel, place: Place) -> float:
        """Time of all launches of a kernel in a step at the place's ceilings, us."""
        sms = place.budget.num_sms
        moving = kernel.bytes_moved / self.profile.bandwidth(sms) / 1e6
        computing = kernel.flops / self.profile.flops(sms) / 1e6
        return kernel.count * (LAUNCH_US + max(moving, computing))

    def _attention(self, batch: int, q_len: int, length: int) -> Cases:
        heads = Heads(self.config.num_q_heads, self.config.num_kv_heads, self.config.head_dim)
        return {ATTENTION: ("attention", case_of(heads, batch, q_len, length))}

    def _cases(self, kernels: Sequence[Kernel], size: int) -> Cases:
        """Cases over so many rows of the kernels whose table is measured at that size."""
        found = {kernel.name: self._case(kernel, size) for kernel in kernels}
        return {x: case for x, case in found.items() if case and size in SIZES[case[0]]}

    def _case(self, kernel: Kernel, size: int) -> tuple[str, object] | None:
        """The table and the case of a kernel over so many rows; None: no table, or attention's."""
        c, name = self.config, kernel.name
        if (product := kernel.product) is not None:
            m, n, k, epilogue = product
            if c.quantization is not None and kernel.flop_rate > 1:
                return "gemm_fp8", fp8.case_of(m, n, k, c.quantization.kind)
            added = "bias" if name == "qkv" and c.qkv_bias else epilogue
            return "gemm", GemmCase(GemmProblem(m, n, k, "bf16", parse_epilogue(added)))
        if name == "append":
            turned = 0 if c.rope.rotary_dim == c.head_dim else c.rope.rotary_dim
            return "append", AppendCase(
                "norm-rope" if c.qk_norm else "rope", size, c.num_q_heads, c.num_kv_heads,
                c.head_dim, rotary_dim=turned,
            )  # fmt: skip
        if name == "sample":
            return "sample", sample.SampleCase(size, self.vocab_size)
        if c.moe is None or name not in _OF_EXPERTS:
            return None
        experts = Experts(c.hidden_size, c.moe.intermediate_size, c.moe.num_experts, c.moe.top_k)
        table, op = _OF_EXPERTS[name]
        if c.quantization is not None and table == "grouped_gemm":
            return None  # e4m3's has two tiles, chosen by the rows
        return table, MoeCase(op, experts, size)


_OF_EXPERTS: Mapping[str, tuple[str, Op]] = {
    "route": ("moe", "topk_softmax"),
    "permute": ("moe", "moe_permute"),
    "unpermute": ("moe", "moe_unpermute"),
    "gate_up": ("grouped_gemm", "gate_up"),
    "down": ("grouped_gemm", "down"),
}
"""A kernel's name in the forward to its table and operator there."""


def common(num_sms: int, total: int, *, decode: bool) -> float:
    """How often a server has a partition, next to those that it has the most."""
    beside = num_sms if decode else total - num_sms
    if num_sms == total or beside in COMMON:
        return 1.0
    return 0.3 if beside <= LESS_COMMON else 0.1
