"""A trace under every policy: a table, a picture, and who won.

Short chats beside long documents, drawn by chance. With a GPU some layers of Qwen3-8B serve them,
with random weights; without one all of Qwen3-8B on a simulated H200.
`python examples/policies.py [folder]`.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

import smkern
from smkern.errors import DeviceError
from smkern.policies import POLICIES
from smkern.replay import Comparison, Sizes

MODEL = "qwen3-8b"
LAYERS = 8
"""Layers of the model on a GPU: weights are drawn, and graphs captured, in seconds."""
TRACE = "sharegpt-like+arxiv-like"
REQUESTS = 150
TBT_MS = 20.0
RUNGS = (16, 32, 48, 64)
SIZES = Sizes(
    kv_tokens=192_000, rungs=RUNGS, max_running=64, max_prefill=8, max_tokens=4096,
    max_context=18_000,
)  # fmt: skip
POLICY = {name: name for name in POLICIES} | {
    "static_split": "static_split:32",
    "chunked": "chunked:margin=0.08",
    "temporal": "temporal:margin=0.08",
    "muxwise": "muxwise:margin=0.08",
    "bullet": "bullet:margin=0.2",
    "drift": "drift:margin=0.3",
    "duetserve": "duetserve:margin=0.4",
}
"""What is compared: all of them, each under the name of its class of policies, with the margin that
most goodputs were best with; `adaptive` learns its own."""


def on_gpu() -> AbstractContextManager[Any]:
    """Some layers of the model on the GPU that is here, all that they launch compiled."""
    from smkern.bench.replay.gpu import open_server

    return open_server(MODEL, sizes=SIZES, layers=LAYERS)


def show(console: Console, out: Path, gpu: str | None, *, requests: int = REQUESTS) -> Comparison:
    """Replay the trace under every policy; print the table and who won, draw the picture.

    Args:
        console: Where to print.
        out: A folder for the picture.
        gpu: The GPU's name; None: simulate.
        requests: Requests of the trace.
    """
    with nullcontext() if gpu is None else on_gpu() as server:
        layers = 36 if server is None else server.num_layers
        result = smkern.compare(
            POLICY, TRACE, model=MODEL, tbt_ms=TBT_MS * layers / 36, requests=requests,
            server=server, on_served=lambda name: console.print(f"[dim]{name}[/] ", end=""),
        )  # fmt: skip
    console.print()
    console.print(str(result), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Picture: {result.plot(out / 'policies.png')}")
    return result


def main(out: Path) -> None:
    """Serve on the GPU, or simulate where there is none."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        gpu = smkern.device_info().name
    except DeviceError:
        gpu = None
    show(Console(), out, gpu)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
