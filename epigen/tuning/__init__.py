"""Searching for a config: requests, studies, workers, timing, reports."""
