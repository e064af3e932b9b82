"""The picture and the page of a timeline: what they show, and that the page needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.cli import cli
from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.policies import Decision
from smkern.runtime.place import Place
from smkern.runtime.timeline.page import payload, write
from smkern.runtime.timeline.plot import draw
from smkern.runtime.timeline.summary import summarize
from smkern.runtime.timeline.trace import Trace
from tests.runtime.timeline.timelines import NUM_SMS, Script, waiting

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


def test_an_empty_timeline_has_a_page_and_no_picture(tmp_path):
    with pytest.raises(ArgumentError, match="no launch"):
        draw(Trace(NUM_SMS), tmp_path / "t.png")
    assert "<canvas" in write(Trace(NUM_SMS), tmp_path / "t.html").read_text()


def test_a_page_needs_nothing_else(tmp_path, trace):
    page = write(trace, tmp_path / "t.html").read_text()
    assert not re.findall(r"(?:src|href|url|import|fetch)\s*[=(]", page)
    assert "https://" not in page
    assert "default-src 'none'" in page


def test_what_was_recorded_cannot_leave_its_script(tmp_path, trace):
    page = write(trace, tmp_path / "t.html", title="<i>").read_text()
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<b>" not in page
    assert "<title>&lt;i&gt;</title>" in page


def test_a_page_tells_partition_budget_and_times(trace):
    data = payload(trace)
    step = data["spans"][0]
    assert (step[1], step[2]) == (10, 110)
    assert step[4] == "decode side of rung 32, 32 SMs"
    assert step[7] == (100 if trace.spans[0].predicted_us else None)
    prompts = next(span for span in data["spans"] if span[0] == 1)
    assert "72 tokens of 2 prompts behind 16 cached, 2 of 4 layers" in prompts[9]
    assert "requests: 100, 101, 102, 103, 104, 105 and 4 more" in prompts[9]
    assert [gap[3] for gap in data["gaps"]] == [
        [[110, 120]],
        [[220, 260]],
        [[360, 370]],
        [[200, 220]],
    ]
    assert data["choices"][0][1] == "decode on 32 SMs"
    assert "begins prompts of requests 100, 101" in data["choices"][0][2]
    assert data["split"] == [[10, 32, 100], [370, 132, 0]]


def test_a_summary_names_what_matters(trace):
    rows = dict(summarize(trace))
    assert rows["Device"] == "132 SMs"
    assert rows["Not over"] == "1 launches"
    assert rows["Decisions"] == "2, of them 1 for another split"
    assert ("Real over predicted time" in rows) == bool(trace.spans[0].predicted_us)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's script")
@pytest.mark.parametrize("is_empty", [False, True])
def test_the_page_s_script_draws(tmp_path, trace, is_empty):
    page = write(Trace(NUM_SMS) if is_empty else trace, tmp_path / "t.html")
    stub = Path(__file__).with_name("page_stub.js")
    done = subprocess.run(
        ["node", str(stub), str(page)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    drawn = json.loads(done.stdout)
    assert {"decode", "prefill", "SMs", "decoding", "waiting"} <= set(drawn["fillText"])
    tips = "\n".join(drawn["tips"])
    if not is_empty:
        assert "decode: 100.0 us\ndecode side of rung 32, 32 SMs" in tips
        assert "Gap of 40.0 us\nwork for this lane existed for 40.0 us of it" in tips
        assert "32 SMs decode, 100 SMs prefill" in tips
        assert "decode on 32 SMs at" in tips


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_command_draws_both(tmp_path, name):
    path = script().timeline.save(tmp_path / name)
    result = CliRunner().invoke(cli, ["timeline", str(path)])
    assert result.exit_code == 0, result.output
    assert "Decode lane" in result.output
    assert (tmp_path / "trace.png").read_bytes().startswith(PNG)
    assert "<title>trace</title>" in (tmp_path / "trace.html").read_text()


def test_the_command_writes_where_it_is_told(tmp_path):
    path = script().timeline.save(tmp_path / "t.json")
    out = tmp_path / "deep" / "x.png"
    result = CliRunner().invoke(
        cli, ["timeline", str(path), "--out", str(out), "--to-ms", "0.3", "--title", "Switch"]
    )
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in out.parent.iterdir()) == ["x.html", "x.png"]
    assert "<h1>Switch</h1>" in (out.parent / "x.html").read_text()


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
    (span,) = payload(found)["spans"]
    assert (span[2], span[8]) == (60e6 - 5, 0)
    assert dict(summarize(found))["Not over"] == "1 launches"
