"""Paged key-value cache: groups (what a layer keeps per token), block pool, prefix cache."""
