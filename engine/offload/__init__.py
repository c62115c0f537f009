"""Rows that do not fit device memory: the pool, eviction, prefetch, placement, devices."""
