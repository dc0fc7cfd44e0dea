"""One process of a run, which trains, serves or examines the cluster."""
