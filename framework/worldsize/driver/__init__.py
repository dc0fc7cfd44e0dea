"""The launching process: it records a run, starts and monitors its processes, and restarts them."""
