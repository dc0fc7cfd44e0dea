"""Random access to local and remote files, with an on-disk cache."""
