"""Checks of the harness itself, without running it: requirement coverage, lint, and headroom of budgets over time."""
