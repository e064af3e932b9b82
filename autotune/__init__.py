"""The tuner, installed as `smkern.autotune`: measures configurations inside partitions.

`main` is the command, `run` one run of it: of an operator (`operators`) or of a model (`model`). A
`Family` (family.py, and a module for each) says what there is to know of a table's operators. The
`pipeline` measures cells (measure.py) in `places` while kernels compile, `tables` keeps them, `raw`
every candidate; `check` says what a table is worth, `fit` re-fits the cost model.
"""
