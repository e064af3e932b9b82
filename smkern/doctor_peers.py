"""`smkern doctor`: whose memory among other GPUs of the host one reaches, and by which links."""

from __future__ import annotations

from smkern.device import nvml_of
from smkern.doctor_device import Status

MAX_LINKS = 18
"""NVLinks of a Hopper GPU; later ones have as many."""


def peers(index: int | None) -> tuple[Status, str]:
    """The GPUs whose memory one reaches, its links, and NCCL: what a model over several needs.

    Args:
        index: GPU index; the current GPU by default.
    """
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    if count < 2:
        return "note", "no other GPU that torch sees: models over several (LLM(tp=)) need them"
    here = torch.cuda.current_device() if index is None else index
    others = [other for other in range(count) if other != here]
    reached = [other for other in others if torch.cuda.can_device_access_peer(here, other)]
    links = _links(here)
    nccl = "NCCL is there" if dist.is_nccl_available() else "torch has no NCCL"
    text = f"{len(reached)} of {len(others)} other GPUs by peer access, {links}; {nccl}"
    if len(reached) < len(others) or not dist.is_nccl_available():
        return "note", f"{text}: LLM(tp=) needs NCCL, and is slow without peer access"
    return "ok", text


def _links(index: int) -> str:
    """How many NVLinks of a GPU are up, as NVML says."""
    try:
        nvml, handle = nvml_of(index)
        up = 0
        for link in range(MAX_LINKS):
            try:
                up += int(nvml.device_get_nvlink_state(handle, link)) == 1
            except Exception:  # noqa: BLE001  no such link
                break
    except Exception:  # noqa: BLE001  of whatever NVML is here
        return "links not known"
    return f"{up} NVLinks up"
