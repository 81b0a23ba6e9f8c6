"""pytest-adapt: conformance and regression suites for LLM inference platforms.

Importing this package costs nothing: no numpy, no torch, no target.
"""

__version__ = "0.1.0"
