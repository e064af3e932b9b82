"""Tokenizers from a local folder; text as tokens come, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from smkern.errors import ConfigError

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PANIC = "PanicException"
"""What transformers' tokenizers raise where their Rust gives up; it is no `Exception`."""
_UNFINISHED = "�"  # what a tokenizer writes for the first bytes of a character
_LONGEST = 4  # tokens of a character, one for each of its bytes
_CONTEXT = 6


class Tokenizer(Protocol):
    """What smkern needs of a tokenizer; transformers' tokenizers have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any((folder / name).is_file() for name in FILES)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a local folder; nothing is downloaded, and none of its code is run.

    Raises:
        ConfigError: transformers is not installed, the files are no tokenizer, or the tokenizer is
            code of the folder's own.
    """
    odd = [x.name for x in folder.glob("*") if x.exists() and not (x.is_file() or x.is_dir())]
    if odd:
        raise ConfigError(f"{folder} has {odd}, which are no files: reading them may never end")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"the tokenizer of {folder} needs transformers, which is not installed: install "
            "smkern[models], or pass token ids"
        ) from None
    try:
        # Left out, trust_remote_code is asked for on standard input.
        made: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except BaseException as reason:  # a parser's of foreign files, which raise anything
        if not isinstance(reason, Exception) and type(reason).__name__ != PANIC:
            raise
        code = "trust_remote_code" in str(reason)
        raise ConfigError(
            f"{folder} holds no tokenizer that transformers reads "
            f"({'it is code of the folder, which is never run' if code else reason}): copy "
            "files of a tokenizer that transformers has there, pass tokenizer=<folder>, or pass "
            "token ids"
        ) from None
    return made


def end_tokens(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The token that ends a text by its tokenizer, which fine-tunes may name there alone; vLLM and
    SGLang end at it, too."""
    found = getattr(tokenizer, "eos_token_id", None)
    return (found,) if type(found) is int else ()


class Detokenizer:
    """The text of a request as its tokens come, up to the first of its stop texts.

    Incomplete characters, and what may be the beginning of a stop text, are held back until more
    tokens come.

    Args:
        tokenizer: The model's.
        prompt: Token ids of the prompt; its last few decide whether the text begins with a space.
        stops: Texts that end the request.

    Attributes:
        text: All text returned so far.
        stopped: Whether a stop text was found.
    """

    __slots__ = ("_held", "_ids", "_read", "_stops", "_tokenizer", "stopped", "text")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._read = len(self._ids)
        self._stops = stops
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that one more token makes certain."""
        self._ids.append(token)
        before = self._decode(self._ids[: self._read])
        after, unread = self._decode(self._ids), 0
        # A special token has no text, and the next one's space depends on those in front of it.
        # Twice, since a space at the beginning may be left out.
        if (after == before or after.endswith(_UNFINISHED)) and not self._decode([token] * 2):
            self._ids.pop()
            return ""
        if after.endswith(_UNFINISHED):
            # All but the last three tokens is certain; given out, it is not decoded any more.
            unread = _LONGEST - 1
            if len(self._ids) - self._read <= unread:
                return ""
            sure = self._decode(self._ids[:-unread])
            if len(sure) <= len(before) or not after.startswith(sure):
                return ""
            after = sure
        # A space or a character may depend on earlier tokens, so some are kept.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids) - unread
        self._held += after[len(before) :]
        return self._give_out()

    def finish(self) -> str:
        """What was held back, up to a stop text, once no token comes any more."""
        if self.stopped:
            return ""
        self._held += self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]
        self._read = len(self._ids)
        given = self._give_out()
        rest, self._held = self._held, ""  # no beginning of a stop text goes on
        self.text += rest
        return given + rest

    def _give_out(self) -> str:
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            new, self._held = self._held[: min(found)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            cut = len(self._held) - keep
            new, self._held = self._held[:cut], self._held[cut:]
        self.text += new
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """How long an end of `text` is a beginning of `stop`, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
