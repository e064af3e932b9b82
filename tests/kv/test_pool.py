"""The pool as its users call it: prefixes, refusals, the memory behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import smkern
from smkern.errors import ArgumentError, OutOfPagesError, PoolCorruptError
from smkern.kv import KvPool, KvSizes
from smkern.kv.prefix import BlockChain
from smkern.kv.storage import pages_in_free_memory
from tests.kv.test_page_pool_states import FakeEvent

SIZES = KvSizes(2, num_kv_heads=2, head_dim=64, dtype=torch.float32)


def pool_of(num_pages: int = 8, **options: Any) -> KvPool:
    return KvPool(SIZES, num_pages=num_pages, device="cpu", **options)


def test_a_layer_is_a_view_of_head_major_pages() -> None:
    pool = pool_of(3)
    assert pool.storage.shape == (2, 2, 3, 2, 16, 64)
    keys, values = pool.layer(1)
    assert keys.shape == values.shape == (3, 16, 2, 64)
    values[2, 5, 1] = 7
    assert (pool.storage[1, 1, 2, 1, 5] == 7).all()
    assert int(pool.storage.count_nonzero()) == 64
    assert pool.storage[0, 0, 0, 0].is_contiguous()


def test_operators_take_a_layer() -> None:
    pool = pool_of()
    pool.allocate("a", list(range(20)))
    table = torch.tensor([pool.pages("a")], dtype=torch.int32)
    lens = torch.tensor([20], dtype=torch.int32)
    k = torch.randn(20, 2, 64)
    cu = torch.tensor([0, 20], dtype=torch.int32)
    smkern.append_kv(k, k, *pool.layer(0), table, lens, cu_q_lens=cu)
    q = torch.randn(1, 2, 64)
    out = smkern.paged_attention(q, *pool.layer(0), table, lens)
    weights = torch.softmax((q[0, :, None] * k.transpose(0, 1)).sum(-1) / 8, -1)
    torch.testing.assert_close(out[0], (weights[..., None] * k.transpose(0, 1)).sum(1))


def test_a_whole_prompt_that_is_known_leaves_a_token_to_compute() -> None:
    pool = pool_of()
    prompt = list(range(32))
    pool.allocate("a", prompt)
    pool.commit("a", prompt)
    assert pool.allocate("b", prompt) == 16
    assert pool.match_prefix([*prompt, 0]) == 32


def test_other_tokens_share_nothing() -> None:
    pool = pool_of()
    pool.allocate("a", [0] * 40)
    pool.commit("a", [0] * 40)
    assert pool.match_prefix([0] * 40) == 32
    assert pool.match_prefix([1] + [0] * 39) == 0


def test_decoded_tokens_are_found_too() -> None:
    pool = pool_of()
    pool.allocate("a", [1] * 10)
    pool.commit("a", [1] * 10)
    pool.extend("a", 20)
    for token in range(10):
        pool.commit("a", [token])
    assert pool.match_prefix([1] * 10 + list(range(10))) == 16
    assert pool.held("a").num_tokens == 20


def test_reuse_can_be_off() -> None:
    pool = pool_of(reuse=False)
    pool.allocate("a", [1] * 40)
    pool.commit("a", [1] * 40)
    assert pool.match_prefix([1] * 40) == 0
    pool.release("a")
    assert pool.usage == (0, 0, 8)
    pool.check()


@pytest.mark.parametrize("parts", [[40], [1, 3, 10, 26], [16, 16, 8], [1] * 40], ids=str)
def test_blocks_have_the_same_names_however_they_came(parts: list[int]) -> None:
    """Named one by one or all at once, of a prompt or of what was computed of it."""
    tokens = list(range(40))
    one_by_one, at_once = BlockChain(tokens, 16), BlockChain(tokens, 16)
    last = at_once[1]
    assert [one_by_one[0], one_by_one[1]] == [at_once[0], last]
    pool = pool_of()
    pool.allocate("a", tokens)
    for part in parts:
        at = pool.held("a").num_tokens
        pool.commit("a", tokens[at : at + part])
    assert [name for name, _ in pool.index.items()] == [at_once[0], last]


def test_a_chain_asks_the_pool_again_without_hashing() -> None:
    pool = pool_of()
    chain = pool.chain([1] * 40)
    pool.allocate("a", chain)
    pool.commit("a", [1] * 40)
    assert pool.match_prefix(chain) == 32
    with pytest.raises(ArgumentError, match="blocks of 16 tokens"):
        KvPool(KvSizes(1, 1, 64, 32), num_pages=1, device="cpu").match_prefix(chain)


def test_pages_that_an_admission_shares_are_those_that_others_hold() -> None:
    pool = pool_of(reuse=True)
    prompt = list(range(48))
    chain = pool.chain([*prompt, 1])
    assert pool.shared_pages(chain) == 0
    event = FakeEvent()
    pool.allocate("a", prompt)
    pool.commit("a", prompt, event)
    assert pool.shared_pages(chain) == 0, "they are not written yet"
    event.done = True
    assert pool.shared_pages(chain) == pool.shared_pages(chain, 2) == 3
    assert pool.shared_pages(prompt) == 2, "its last token is left to compute"
    pool.allocate("b", prompt[:20])
    pool.release("a")
    assert pool.usage == (2, 2, 4)
    assert pool.shared_pages(chain, 3) == pool.shared_pages(chain) == 1
    pool.forget_prefixes()
    assert pool.shared_pages(chain, 1) == 0
    off = pool_of(reuse=False)
    off.allocate("a", prompt)
    off.commit("a", prompt)
    assert off.shared_pages(prompt) == 0


def test_forgotten_prefixes_are_not_found() -> None:
    pool = pool_of()
    pool.allocate("a", [1] * 40)
    pool.commit("a", [1] * 40)
    pool.allocate("b", [2] * 40)
    pool.commit("b", [2] * 40)
    pool.release("b")
    pool.forget_prefixes()
    assert pool.match_prefix([1] * 40) == pool.match_prefix([2] * 40) == 0
    assert pool.usage == (3, 0, 5)
    pool.check()
    pool.release("a")
    pool.check()
    assert pool.usage.free == 8


def test_what_a_request_computes_behind_forgotten_prefixes_is_not_found() -> None:
    pool = pool_of()
    prompt = list(range(48))
    pool.allocate("a", prompt)
    pool.commit("a", prompt[:16])
    pool.forget_prefixes()
    pool.commit("a", prompt[16:])  # attends to the first block, which is of old weights
    pool.allocate("b", prompt)
    pool.commit("b", prompt[:16])
    assert pool.match_prefix([*prompt, 1]) == 16
    pool.check()
    pool.release("a")
    pool.release("b")
    pool.check()


def test_an_event_that_raises_when_it_is_asked_takes_no_page() -> None:
    class Failing:
        def query(self) -> bool:
            raise RuntimeError("planted")

    pool = pool_of()
    pool.allocate("a", [1] * 40)
    with pytest.raises(RuntimeError, match="planted"):
        pool.release("a", Failing())
    assert pool.requests == ("a",)
    pool.check()
    first, second = FakeEvent(), FakeEvent()
    pool.allocate("b", [2] * 40)
    pool.release("a", first)
    pool.release("b", second)
    first.done = True
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FakeEvent, "query", lambda x: x is first or Failing().query())
        with pytest.raises(RuntimeError, match="planted"):
            pool.poll()
    pool.check()
    second.done = True
    assert pool.poll() == 0
    assert pool.usage.free == 8
    pool.check()


def test_out_of_pages_says_what_there_is_and_changes_nothing() -> None:
    pool = pool_of(4)
    pool.allocate("a", [1] * 33)
    pool.commit("a", [1] * 33)
    before = pool.usage
    message = r"'b' needs 2 more pages of 16 tokens, 1 of 4 can be had \(3 held, 0 cached, 1 free"
    with pytest.raises(OutOfPagesError, match=message):
        pool.allocate("b", [1] * 64)
    with pytest.raises(OutOfPagesError, match="'a' needs 2 more"):
        pool.extend("a", 65)
    pool.allocate("d", [2])
    with pytest.raises(OutOfPagesError, match="2 requests need 2 more pages"):
        pool.extend_all({"a": 49, "d": 17})
    assert (pool.room("a"), pool.room("d")) == (48, 16)
    pool.release("d")
    assert pool.usage == before
    assert pool.requests == ("a",)
    pool.check()
    pool.allocate("c", [1] * 48)
    pool.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.allocate("b", []), "'b' has no tokens"),
        (lambda pool: pool.allocate("a", [1]), "'a' holds 2 pages already"),
        (lambda pool: pool.allocate("b", [1, 2], num_tokens=1), "num_tokens=1 is less"),
        (lambda pool: pool.allocate("b", ["x"] * 17), "pass token ids"),
        (lambda pool: pool.extend("b", 1), "'b' holds no pages"),
        (lambda pool: pool.release("b"), "'b' holds no pages"),
        (lambda pool: pool.commit("a", [1] * 33), "2 pages of 16 hold 32"),
    ],
)
def test_wrong_calls_change_nothing(call: Any, message: str) -> None:
    pool = pool_of()
    pool.allocate("a", [1] * 20)
    with pytest.raises(ArgumentError, match=message):
        call(pool)
    assert pool.usage == (2, 0, 6)
    assert pool.held("a").num_tokens == 0
    pool.check()


def test_released_twice_is_an_error() -> None:
    pool = pool_of()
    pool.allocate("a", [1])
    pool.release("a")
    with pytest.raises(ArgumentError, match="a released request is gone"):
        pool.release("a")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"page_size": 8}, "page_size"),
        ({"dtype": torch.int8}, "torch.int8"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64} | sizes
    with pytest.raises(ArgumentError, match=message):
        KvSizes(**given)


def test_only_a_gpu_is_sized_from_free_memory() -> None:
    with pytest.raises(ArgumentError, match="pass num_pages"):
        KvPool(SIZES, device="cpu")
    with pytest.raises(ArgumentError, match="num_pages=0"):
        pool_of(0)
    with pytest.raises(OutOfPagesError, match="lower num_pages"):
        pool_of(2**30)


def _two_owners(pool: KvPool) -> None:
    pool.held("b").pages[0] = pool.held("a").pages[0]


def _lost(pool: KvPool) -> None:
    pool.states._fresh += 1


def _free_twice(pool: KvPool) -> None:
    pool.states._free += [pool.pages("c")[0]]


def _cached_unknown(pool: KvPool) -> None:
    pool.index.remove(pool.states.cached_pages()[0])


def _written_shared(pool: KvPool) -> None:
    held = pool.held("a")
    pool.index.add([b"x"], held.pages[-1:], None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_two_owners, "references"),
        (_lost, "1 of 8 pages are neither held, cached nor free"),
        (_free_twice, "is listed as free with 1 references"),
        (_cached_unknown, "is cached, but no block is known by it"),
        (_written_shared, "'a' writes page"),
    ],
)
def test_check_names_what_is_wrong(damage: Any, message: str) -> None:
    pool = pool_of()
    pool.allocate("gone", [9] * 16)
    pool.commit("gone", [9] * 16)
    pool.release("gone")
    for name in "abc":
        pool.allocate(name, [ord(name)] * 20)
    pool.check()
    damage(pool)
    with pytest.raises(PoolCorruptError, match=message):
        pool.check()


def test_pages_fill_the_share_of_what_is_free_and_not_reserved(monkeypatch) -> None:
    sizes = KvSizes(1, 1, 64)
    free = 100 * sizes.page_bytes
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    gpu = torch.device("cuda")
    assert pages_in_free_memory(sizes, gpu, 0.5) == 50
    assert pages_in_free_memory(sizes, gpu, 0.5, 40 * sizes.page_bytes) == 30
    with pytest.raises(OutOfPagesError, match="raise memory_fraction"):
        pages_in_free_memory(sizes, gpu, 1.0, 2 * free)
