"""The typed graph: built by the checker, rewritten by passes, evaluated by the reference."""
