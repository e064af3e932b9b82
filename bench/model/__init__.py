"""The model suite: decode steps and prefill of whole models, over SM budgets."""
