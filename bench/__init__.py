"""Measurements behind the claims in the README: one script a claim, results as JSON under `results`."""
