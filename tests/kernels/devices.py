"""GPUs that are absent, as profiles: the shipped ceilings with the facts of another device."""

from __future__ import annotations

from dataclasses import replace

from smkern.profile import Profile, load_profile

FACTS = {
    80: ("NVIDIA A100-SXM4-80GB", 108),
    86: ("NVIDIA RTX A6000", 84),
    89: ("NVIDIA L40S", 142),
    90: ("NVIDIA H100", 132),
    100: ("NVIDIA B200", 148),
    120: ("NVIDIA RTX PRO 6000", 188),
}
"""Capability to a device's name and SMs."""


def profile_of(capability: int) -> Profile:
    """The profile that dispatch is given for a device of this capability."""
    shipped = load_profile("h200")
    name, num_sms = FACTS[capability]
    info = replace(shipped.info, name=name, capability=divmod(capability, 10), num_sms=num_sms)
    return replace(shipped, info=info)
