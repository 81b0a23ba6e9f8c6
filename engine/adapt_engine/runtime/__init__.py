"""Runs requests: options, scheduler, taps, engine."""
