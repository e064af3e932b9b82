"""A model cut over the GPUs of a host: who the ranks are, and how their sums are made."""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smkern import ops
from smkern.errors import ArgumentError, RankError
from smkern.limits import as_float, shown
from smkern.models.shard import Shard

TIMEOUT_S = 60.0
"""How long a rank waits for the others, unless told otherwise."""
Result = TypeVar("Result")


class Collective(Protocol):
    """Sums over the ranks, for one lane: its calls come in the same order on all of them.

    What has a default here is for those that derive from this: a kernel may do it in one.
    """

    def all_reduce(self, x: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place, on the current stream."""
        ...

    def pieces(self, num_rows: int, num_sms: int | None = None) -> Sequence[slice]:
        """Rows of a layer that are to be computed by themselves: one's sum may be on its way beside
        the next one's products. Empty: all at once."""
        return ()

    def send(self, x: Tensor) -> None:
        """Rows that are computed, and will be added by the next call that has not had its own; `x`
        is not written before."""
        return

    def add(self, x: Tensor, residual: Tensor, *, num_sms: int | None = None) -> None:
        """residual += the sum of x [tokens, hidden]; x is lost."""
        self.all_reduce(x)
        residual.add_(x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, num_sms: int | None = None
    ) -> None:
        """residual += the sum of x [tokens, hidden], and its norm into x."""
        self.all_reduce(x)
        ops.add_rms_norm(x, residual, weight, eps=eps, out=x, num_sms=num_sms)

    def gather(self, x: Tensor, columns: range, *, num_sms: int | None = None) -> None:
        """Give all ranks the columns of each: in x [rows, all columns] this one's are there.

        One rank has each number, so by default they are summed with zeros, which is exact.
        """
        x[:, : columns.start].zero_()
        x[:, columns.stop :].zero_()
        self.all_reduce(x)


class GroupCollective(Collective):
    """Sums by a process group of torch: NCCL on GPUs, gloo on CPUs.

    Attributes:
        group: The ranks; a lane has one of its own, so that lanes do not wait for each other.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)


class TensorParallel:
    """This process among the ranks that share a model, one process a GPU.

    A forward of every rank computes its part of each layer, and sums it over the ranks twice a
    layer; all ranks have all logits. Decode steps and prompts have sums of their own, so that
    neither lane waits for the other; all ranks must launch the same forwards in the same order.

    Args:
        rank: This process's part, from 0.
        size: How many parts.
        group: torch's process group of the ranks. None: the default one.
        prefill: Another one of the same ranks, for the prefill lane. None: `group`.
        control: A group over CPU tensors, for agreements at start. None: nothing is compared.
        timeout_s: How long a rank waits for the others.

    Attributes:
        shard: Which part of the model is this rank's.
        decode: Sums of decode steps (a token per request); may be replaced before any forward.
        prefill: Sums of forwards with prompts; likewise.
        control, timeout_s: As given.

    Raises:
        ArgumentError: a rank that is not below the size.

    Example:
        >>> tp = TensorParallel.from_env(2)                                    # doctest: +SKIP
        >>> weights = Weights.load(folder, device="cuda", shard=tp.shard)      # doctest: +SKIP
        >>> decoder = Decoder(config, weights, tp=tp)                          # doctest: +SKIP
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Any = None,
        *,
        prefill: Any = None,
        control: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.shard = Shard(rank, size)
        self.decode: Collective = GroupCollective(group)
        self.prefill: Collective = GroupCollective(group if prefill is None else prefill)
        self.control = control
        self.timeout_s = timeout_s

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def size(self) -> int:
        return self.shard.size

    @classmethod
    def from_env(
        cls, size: int, device: torch.device | str = "cuda", *, timeout_s: float = TIMEOUT_S
    ) -> TensorParallel:
        """This process as torchrun started it; waits for the others.

        NCCL_CGA_CLUSTER_SIZE is set to 0 for GPUs unless it is set: with clusters NCCL cannot run
        in a partition.

        Args:
            size: How many ranks share the model: torchrun's `--nproc-per-node`.
            device: "cuda" (NCCL) or "cpu" (gloo).
            timeout_s: How long a rank waits for the others, here and in a sum.

        Raises:
            ArgumentError: no torchrun, or one of another number of processes.
            RankError: no NCCL or too few GPUs, a port that is taken, or ranks that do not come.
        """
        shard, kind = _shard_from_env(size), torch.device(device).type
        limit = timedelta(seconds=as_float("timeout_s", timeout_s))
        problem = _open(kind, shard, limit)
        control = _named(
            "making the control group", lambda: dist.new_group(backend="gloo", timeout=limit)
        )
        _raise_together(control, shard, "opening the GPU", problem)
        lanes = [
            _named("making a lane's group", lambda: dist.new_group(timeout=limit)) for _ in range(2)
        ]
        tp = cls(shard.rank, size, lanes[0], prefill=lanes[1], control=control, timeout_s=timeout_s)
        tp.together("a first sum", lambda: tp._try(kind))
        return tp

    def together(self, what: str, run: Callable[[], Result]) -> Result:
        """Run something on every rank; where it raises on one, it raises on all.

        Args:
            what: What it is, for errors.
            run: Does not call the other ranks, unless none can raise before.

        Raises:
            Exception: what `run` raised here.
            RankError: it raised on another rank, which is named.
        """
        found: list[Result] = []
        problem: Exception | None = None
        try:
            found.append(run())
        except Exception as error:  # noqa: BLE001  raised below, when all have heard of it
            problem = error
        if self.control is not None:
            _raise_together(self.control, self.shard, what, problem)
        elif problem is not None:
            raise problem
        return found[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare what must be the same on all ranks.

        Args:
            facts: Values by name; compared by their `repr`.

        Raises:
            RankError: on every rank, naming what differs and who has which.
        """
        if self.control is None:
            return
        everyone = _gathered(self.control, self.size, {k: repr(v) for k, v in facts.items()})
        for name in facts:
            said = [found.get(name) for found in everyone]
            for rank, value in enumerate(said):
                if value != said[0]:
                    raise RankError(
                        f"{name} is {_short(value)} on rank {rank} and {_short(said[0])} on rank "
                        "0: start all ranks with the same options, files and versions"
                    )

    def agree_on_host(self, device: torch.device) -> None:
        """Compare versions and GPUs; each rank needs a GPU of its own, of the same kind.

        Raises:
            RankError: on every rank, naming what differs.
        """
        self.agree(
            {"Python": platform.python_version(), "torch": torch.__version__, "device": device.type}
        )
        if self.control is None or device.type != "cuda":
            return
        properties = torch.cuda.get_device_properties(device)
        self.agree({"host": socket.gethostname(), "GPU": properties.name})
        uuids = _gathered(self.control, self.size, str(getattr(properties, "uuid", device)))
        for rank, uuid in enumerate(uuids):
            if uuids.index(uuid) != rank:
                raise RankError(
                    f"ranks {uuids.index(uuid)} and {rank} are on one GPU ({uuid}): give each "
                    "process a GPU of its own, by LOCAL_RANK"
                )

    def everyones(self, value: Result) -> list[Result]:
        """The values of all ranks, by rank; without a control group one's own alone."""
        return [value] if self.control is None else _gathered(self.control, self.size, value)

    def close(self, *, abort: bool = False) -> None:
        """Leave the process groups.

        Args:
            abort: A rank is gone: sums of theirs will never end. Neither this nor the end of the
                process waits for them; what `atexit` was given before is not called then.
        """
        if not dist.is_initialized():
            return
        if not abort:
            with suppress(Exception):
                dist.destroy_process_group()
            return
        # NCCL's own abort waits for kernels that wait for the rank that is gone.
        threading.Thread(target=_abort, name="abort", daemon=True).start()
        if dist.is_nccl_available() and torch.cuda.is_initialized():
            with suppress(RuntimeError):  # the process is ending
                atexit.register(_leave)

    def _try(self, kind: str) -> None:
        """Sum over both lanes once: a communicator is made by its first sum, not in a forward."""
        x = torch.ones(8, device=kind)
        for lane in (self.decode, self.prefill):
            x.fill_(1.0)
            lane.all_reduce(x)
            if x.tolist() != [float(self.size)] * 8:
                raise RankError(
                    f"a sum of ones over {self.size} ranks is {x.tolist()[0]:g}: look at the links "
                    "between the GPUs with nvidia-smi topo -m"
                )


def _abort() -> None:
    with suppress(Exception):
        dist.distributed_c10d._abort_process_group()


def _leave() -> None:
    """End this process without waiting for its GPU, as torch would."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)


def _shard_from_env(size: int) -> Shard:
    """This rank as torchrun says.

    Raises:
        ArgumentError: it says nothing, or another number of ranks.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    lacking = [name for name in names if not os.environ.get(name)]
    if lacking:
        raise ArgumentError(
            f"tp={shown(size)} without {lacking} in the environment: start the program with "
            f"torchrun --nproc-per-node {shown(size)}"
        )
    world = os.environ["WORLD_SIZE"]
    if world != str(size):
        raise ArgumentError(
            f"tp={shown(size)} in a run of {world} processes: start it with torchrun "
            f"--nproc-per-node {shown(size)}, or pass tp={world}"
        )
    return Shard(int(os.environ["RANK"]), int(world))


def _open(kind: str, shard: Shard, limit: timedelta) -> Exception | None:
    """Join the processes, and take this one's GPU; what stands in its way, to be told to all.

    Raises:
        RankError: the others cannot be reached.
    """
    problem: Exception | None = None
    if kind == "cuda":
        # NCCL launches clusters of 4 CTAs by default, which partitions of spread 2-SM atoms have
        # no room for: error 912 on an H200. It reads this when a communicator is made.
        os.environ.setdefault("NCCL_CGA_CLUSTER_SIZE", "0")
        index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if not dist.is_nccl_available():
            problem = RankError(
                f"torch {torch.__version__} is built without NCCL: install torch for CUDA"
            )
        elif index >= count:
            problem = RankError(
                f"LOCAL_RANK={index} and {count} GPUs here: start as many processes as there are "
                "GPUs"
            )
        else:
            torch.cuda.set_device(index)
    backend = "gloo" if problem is not None or kind != "cuda" else "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        _named(
            f"joining {shard.size} processes at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}",
            lambda: dist.init_process_group(
                backend, rank=shard.rank, world_size=shard.size, timeout=limit
            ),
        )
    return problem


def _named(what: str, run: Callable[[], Result]) -> Result:
    """What a call of torch.distributed returns; RankError for what it raises."""
    try:
        return run()
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"{what} failed ({str(error).splitlines()[0]}): look whether all ranks run, and take "
            "another MASTER_PORT where this one is taken"
        ) from error


def _gathered(control: Any, size: int, value: Result) -> list[Result]:
    """Everybody's value, by rank."""
    found: list[Any] = [None] * size
    _named("comparing the ranks", lambda: dist.all_gather_object(found, value, group=control))
    return found


def _raise_together(control: Any, shard: Shard, what: str, problem: Exception | None) -> None:
    """Raise on all ranks what was raised on one: as it is there, by name elsewhere."""
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    everyone = _gathered(control, shard.size, text)
    if problem is not None:
        raise problem
    for rank, said in enumerate(everyone):
        if said is not None:
            raise RankError(f"rank {rank} failed at {what} ({said}): see what it says")


def _short(value: str | None) -> str:
    text = "not there" if value is None else value
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-90:]}"
