"""What a target costs: memory now, time beside it. Figures of one machine and one run, for engineers."""
