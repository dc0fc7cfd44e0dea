"""One process of a run, from its run folder to its exit code: it trains, serves or examines the cluster."""
