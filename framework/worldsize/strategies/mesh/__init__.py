"""Data, tensor and pipeline parallelism on a mesh (Narayanan et al. 2021, arXiv 2104.04473)."""
