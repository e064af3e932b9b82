"""`smkern serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import errno
import multiprocessing
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smkern import errors
from smkern.errors import ArgumentError, EngineDeadError, SmkernError
from smkern.garbage import seldom_collected
from smkern.limits import as_int
from smkern.measure.options import IntList, Positive
from smkern.server import RUNGS

if TYPE_CHECKING:
    from smkern.latency.work import Size

LOCAL = "127.0.0.1"
STOP_S = 30.0
"""How long the engine may take to give everything back."""
NEEDED = ("prometheus_client", "pydantic", "starlette", "uvicorn")


@click.command("serve")
@click.option(
    "--model", required=True,
    help="A folder with config.json and weights, or a preset's name with random weights.",
)  # fmt: skip
@click.option("--name", default=None, help="What clients call it. Default: the folder's name.")
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path),
              default=None, help="Default: the model's folder.")  # fmt: skip
@click.option("--policy", default="adaptive", show_default=True,
              help="As smkern replay has it: chunked:512, static_split:32, adaptive.")  # fmt: skip
@click.option("--tbt-ms", type=Positive(), default=50.0, show_default=True,
              help="Limit of the time between two tokens, for the policy.")  # fmt: skip
@click.option("--order", type=click.Choice(["fcfs", "deadline", "shortest", "slack"]),
              default="slack", show_default=True, help="Which request goes first.")  # fmt: skip
@click.option("--table", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              default=None, help="A latency table of your own.")  # fmt: skip
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default=None,
              help="Default: the GPU where there is one.")  # fmt: skip
@click.option("--rungs", type=IntList(), default=None,
              help="Decode's SMs, of each split. Default: what the GPU has of "
              f"{','.join(map(str, RUNGS))}.")  # fmt: skip
@click.option("--max-running", type=click.IntRange(1), default=128, show_default=True,
              help="Requests that decode at a time.")  # fmt: skip
@click.option("--max-context", type=click.IntRange(1), default=None,
              help="Tokens of a request. Default: the model's.")  # fmt: skip
@click.option("--num-pages", type=click.IntRange(1), default=None,
              help="Pages of 16 tokens. Default: as many as fit.")  # fmt: skip
@click.option("--memory-fraction", type=click.FloatRange(0, 1, min_open=True), default=0.9,
              show_default=True, help="Of the free memory, for pages.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
              default="auto", show_default=True,
              help="Convert weights to it. auto: config.json's.")  # fmt: skip
@click.option("--quantization", type=click.Choice(["fp8-block", "fp8-channel", "fp8-tensor"]),
              default=None, help="Quantize a bf16 model's linear layers. Default: as they are.",
              )  # fmt: skip
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto",
              show_default=True, help="auto: the model's dtype.")  # fmt: skip
@click.option("--batch-invariant", is_flag=True,
              help="Tokens depend on their request alone, not on what runs beside it.")  # fmt: skip
@click.option("--warm/--no-warm", default=True, show_default=True,
              help="Compile all kernels first: minutes where no cache has them.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True,
              help="Of random weights, and of requests without one.")  # fmt: skip
@click.option("--host", default=LOCAL, show_default=True,
              help="Anything else lets other machines in: give --api-key, too.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--api-key", envvar="SMKERN_API_KEY", default=None,
              help="Wanted of clients on /v1. Better in the variable SMKERN_API_KEY.")  # fmt: skip
@click.option("--max-body-mib", type=click.IntRange(1, 1024), default=8, show_default=True,
              help="Limit of a request's body.")  # fmt: skip
@click.option("--max-choices", type=click.IntRange(1), default=2048, show_default=True,
              help="Limit of choices that wait or run; then 503.")  # fmt: skip
@click.option("--grace-s", type=click.IntRange(0), default=30, show_default=True,
              help="After SIGTERM, so long may responses take to end.")  # fmt: skip
def command(
    model: str, name: str | None, tokenizer: Path | None, host: str, port: int,
    api_key: str | None, max_body_mib: int, max_choices: int, grace_s: int, **engine: Any,
) -> None:  # fmt: skip
    """Serve a model to OpenAI's clients: completions, chats, streams; prefill beside decode."""
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise ArgumentError(
            f"smkern serve needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'smkern[serve]'"
        )
    from smkern.models.tokenizer import end_tokens, has_tokenizer, load_tokenizer
    from smkern.server.app import Limits, Server
    from smkern.server.client import EngineClient

    if api_key == "":
        raise ArgumentError("the API key is empty: give one, or leave it out")
    folder = tokenizer or Path(model)
    found = load_tokenizer(folder) if has_tokenizer(folder) else None
    if tokenizer is not None and found is None:
        raise ArgumentError(f"--tokenizer {tokenizer} holds no tokenizer's files")
    name = Path(model).name if name is None else name
    limits = Limits(api_key, max_body_mib << 20, max_choices)
    options = {"model": model, **engine}
    check_engine(options)
    options["end_tokens"] = end_tokens(found)
    with bound(host, port) as place:  # a port that is taken is said before minutes of loading
        click.echo(f"loading {model}", err=True)
        with engine_process(options) as (connection, ready):
            client = EngineClient(connection)
            server = Server(client, ready, name, found, limits)
            where = f"[{host}]" if ":" in host else host
            click.echo(f"serving {name} at http://{where}:{place.getsockname()[1]}/v1", err=True)
            run_server(server.app, client, place, grace_s)
            if client.failure is not None:
                raise EngineDeadError(f"{client.failure.kind}: {client.failure.message}")


