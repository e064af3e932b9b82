"""The attention suite: cases, operands, peers, rows."""
