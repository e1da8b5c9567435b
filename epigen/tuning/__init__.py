"""Which config a kernel gets."""
