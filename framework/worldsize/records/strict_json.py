"""Values as strict JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """Write NaN and infinities, which JSON lacks, as "nan", "inf" and "-inf", and every key as a string."""
    if isinstance(value, dict):
        return {str(key): strict(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [strict(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
