"""Data, tensor and pipeline parallelism on one mesh of processes (Narayanan et al. 2021, arXiv 2104.04473)."""
