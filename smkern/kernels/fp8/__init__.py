"""Device code on e4m3, and its launches. No validation, no torch dispatch."""
