"""Profiles: what a GPU can do by SM count, loaded, measured ones first, and never half-read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern import device
from smkern.device import DeviceInfo, Profile, device_info, load_profile, save_profile
from smkern.errors import DeviceError, ProfileError

INFO = DeviceInfo("Some GPU", 108, (8, 0), 2, 2, 40 << 20, 1410, 80 << 30)
CURVE = ((8, 1.5), (16, 2.5), (24, 2.4), (108, 3.0))


def profile(**curves) -> Profile:
    return Profile(INFO, {"bandwidth_tbps_spread_alone": CURVE, **curves}, {"date": "today"})


def test_the_shipped_profile_is_an_h200s():
    shipped = load_profile("h200")
    assert (shipped.info.name, shipped.info.num_sms) == ("NVIDIA H200", 132)
    assert shipped.bandwidth(16) > shipped.bandwidth(16, placement="default")
    assert shipped.bandwidth(16, beside=True) < shipped.bandwidth(16)
    assert shipped.flops(16) == pytest.approx(16 * 8.11, rel=0.01)


@given(st.integers(1, 131), st.sampled_from(["spread", "default"]), st.booleans())
def test_more_sms_are_never_less(num_sms, placement, beside):
    shipped = load_profile("h200")
    for rate in (shipped.bandwidth, shipped.flops):
        less = rate(num_sms, placement=placement, beside=beside)
        assert 0 < less <= rate(num_sms + 1, placement=placement, beside=beside)


def test_points_are_met_and_a_bad_choice_counts_as_the_one_before():
    assert profile().bandwidth(16) == 2.5
    assert profile().bandwidth(12) == 2.0
    assert profile().bandwidth(24) == 2.5
    assert profile().bandwidth(4) == 0.75


@pytest.mark.parametrize("num_sms", [0, -1, 109])
def test_counts_that_the_device_has_not(num_sms):
    with pytest.raises(ProfileError, match=r"1 to 108"):
        profile().bandwidth(num_sms)


def test_a_missing_curve_is_named_with_the_remedy():
    with pytest.raises(ProfileError, match=r"flops_tflops.*smkern bench ceilings"):
        profile().flops(8)


def test_a_saved_profile_comes_back(tmp_path):
    path = save_profile(profile(), tmp_path / "some.json")
    again = device._read(path)
    assert again == profile()
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', json.dumps({"format": 99, "info": {}, "curves": {}})]
)
def test_what_is_no_profile_is_named_with_the_remedy(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"broken\.json.*smkern bench ceilings"):
        device._read(path)


def with_(**changes) -> dict:
    return {**json.loads((device.SHIPPED / "h200.json").read_text()), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"curves": [1]},
        {"curves": {"bandwidth_tbps_spread_alone": 3}},
        {"curves": {"bandwidth_tbps_spread_alone": [[8, "fast"]]}},
        {"info": {"name": "Some GPU"}},
        {"info": {"name": "Some GPU", "cores": 4, "capability": [9, 0]}},
        {"info": None},
    ],
    ids=str,
)
def test_a_foreign_part_is_corrupt(tmp_path, changes):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(with_(**changes)))
    with pytest.raises(ProfileError, match=r"broken\.json is corrupt.*smkern bench ceilings"):
        device._read(path)


@given(st.data())
def test_a_half_written_profile_is_refused(tmp_path_factory, data):
    whole = (device.SHIPPED / "h200.json").read_text().rstrip()
    path = tmp_path_factory.mktemp("half") / "half.json"
    path.write_text(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ProfileError, match=r"half\.json is corrupt"):
        device._read(path)


def test_what_cannot_be_read_is_named_with_the_remedy(tmp_path):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ProfileError, match=r"folder\.json.*delete it"):
        device._read(tmp_path / "folder.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"binary\.json is corrupt"):
        device._read(binary)


@given(st.dictionaries(st.integers(1, 132), st.floats(0, 1e4), min_size=1), st.data())
def test_any_measurement_interpolates_without_a_fall(points, data):
    curve = tuple(sorted(points.items()))
    few = data.draw(st.integers(1, 131))
    more = data.draw(st.integers(few, 132))
    low, high = (device._interpolate(curve, n) for n in (few, more))
    assert 0 <= low <= high * (1 + 1e-12)
    assert high <= max(points.values()) * (1 + 1e-12)


def test_points_may_be_written_in_any_order(tmp_path):
    path = tmp_path / "some.json"
    shuffled = with_(curves={"bandwidth_tbps_spread_alone": [[16, 3.0], [8, 1.0]]})
    path.write_text(json.dumps(shuffled))
    assert device._read(path).bandwidth(8) == 1.0


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, broken):
    path = save_profile(profile(), tmp_path / "some.json")
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(device.os, broken, full)
    with pytest.raises(OSError, match="no space left"):
        save_profile(profile(flops_tflops_spread_alone=CURVE), path)
    assert path.read_bytes() == before
    assert list(tmp_path.glob("*.tmp")) == []


def test_what_is_no_json_leaves_the_old_profile(tmp_path):
    path = save_profile(profile(), tmp_path / "some.json")
    with pytest.raises(TypeError):
        save_profile(Profile(INFO, {}, {"date": object()}), path)
    assert device._read(path) == profile()
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("index", [-1, 1, 99])
def test_a_gpu_that_is_not_there(monkeypatch, index):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(DeviceError, match=f"no GPU {index}: this machine has 0 to 0"):
        device_info(index)
    with pytest.raises(DeviceError, match=f"no GPU {index}"):
        load_profile(index)


def test_an_unknown_name_lists_what_is_shipped():
    with pytest.raises(ProfileError, match="h200"):
        load_profile("h100")


def test_a_measured_profile_counts_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "device_info", lambda index=None: INFO)
    monkeypatch.setattr(device, "cache_file", lambda info: tmp_path / "own.json")
    assert load_profile().info.name == "NVIDIA H200"
    save_profile(profile(), tmp_path / "own.json")
    assert load_profile().info.name == "Some GPU"


def test_without_a_gpu_the_error_says_what_runs_anyway(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match="reference"):
        device_info()
    assert load_profile().info.name == "NVIDIA H200"
