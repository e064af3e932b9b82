from __future__ import annotations

import pytest

from smkern.measure.partitions import side_for


@pytest.mark.parametrize(
    ("num_sms", "spread", "default"),
    [
        (16, (16, "decode"), (16, "decode")),
        (60, (60, "decode"), (72, "prefill")),
        (66, (66, "decode"), None),
        (72, (60, "prefill"), (72, "decode")),
        (84, (48, "prefill"), (48, "prefill")),
        (100, (32, "prefill"), (32, "prefill")),
        (116, (16, "prefill"), (16, "prefill")),
        (118, (14, "prefill"), None),
        (17, None, None),
        (132, None, None),
        (0, None, None),
    ],
)
def test_which_side_of_which_split_holds_a_budget(num_sms, spread, default):
    assert side_for(num_sms, 132, "spread") == spread
    assert side_for(num_sms, 132, "default") == default
