"""Reports: one file per format over one result model (`pytest_adapt.verdict.result`)."""
