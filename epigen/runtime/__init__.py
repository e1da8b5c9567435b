"""From source text to tensors: targets, loading, launching."""
