"""Measurements of smkern and its peers, installed as `smkern.bench`.

Every suite is a module with a click command named `command`; `smkern bench <suite>` runs it and
leaves a file under `bench/results/<gpu>/`.
"""
