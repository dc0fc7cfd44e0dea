"""Self-contained HTML page, without scripts, about a run, a sweep or a scaling study."""
