"""An OpenAI-compatible HTTP server over the runtime: `smkern serve`.

Two processes: the engine's alone runs the model (`engine.py`), so that no interpreter lock stands
between two decode steps; the other one speaks HTTP, makes tokens of prompts and text of tokens
(`app.py`). They share a pipe (`messages.py`). Needs the extra `serve`.
"""

RUNGS = (16, 20, 24, 32, 40, 48, 52, 56, 64)
"""SMs of decode's side of the splits by default: dense where limits of 15 to 30 ms choose.

Each costs graphs of its own."""
