"""Markdown tables of committed results, a file a suite: cells in, text out."""
