"""Injectable faults: real ones that engines shipped, one file per class, installed from outside the target."""

from pytest_adapt.faults.registry import Fault, Seams, UnknownFault, catalogue, get

__all__ = ["Fault", "Seams", "UnknownFault", "catalogue", "get"]
