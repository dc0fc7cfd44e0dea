"""worldsize: the same PyTorch program trains at any world size."""

__version__ = "0.1.0"
