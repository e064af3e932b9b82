"""The ranks of one `LLM`: who they are, what they agree on, and who of them schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import finalize

import torch

from smkern.device import torch_device
from smkern.errors import ArgumentError, RankError
from smkern.kv import KvPool, KvReplica, KvSizes
from smkern.kv.storage import pages_in_free_memory
from smkern.models.decoder import Decoder
from smkern.models.fused_sums import fuse_sums
from smkern.models.shard import MAX_RANKS, WHOLE, Shard
from smkern.models.tensor_parallel import TensorParallel
from smkern.ops.checks import as_int
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.ranks.channel import Link, Links, open_links
from smkern.runtime.ranks.follower import follow
from smkern.runtime.ranks.leader import RankExecutor

Result = TypeVar("Result")


class RankGroup:
    """The processes that share a model, or this one alone.

    Args:
        size: GPUs that share the model: torchrun's `--nproc-per-node`; 1: this process alone.
        device: Where the model is to be. None: the GPU where there is one.

    Attributes:
        tp: The ranks; None: this process alone.

    Raises:
        ArgumentError: no torchrun, or one of another number of processes.
        RankError: ranks that do not come, no NCCL, or too few GPUs.
    """

    def __init__(self, size: int, device: torch.device | str | None) -> None:
        self.tp: TensorParallel | None = None
        self._links: Links | Link | None = None
        if as_int("tp", size, 1, MAX_RANKS) > 1:
            self.tp = TensorParallel.from_env(size, torch_device(device).type)

    @property
    def rank(self) -> int:
        return 0 if self.tp is None else self.tp.rank

    @property
    def shard(self) -> Shard:
        return WHOLE if self.tp is None else self.tp.shard

    def together(self, what: str, run: Callable[[], Result]) -> Result:
        """As `TensorParallel.together`."""
        return run() if self.tp is None else self.tp.together(what, run)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """As `TensorParallel.agree`."""
        if self.tp is not None:
            self.tp.agree(facts)

    def fuse(self, decoder: Decoder) -> None:
        """Let sums be one kernel's, where GPUs reach each other's memory."""
        if self.tp is not None and decoder.device.type == "cuda":
            fuse_sums(decoder)

    def pool(
        self, sizes: KvSizes, *, num_pages: int | None, memory_fraction: float,
        reserved_bytes: int, device: torch.device, reuse: bool,
    ) -> KvPool:  # fmt: skip
        """Pages of all ranks: as many as each of them has memory for."""
        if self.tp is not None and num_pages is None:
            found = self.together(
                "looking for free memory",
                lambda: pages_in_free_memory(sizes, device, memory_fraction, reserved_bytes),
            )
            num_pages = min(self.tp.everyones(found))
        return self.together(
            "taking memory for pages",
            lambda: (KvReplica if self.rank else KvPool)(
                sizes, num_pages=num_pages, memory_fraction=memory_fraction,
                reserved_bytes=reserved_bytes, device=device, reuse=reuse,
            ),
        )  # fmt: skip

    def executor(self, executor: ModelExecutor) -> ModelExecutor | RankExecutor:
        """What the scheduler drives; on other ranks than 0 their own, for `follow`.

        Raises:
            RankError: graphs that only some ranks had memory for; or ranks that have ended.
        """
        if self.tp is None:
            return executor
        self.agree({"the decode graphs": sorted(executor.graphs.by_graph)})
        if self._links is None:
            self._links = open_links(self.tp)
            if isinstance(self._links, Links):  # the others go when this process ends
                finalize(self, self._links.close)
        return executor if isinstance(self._links, Link) else RankExecutor(executor, self._links)

    def check_leads(self) -> None:
        """Raise where requests cannot be submitted.

        Raises:
            ArgumentError: on another rank than 0.
            RankError: the ranks have ended.
        """
        if self.rank:
            raise ArgumentError(
                f"rank {self.rank}: requests are rank 0's; call follow() on the others, which "
                "serves them until rank 0 closes"
            )
        if isinstance(self._links, Links) and self._links.is_dead:
            self._links.check()

    def follow(self, executor: ModelExecutor | RankExecutor) -> None:
        """Carry out what rank 0 launches, until it closes.

        Raises:
            ArgumentError: on rank 0.
            RankError: a rank is gone, hangs or failed; it is named.
        """
        if not isinstance(self._links, Link) or not isinstance(executor, ModelExecutor):
            raise ArgumentError("follow() on rank 0: it leads; call generate() or stream() there")
        try:
            follow(executor, self._links)
        except RankError:
            if self.tp is not None:
                self.tp.close(abort=True)
            raise
