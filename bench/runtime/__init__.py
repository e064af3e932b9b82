"""The runtime suite: what multiplexing gains over chunked prefill, and what running it costs."""
