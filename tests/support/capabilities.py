"""Print the values of ATEN_CPU_CAPABILITY below this CPU's level; torch accepts higher ones, but then crashes."""

from __future__ import annotations

import torch

WIDTHS = ("DEFAULT", "AVX2", "AVX512")  # on x86; other CPUs have only one level

if __name__ == "__main__":
    widest = torch.backends.cpu.get_cpu_capability()
    print(*(name.lower() for name in WIDTHS[: WIDTHS.index(widest)]) if widest in WIDTHS else ())
