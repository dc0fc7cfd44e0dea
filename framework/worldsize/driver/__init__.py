"""The launching process: it records a run, starts and watches its processes, and restarts them."""
