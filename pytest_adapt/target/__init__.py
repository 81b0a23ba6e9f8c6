"""Targets: what is judged, behind one protocol (`protocol`), one file per adapter."""
