"""What a kernel costs before it runs: bytes, resources, time."""
