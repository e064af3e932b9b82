"""Lives of a runtime in which a call goes wrong, or an interrupt comes, at any place and time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

import smkern.runtime
from tests.fuzz.conftest import Cases
from tests.models.generation import assert_nothing_leaked, greedy, make_llm, random_prompts
from tests.runtime.ends import Served, recorded, simulated
from tests.runtime.injected import KINDS, Fault
from tests.runtime.tensors import one_thread, with_tensors

ROOM = str(Path(smkern.runtime.__file__).parent)
DEVICE = str(Path(ROOM, "sim"))
"""What stands for a GPU: an interrupt of the host is none of it."""
LIVES: dict[str, Callable[[Fault | None, int], Served]] = {
    "simulated": simulated,
    "with tensors": with_tensors,
}
FEW = {"simulated": 15, "with tensors": 2}
each_life = pytest.mark.parametrize("life", LIVES)


@each_life
def test_any_call_goes_wrong_in_any_way(cases: Cases, life: str) -> None:
    """Every request ends once, by name; tokens are right; nothing is held."""
    serve = LIVES[life]
    with one_thread():
        for draw in cases(FEW[life]):
            seed = draw.randrange(1000)
            counts = recorded(lambda fault, seed=seed: serve(fault, seed))
            site = draw.choice(sorted(counts))
            fault = Fault(site, draw.randint(1, counts[site]), draw.choice(KINDS))
            served = serve(fault, seed)
            served.live()
            served.check()


def interrupt_after(calls: int) -> Callable[[Any, str, Any], None]:
    """Interrupts the runtime's own code where Python looks for signals: as a function of it begins,
    or behind one in C. What it calls elsewhere is over or was never begun."""

    def at_call(frame: Any, event: str, given: Any) -> None:
        nonlocal calls
        files = [x.f_code.co_filename for x in (frame, frame.f_back) if x is not None]
        is_own = files[0].startswith(ROOM) and not any(file.startswith(DEVICE) for file in files)
        if event in ("call", "c_return") and is_own:
            calls -= 1
            if not calls:
                sys.setprofile(None)
                raise KeyboardInterrupt

    return at_call


def interrupted(serve: Callable[[Fault | None, int], Served], draw: Random) -> Served:
    """A life with an interrupt at some place, in whatever call that is."""
    served = serve(None, draw.randrange(1000))
    before = sys.getprofile()
    sys.setprofile(interrupt_after(int(2 ** draw.uniform(5, 15))))
    try:
        served.live()
    finally:
        sys.setprofile(before)
    return served


@each_life
def test_an_interrupt_at_any_place(cases: Cases, life: str) -> None:
    """What goes on is right, what cannot says so, and closing gives everything back."""
    with one_thread():
        for draw in cases(FEW[life]):
            interrupted(LIVES[life], draw).check()


def test_an_llm_generates_again_after_an_interrupt(cases: Cases) -> None:
    """The same tokens, by another executor where it was stopped midway."""
    prompts = random_prompts([5, 30, 9], seed=2)
    with one_thread():
        llm = make_llm(num_pages=9)
        whole = llm.generate(prompts, greedy(8))
        for draw in cases(4):
            sys.setprofile(interrupt_after(int(2 ** draw.uniform(2, 13))))
            try:
                with suppress(KeyboardInterrupt):
                    llm.generate(prompts, greedy(8))
            finally:
                sys.setprofile(None)
            again = llm.generate(prompts, greedy(8))
            assert [x.tokens for x in again] == [x.tokens for x in whole]
            assert_nothing_leaked(llm)
