"""The judge judged: every fault of the registry, every wrong comparator, and how small an error is still seen."""