def check_engine(options: dict[str, Any]) -> None:
    """Refuse at once what the engine would refuse after it has loaded; needs no torch.

    Args:
        options: Of `EngineOptions`.

    Raises:
        SmkernError: no such model, policy or table, or a limit that it does not take.
    """
    from smkern.latency import TablePredictor
    from smkern.models.presets import find_model
    from smkern.replay.named import policy_named

    config, _ = find_model(options["model"])
    if options["max_context"] is not None:
        as_int("--max-context", options["max_context"], 1, config.max_position)
    if options["table"] is not None:
        TablePredictor.read(options["table"])
    policy_named(
        options["policy"], Unpriced(), tbt_slo_ms=options["tbt_ms"], order=options["order"]
    )


class Unpriced:
    """Stands for a predictor where a policy is made only to see whether it can be."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        raise NotImplementedError

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        raise NotImplementedError


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet: who connects is refused.

    Raises:
        ArgumentError: the address is taken, or none of this machine's.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        remedy = "give another port, or 0 for any that is free"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = f"give an address of this machine, {LOCAL} or 0.0.0.0 for example"
        raise ArgumentError(
            f"--host {host} --port {port} cannot be bound ({error.strerror or error}): {remedy}"
        ) from None
    return made


def run_server(app: Any, client: Any, place: socket.socket, grace_s: int) -> None:
    """Serve until a signal, or until the engine is gone; responses that run are finished first."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_s,
        lifespan="on", server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    client.on_failure = stop
    # uvicorn stops by them, and then raises them again
    with (
        handled(signal.SIGINT, signal.SIG_IGN), handled(signal.SIGTERM, signal.SIG_IGN),
        seldom_collected(),
    ):  # fmt: skip
        server.run(sockets=[place])


@contextmanager
def engine_process(options: dict[str, Any]) -> Iterator[tuple[Connection, Any]]:
    """The engine in a process of its own, ready to serve; it ends with this.

    Args:
        options: Of `EngineOptions`.

    Raises:
        SmkernError: it could not begin.
    """
    from smkern.server.messages import Failed, Ready

    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=begin_engine, args=(theirs, options), name="smkern-engine")
    process.start()
    theirs.close()
    try:
        # by an exception, so that this process leaves no other behind
        with handled(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)):
            try:
                message = ours.recv()
            except EOFError:
                raise EngineDeadError(
                    "the engine's process ended while it loaded: it says above why, or the system "
                    "does where memory was short"
                ) from None
        if isinstance(message, Failed):
            kind = getattr(errors, message.fault.kind, SmkernError)
            raise kind(message.fault.message)
        assert isinstance(message, Ready)
        yield ours, message
        process.join(STOP_S)
    finally:
        ours.close()
        if process.is_alive():
            process.kill()  # it takes no other signal
        process.join()


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """A signal is handled so meanwhile, and as before behind it."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def begin_engine(connection: Connection, options: dict[str, Any]) -> None:
    """The body of the engine's process."""
    from smkern.server.engine import run_engine

    run_engine(connection, partial(_open, options))


def _open(options: dict[str, Any]) -> Any:
    from smkern.device import has_gpu
    from smkern.server.model import EngineOptions, open_runtime

    if options["device"] is None and not has_gpu():  # asked here: the server does without torch
        click.echo(
            f"torch sees no GPU: {options['model']} runs in plain torch on CPU tensors; with "
            "billions of parameters loading alone takes minutes",
            err=True,
        )
    return open_runtime(EngineOptions(**options), partial(click.echo, err=True))
