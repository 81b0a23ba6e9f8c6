"""Attention kinds, each one file: projections, rotation, cache, attention op, output projection."""
