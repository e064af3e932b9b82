"""The engines suite: smkern's `Multiplexer` beside stock vLLM, and vLLM with smkern inside."""
