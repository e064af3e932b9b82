"""The tuner, installed as `smkern.autotune`: measures configurations inside partitions.

`main` is the command, `run` one run of it: of an operator (`operators`) or of a model (`model`). A
`MeasuredFamily` (family.py, and a module for each) adds operands and launches to a family of
`smkern.tuning`. The `pipeline` measures cells (measure.py) in `places` while kernels compile,
`tables` keeps them, `raw` every candidate; `check` compares tables with the cost model, which `fit`
fits again.
"""
