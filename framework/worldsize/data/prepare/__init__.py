"""Makes token shards of text, once, before a run."""
