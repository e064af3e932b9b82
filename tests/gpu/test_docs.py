"""The documentation's snippets that need a GPU run, behind those of their page that do not."""

from __future__ import annotations

import pytest

from tests.docs.pages import PAGES, name_of, run, snippets

NEED_A_GPU = [
    page for page in PAGES if any(one.info == "python gpu" for one in snippets(page, "python"))
]


@pytest.mark.parametrize("page", NEED_A_GPU, ids=name_of)
def test_snippets_run(page):
    run(page, "python", "python gpu")
