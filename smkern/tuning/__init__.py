"""How operators are configured for a budget: configurations, cost models, tuned tables."""
