"""A client of `smkern serve`: one stream, token by token, and what it took.

`python examples/openai_client.py "An SM is" [http://127.0.0.1:8000/v1]`, with `pip install openai`.
"""

from __future__ import annotations

import sys

from openai import APIConnectionError, APIError, OpenAI


def show(prompt: str, url: str, *, key: str = "none", max_tokens: int = 64) -> str:
    """Print a completion as it comes; the whole of it."""
    client = OpenAI(base_url=url, api_key=key)
    (model,) = client.models.list().data
    stream = client.completions.create(
        model=model.id, prompt=prompt, max_tokens=max_tokens, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text = ""
    for part in stream:
        for choice in part.choices:
            text += choice.text
            print(choice.text, end="", flush=True)
        if part.usage is not None:
            print(f"\n{part.usage.prompt_tokens} + {part.usage.completion_tokens} tokens")
    return text


if __name__ == "__main__":
    (prompt,) = sys.argv[1:2] or ["An SM is"]
    (url,) = sys.argv[2:3] or ["http://127.0.0.1:8000/v1"]
    try:
        show(prompt, url)
    except APIConnectionError:
        sys.exit(f"nothing answers at {url}: start one with `smkern serve --model MODEL`")
    except APIError as error:  # a server without a tokenizer says so
        sys.exit(str(error))
