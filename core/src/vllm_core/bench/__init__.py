"""Measurements that belong to the engine itself; `bench/` at the top of the repository holds comparisons with others."""
