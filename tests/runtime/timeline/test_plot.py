"""The picture and the figures of a saved timeline."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from smkern.cli import cli
from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.policies import Decision
from smkern.runtime.place import Place
from smkern.runtime.timeline.command import summarize
from smkern.runtime.timeline.plot import draw
from smkern.runtime.timeline.trace import Trace
from tests.runtime.timeline.timelines import NUM_SMS, Script, waiting

pytestmark = pytest.mark.slow

DECODE, PREFILL = Place.of("decode", 32, NUM_SMS), Place.of("prefill", 32, NUM_SMS)
PNG = b"\x89PNG\r\n"


class Ten:
    def alone_us(self, size: Size, num_sms: int) -> float:
        return 100.0

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 1.0


def script(predictor=None) -> Script:
    script = Script(predictor=predictor)
    script.decided(0, Decision(rung=32, prefill=(100, 101)), running_kv=(5,), waiting=waiting(2))
    for begin in (10, 120, 260):
        size = Size(batch=1, total_kv=5)
        script.ran("decode", begin, begin + 100, place=DECODE, size=size, name="decode")
    layers = Size((Chunk(64), Chunk(8, 16)), 2, 4)
    about = {"requests": list(range(100, 110))}
    script.ran("prefill", 20, 200, place=PREFILL, size=layers, name="prefill", about=about)
    script.decided(220, Decision(), running_kv=(5,))
    script.ran("decode", 370, 400, name="</script><b>engine's own")
    script.timeline.note("failed", error="<script>alert(1)</script>")
    script.start("prefill", 390)
    script.now_us = 420
    return script


@pytest.fixture(params=[None, Ten()], ids=["plain", "predicted"])
def trace(request) -> Trace:
    return script(request.param).timeline.trace()


def test_a_picture_is_drawn(tmp_path, trace):
    assert draw(trace, tmp_path / "deep" / "t.png").read_bytes().startswith(PNG)


def test_a_picture_is_the_same_each_time(tmp_path, trace):
    first, second = (draw(trace, tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second


@pytest.mark.parametrize("window", [(500, None), (100, 50), (None, 0)])
def test_a_stretch_with_nothing_in_it_is_refused(tmp_path, trace, window):
    with pytest.raises(ArgumentError, match="choose a stretch within"):
        draw(trace, tmp_path / "t.png", begin_us=window[0], end_us=window[1])
    assert not list(tmp_path.iterdir())


def test_an_empty_timeline_has_no_picture(tmp_path):
    with pytest.raises(ArgumentError, match="no launch"):
        draw(Trace(NUM_SMS), tmp_path / "t.png")


def test_a_summary_names_what_matters(trace):
    rows = dict(summarize(trace))
    assert rows["Device"] == "132 SMs"
    assert rows["Not over"] == "1 launches"
    assert rows["Decisions"] == "2, of them 1 for another split"
    assert ("Real over predicted time" in rows) == bool(trace.spans[0].predicted_us)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_command_draws_and_tells(tmp_path, name):
    path = script().timeline.save(tmp_path / name)
    result = CliRunner().invoke(cli, ["timeline", str(path)])
    assert result.exit_code == 0, result.output
    assert "Decode lane" in result.output
    assert (tmp_path / "trace.png").read_bytes().startswith(PNG)


def test_the_command_writes_where_it_is_told(tmp_path):
    path = script().timeline.save(tmp_path / "t.json")
    out = tmp_path / "deep" / "x.png"
    result = CliRunner().invoke(
        cli, ["timeline", str(path), "--out", str(out), "--to-ms", "0.3", "--title", "Switch"]
    )
    assert result.exit_code == 0, result.output
    assert [file.name for file in out.parent.iterdir()] == ["x.png"]


def test_the_command_refuses_other_files(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("{}")
    result = CliRunner().invoke(cli, ["timeline", str(path)])
    assert isinstance(result.exception, ArgumentError)


def test_a_device_that_hangs_is_shown(tmp_path):
    """Nothing has ended yet: the launch on its way, until now."""
    hung = Script()
    hung.start("prefill", 5.0, PREFILL, name="prefill")
    hung.now_us = 60e6
    found = hung.timeline.trace()
    assert draw(found, tmp_path / "t.png").read_bytes().startswith(PNG)
    (span,) = found.spans
    assert (span.end_us, span.is_over) == (60e6, False)
    assert dict(summarize(found))["Not over"] == "1 launches"
