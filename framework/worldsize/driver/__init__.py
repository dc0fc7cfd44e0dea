"""What the launching process does: record a run, start and watch its processes, restart them."""
