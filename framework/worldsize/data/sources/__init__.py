"""Data sets in files of common formats, with random access to samples."""
