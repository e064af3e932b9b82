"""The append suite: cases, operands, peers."""
