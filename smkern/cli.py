"""The command `smkern`. A subcommand's module is imported only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import copy
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile

import click

from smkern import __version__
from smkern.errors import SmkernError

COMMANDS = {
    "doctor": ("smkern.doctor", "What works on this machine, by trying it."),
    "demo": ("smkern.examples.demo", "A tour, with or without a GPU."),
    "serve": ("smkern.server.command", "Serve a model over HTTP, by OpenAI's API."),
    "replay": (
        "smkern.bench.replay.command",
        "Compare policies on a trace of requests, simulated or on the GPU: latency, goodput.",
    ),
    "timeline": (
        "smkern.runtime.timeline.command",
        "Draw a saved timeline of the runtime as a picture and as a page.",
    ),
    "autotune": ("smkern.autotune.main", "Tune kernels for this GPU; write tables."),
    "build": (
        "smkern.measure.build_command",
        "Compile CUTLASS's kernels ahead of time, for this machine or to carry away.",
    ),
    "profile": (
        "smkern.measure.profile_command",
        "Time a model's steps, alone and beside each other: what policies predict by.",
    ),
}
SUITES = {
    "gemm": ("smkern.bench.gemm", "TFLOP/s over SM budget, against cuBLAS in the same partition."),
    "cutlass": ("smkern.bench.cutlass", "GEMMs in CUTLASS's DSL over SM budget, against ours."),
    "fp8": ("smkern.bench.fp8", "GEMMs of e4m3 over SM budget, against bf16 and torch's."),
    "untuned": ("smkern.bench.untuned", "The cost model alone, on shapes that nobody tuned."),
    "attention": (
        "smkern.bench.attention.suite",
        "Paged attention over SM budget, against FlashInfer and SDPA in the same partition.",
    ),
    "layouts": (
        "smkern.bench.attention.layouts",
        "Decode attention of heads that nobody tuned, against FlashInfer.",
    ),
    "ops": (
        "smkern.bench.ops.suite",
        "A layer's other operators over SM budget, against torch and FlashInfer.",
    ),
    "model": (
        "smkern.bench.model.suite",
        "Decode steps and prefill of whole models over SM budget, against their floors.",
    ),
    "ranks": (
        "smkern.bench.ranks.suite",
        "A model over several GPUs, under torchrun: sums, forwards, serving.",
    ),
    "runtime": (
        "smkern.bench.runtime.suite",
        "Decode beside prefill against chunked prefill, and what the runtime costs.",
    ),
    "replay": ("smkern.bench.replay.grid", "Goodput of every policy on real traces, simulated."),
    "replay-confirm": (
        "smkern.bench.replay.confirm",
        "Simulated goodputs served on the GPU, a little below and above.",
    ),
    "replay-ablations": (
        "smkern.bench.replay.ablations",
        "Goodput where one thing is left out or otherwise, simulated.",
    ),
    "server": (
        "smkern.bench.server",
        "Tokens of streams over HTTP, against the same runtime in its own process.",
    ),
    "engines": ("smkern.bench.engines.suite", "Under TBT limits, against stock vLLM."),
    "power": ("smkern.bench.prompt_power", "What prompts' products draw, and decode beside them."),
    "ceilings": ("smkern.bench.ceilings", "Bandwidth and FLOP rate over SMs: the device profile."),
    "partitions": ("smkern.bench.partitions", "Cost of a ladder, and which SMs read fastest."),
    "cliffs": ("smkern.bench.cliffs", "Every even budget: more SMs are never slower."),
    "batch-invariant": (
        "smkern.bench.batch_invariant",
        "What bit-equal rows cost, over M and SM budgets.",
    ),
    "host": ("smkern.bench.host_cost", "Microseconds of host time an eager call costs."),
    "latency-table": (
        "smkern.bench.latency_table",
        "Make the predictor's tables of profiles that were measured.",
    ),
    "latency-errors": (
        "smkern.bench.latency_errors",
        "How far each latency model is from launches that it was not fitted to.",
    ),
    "plot": ("smkern.bench.plots", "Draw the pictures of committed results."),
    "merge": ("smkern.bench.results", "Join results files of one suite."),
    "readme": ("smkern.bench.readme", "Fill the tables of README.md and bench/results/README.md."),
}
"""Name to (module, help). The module's `command` is the subcommand."""


WRITTEN = {"--out", "--raw", "--plots"}
"""Options that name what a command writes, often after hours of measuring."""


def writable(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """The path of an option, refused before the work is done where it cannot be written."""
    if path is None:
        return None
    if path.is_dir() and not getattr(option.type, "dir_okay", True):
        raise click.BadParameter(f"{path} is a folder: name a file in it", context, option)
    try:
        if path.is_file():
            path.open("ab").close()
        place = path.absolute().parent if path.is_file() else path.absolute()
        while not place.exists():
            place = place.parent
        TemporaryFile(dir=place).close()
    except OSError as error:
        raise click.BadParameter(
            f"{path} cannot be written ({error.strerror}): give a path in a folder of your own",
            context,
            option,
        ) from error
    return path


def _checked(option: click.Parameter) -> click.Parameter:
    if not WRITTEN.intersection(option.opts) or option.callback is not None:
        return option
    option = copy(option)
    option.callback = writable
    return option


class LazyGroup(click.Group):
    """Subcommands in modules not yet imported: `--help` loads neither torch nor Triton."""

    def __init__(self, name: str, modules: Mapping[str, tuple[str, str]], help: str) -> None:
        super().__init__(name, help=help)
        self.modules = dict(modules)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.modules, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return super().get_command(ctx, cmd_name)
        command = import_module(self.modules[cmd_name][0]).command
        assert isinstance(command, click.Command)
        checked = copy(command)  # run by itself, the command is as its module has it
        checked.params = [_checked(option) for option in command.params]
        return checked

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names:
            ctx.fail(f"no command {args[0]!r}: there is {', '.join(names)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, help) for name, (_, help) in self.modules.items()]
        for name, command in self.commands.items():
            rows.append((name, command.get_short_help_str(limit=100)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


cli = LazyGroup(
    "smkern", COMMANDS, "SM partitions for LLM serving, and kernels that know their SM budget."
)
cli.add_command(LazyGroup("bench", SUITES, "Measure what the README claims; most need a GPU."))
cli = click.version_option(__version__, prog_name="smkern")(cli)


def main() -> None:
    """Entry point: an error of ours, or of the disk, is a message and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names of files may hold what no encoding has
            stream.reconfigure(errors="backslashreplace")
    try:
        cli()
    except (SmkernError, OSError) as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)
