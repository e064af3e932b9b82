"""The operators in plain torch, a file a family: what CPU tensors run and what tests compare to."""
