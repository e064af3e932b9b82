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
