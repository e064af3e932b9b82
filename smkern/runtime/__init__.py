"""Prefill layers and decode graphs side by side on one GPU."""
