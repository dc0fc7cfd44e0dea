"""One self-contained HTML page about a run, a sweep or a scaling study, without scripts or external files."""
