"""The sampler's CTAs stay on their SMs: seen by %smid, by mask and by grid, eagerly and replayed.

A line is put into a copy of `csrc/`: every CTA adds one to the count of its SM, behind the counters
that the rows have. The rest is the ordinary path over fresh kernels.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter

import pytest
import torch

import smkern
from smkern.kernels import cuda_source
from smkern.kernels.sample import SampleKernels
from smkern.ops.sample.call import Sample, numbers_of, problem_of
from smkern.ops.sample.operators import SAMPLE
from smkern.tuning.sample import Budget, SampleConfig, workspace_bytes
from tests.gpu.attention.support import at_most
from tests.gpu.gemm_support import Holder, finishes
from tests.ops.sample_cases import logits_of, options_of

TRACE_AT = 32_768
"""Byte of the counters' room where the counts begin; few rows have counters before it."""
TRACE_WORDS = 1024
LINE = """
  if (threadIdx.x == 0) {
    unsigned trace_sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(trace_sm));
    atomicAdd((int*)((char*)p.counters + 32768) + trace_sm, 1);
  }
"""
CONFIGS = pytest.mark.parametrize(
    "config", [SampleConfig(4, 8), SampleConfig(16, 2), SampleConfig(32, 1)], ids=str
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The sampler's kernels, noting their SMs."""
    folder = tmp_path_factory.mktemp("traced") / "csrc"
    shutil.copytree(cuda_source.source_folder(), folder)
    path = folder / "sample.cu"
    text, count = re.subn(
        r"(\bsample\([^{;]*\bp\b[^{;]*\)\s*\{)",
        lambda match: match[1] + LINE,
        path.read_text(),
    )
    assert count == 1, f"{count} places that look like the kernel's beginning"
    path.write_text(text)
    major, minor = torch.cuda.get_device_capability()
    made = SampleKernels(10 * major + minor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_source, "source_folder", lambda: folder)
        for call in (Sample(torch.empty(1, 8)), Sample(torch.empty(1, 8, dtype=torch.bfloat16))):
            problem = problem_of(call, True)
            made.prepare(problem, SampleConfig(), Budget(1, "grid"))
    return made


class Traced:
    """A call for a budget, its launches leaving counts of CTAs an SM."""

    def __init__(self, kernels: SampleKernels, config: SampleConfig, budget: Budget) -> None:
        self.logits = logits_of(24, 151_936, torch.bfloat16).cuda()
        self.options = options_of("mixed", 24, "cuda")
        self.want = smkern.sample(self.logits, **self.options)
        self.out = torch.empty_like(self.want)
        self.call = Sample(self.logits, **self.options, out=self.out)
        problem = problem_of(self.call, True)
        self.launcher = kernels.prepare(problem, config, budget)
        size = workspace_bytes(problem)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        self.launcher(
            stream, *SAMPLE.addresses(self.call), self.workspace.data_ptr(), *numbers_of(self.call)
        )

    def wipe(self) -> None:
        self.out.fill_(-7)
        torch.cuda.synchronize()

    def smids(self) -> Counter[int]:
        """CTAs of the launches since the last call, by SM; tokens are checked, notes wiped."""
        torch.cuda.synchronize()
        assert torch.equal(self.out, self.want)
        notes = self.workspace[TRACE_AT:].view(torch.int32)[:TRACE_WORDS]
        counts = notes.tolist()
        notes.zero_()
        torch.cuda.synchronize()
        return Counter({sm: count for sm, count in enumerate(counts) if count})


@CONFIGS
def test_the_mask_confines_every_cta(kernels, ladder, config):
    for decode in (16, 40):
        for partition in ladder.split(decode=decode):
            budget = Budget(partition.num_sms, "mask", partition.clusters)
            run = Traced(kernels, config, budget)
            run.wipe()
            run.launch(partition.raw_stream)
            partition.synchronize()
            seen = run.smids()
            assert set(seen) <= set(partition.smids)
            assert len(seen) >= 8


@CONFIGS
def test_the_mask_confines_a_replayed_graph(kernels, ladder, config):
    partition = ladder.split(decode=16).decode
    run = Traced(kernels, config, Budget(16, "mask", partition.clusters))
    with partition.capture() as graph:
        run.launch(torch.cuda.current_stream().cuda_stream)
    for _ in range(3):
        run.wipe()
        partition.launch(graph)
        partition.synchronize()
        assert set(run.smids()) <= set(partition.smids)
    graph.close()


@CONFIGS
@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
def test_the_grid_caps_the_sms(kernels, config, num_sms):
    num_sms = at_most(num_sms)
    run = Traced(kernels, config, Budget(num_sms, "grid"))
    for _ in range(2):
        run.wipe()
        run.launch(torch.cuda.current_stream().cuda_stream)
        assert sum(run.smids().values()) <= num_sms
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.launch(torch.cuda.current_stream().cuda_stream)
    run.wipe()
    graph.replay()
    assert sum(run.smids().values()) <= num_sms


def test_a_spinning_neighbour_does_not_hold_it_up(ladder):
    """Every SM outside the partition is taken: what ends can only have run inside."""
    holder, split = Holder(), ladder.split(decode=40)
    logits, options = logits_of(24, 151_936, torch.bfloat16).cuda(), options_of("mixed", 24, "cuda")
    torch.cuda.synchronize()
    with split.decode:
        smkern.sample(logits, **options)
    split.decode.synchronize()
    with holder.hold(split.prefill.stream, split.prefill.num_sms):
        with split.decode:
            smkern.sample(logits, **options)
        assert finishes(split.decode.stream, 2.0), "the sampler waits for SMs outside its partition"
