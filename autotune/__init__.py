"""The tuner, installed as `smkern.autotune`: measures configurations inside partitions.

`main` is the command, `shortlist` says what is worth measuring, `measure` measures one cell,
`places` makes partitions (and a neighbour), `raw` records, `fit` re-fits the cost model.
"""
