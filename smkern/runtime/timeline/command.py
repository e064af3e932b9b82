"""`smkern timeline`: a saved timeline as a picture and as a page."""

from __future__ import annotations

from pathlib import Path

import click

from smkern.runtime.timeline.summary import summarize
from smkern.runtime.timeline.timeline import Timeline

SUFFIXES = (".json", ".gz", ".png", ".html")
"""Of the trace's name, or of --out's, that are replaced."""


@click.command("timeline")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Name of both files, without .png and .html; by default the trace's, beside it.",
)
@click.option("--from-ms", type=float, default=None, help="Where the picture begins.")
@click.option("--to-ms", type=float, default=None, help="Where the picture ends.")
@click.option("--title", default="", help="Of the page and the picture.")
def command(
    trace: Path, out: Path | None, from_ms: float | None, to_ms: float | None, title: str
) -> None:
    """Draw a timeline that `Timeline.save` wrote: a PNG and one HTML page.

    The page holds all of it, needs no network and zooms. Perfetto (ui.perfetto.dev) opens the trace
    as it is.
    """
    from smkern.runtime.timeline import page as timeline_page
    from smkern.runtime.timeline import plot as timeline_plot

    found = Timeline.load(trace)
    stem = _stem(trace if out is None else out)
    begin_us, end_us = (None if ms is None else 1e3 * ms for ms in (from_ms, to_ms))
    picture = timeline_plot.draw(
        found, stem.with_name(f"{stem.name}.png"), begin_us=begin_us, end_us=end_us, title=title
    )
    page = timeline_page.write(found, stem.with_name(f"{stem.name}.html"), title=title or stem.name)
    for name, value in summarize(found):
        click.echo(f"{name:32}{value}")
    click.echo(str(picture))
    click.echo(str(page))


def _stem(path: Path) -> Path:
    while path.suffix in SUFFIXES:
        path = path.with_suffix("")
    return path
