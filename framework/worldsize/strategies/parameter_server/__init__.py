"""Parameter servers: servers own the parameters; workers push gradients and pull weights (Li et al. 2014, OSDI)."""
