"""Verdicts: budgets, certified positions and choices, localisation, statuses and the ladder."""
