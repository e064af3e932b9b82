"""Runs a model's launches: rows of requests, decode graphs, layers of prompts, mixed forwards."""
