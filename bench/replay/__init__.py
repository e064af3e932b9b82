"""Traces replayed under every policy: goodput, and what service was like at given rates."""
