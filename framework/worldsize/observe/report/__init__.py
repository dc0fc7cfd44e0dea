"""One self-contained HTML page of a run, a sweep or a scaling study: no script, nothing that is fetched."""
