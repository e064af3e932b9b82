"""How a GEMM is configured for a budget: configurations, cost model, tables and their look-up."""
