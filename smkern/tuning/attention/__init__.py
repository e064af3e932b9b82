"""Attention's shapes and configurations, its cost model, tables and choice."""
