"""Operators one by one: one definition gives inputs, reference, budget, gradient, support and speed of each.

`catalogue` lists them; `pytest_adapt.operators.suite` is what the suite ``operators`` calls.
"""

from pytest_adapt.operators.case import Case, CaseError
from pytest_adapt.operators.catalogue import NAMES, catalogue, parse_case

__all__ = ["NAMES", "Case", "CaseError", "catalogue", "parse_case"]
