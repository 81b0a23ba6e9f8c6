"""Routed feed-forward layers."""
