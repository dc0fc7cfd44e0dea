"""worldsize: the same PyTorch program trains at any world size."""

import os

from worldsize import moved

# torch.cuda.is_available() then asks NVML, not the driver: processes that are forked later can still use CUDA
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

__version__ = "0.1.0"

moved.register()
