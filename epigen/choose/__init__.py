"""Which config a call gets, and why: the search space, the plain rule, the databases, the model."""
