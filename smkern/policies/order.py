"""In which order requests wait: a number a request, the least is served first.

A key changes only with the request itself, so a queue is sorted once, however long it is. Each is
at least its arrival less a bound, so every request is the first some day: nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite

from smkern.errors import ArgumentError
from smkern.limits import shown
from smkern.policies.snapshot import Waiting

Order = Callable[[Waiting], float]
"""The key of a request that waits, us."""

FIRST_TOKEN_US = 1e6
FIRST_TOKEN_US_PER_TOKEN = 1e3
"""A first token is wanted 1 s after its request came, or 1 ms for each prompt token where that is
later: for 1,000 new tokens 1 s as in DRIFT, section 5.1; short prompts get 1 s here."""
TOKEN_US = 20.0
"""About what a prompt's token takes on a whole device, where nobody says better."""
PATIENCE = 10.0
"""Times a prompt's own time that `shortest` lets later ones go before it."""


def first_token_us(tokens: int) -> float:
    """Time from a request's arrival to when its first token is wanted, where nobody said."""
    return max(FIRST_TOKEN_US, FIRST_TOKEN_US_PER_TOKEN * tokens)


def fcfs(waiting: Waiting) -> float:
    """First come, first served."""
    return waiting.arrival_us


def deadline(waiting: Waiting) -> float:
    """Earliest deadline of the first token first; without one, as `FIRST_TOKEN_US` says."""
    if waiting.deadline_us == inf:
        return waiting.arrival_us + first_token_us(waiting.tokens)
    return waiting.deadline_us


def shortest(waiting: Waiting) -> float:
    """Fewest tokens first, where both came at about the same time: a prompt waits for shorter ones
    that came later by at most `PATIENCE` times its own time."""
    return waiting.arrival_us + PATIENCE * TOKEN_US * waiting.tokens


def slack(waiting: Waiting) -> float:
    """Latest moment to begin first: the deadline less the prompt's own time."""
    return deadline(waiting) - TOKEN_US * waiting.tokens


ORDERS: dict[str, Order] = {
    "fcfs": fcfs,
    "deadline": deadline,
    "shortest": shortest,
    "slack": slack,
}


def order_named(name: str | Order) -> Order:
    """An order by its name; a function is taken as it is.

    Raises:
        ArgumentError: no such order.
    """
    if callable(name):
        return name
    if not isinstance(name, str) or name not in ORDERS:
        raise ArgumentError(f"order={shown(name)}: there is {', '.join(ORDERS)}, or a function")
    return ORDERS[name]


def checked_key(order: Order, waiting: Waiting) -> float:
    """A request's key; ArgumentError where an order of the user's gives none."""
    key = order(waiting)
    if not isinstance(key, int | float) or not isfinite(key):
        raise ArgumentError(
            f"the order gave {shown(key)} for request {waiting.id}: give a finite time"
        )
    return key
