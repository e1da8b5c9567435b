"""The front of the pipeline: text to untyped tree."""
