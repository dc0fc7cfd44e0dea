"""Reads the GPUs of this node through NVML, if it has any and the package nvidia-ml-py is installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

_logger = logging.getLogger(__name__)

# bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down although it has work; a cap of its power
# (0x04) is how most GPUs run under load
_SLOWDOWNS = {0x08: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power supply"}


@final
@dataclass(frozen=True)
class GpuReading:
    """One GPU now; None: it does not say.

    Attributes:
        index: Its number on this node, as nvidia-smi counts.
        utilisation: Share of the time in which it computed something.
        memory: Share of its memory that is in use.
        temperature: Degrees Celsius.
        slowed_by: What makes it slower than its load would allow; sorted.
        ecc_errors: Memory errors since its driver was loaded that could not be corrected.
    """

    index: int
    utilisation: float | None
    memory: float | None
    temperature: float | None
    slowed_by: tuple[str, ...]
    ecc_errors: int | None


@final
class Gpus:
    """The GPUs of this node; none if there is no driver, or NVML cannot be loaded.

    Make it in a process of its own: NVML keeps threads and descriptors that no process of the run should inherit.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:  # no driver, or a container without GPUs
            _logger.debug("NVML: %s", error)
        else:
            self._nvml = nvml

    def read(self) -> list[GpuReading]:
        """Read all GPUs, which takes about a millisecond for each."""
        return list(self._readings()) if self._nvml else []

    def _readings(self) -> Iterator[GpuReading]:
        nvml = self._nvml
        for index in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:  # it has fallen off the bus
                continue
            rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
            yield GpuReading(
                index,
                utilisation=None if rates is None else rates.gpu / 100,
                memory=None if memory is None or not memory.total else memory.used / memory.total,
                temperature=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
                slowed_by=_named(self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0),
                ecc_errors=self._ask(
                    nvml.nvmlDeviceGetTotalEccErrors,
                    handle,
                    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    nvml.NVML_VOLATILE_ECC,
                ),
            )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return NVML's answer; None: this GPU or this driver does not answer this question."""
        with suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None


def _named(reasons: int) -> tuple[str, ...]:
    return tuple(sorted({name for bit, name in _SLOWDOWNS.items() if reasons & bit}))
