"""Data sets in files of the usual formats, each with random access to its samples."""
