"""Checked calls of the CUDA driver API and its error classes."""

from __future__ import annotations

from functools import cache
from typing import Any


class DeviceError(RuntimeError):
    """A device is absent, busy, lost, too old or out of memory; names the device and the fix. Exit code 3."""


class NoDevice(DeviceError):
    """There is no NVIDIA driver or no visible GPU at all: the CPU is what is left."""


_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible; use --device cpu",
    "CUDA_ERROR_OUT_OF_MEMORY": "not enough free device memory; lower --max-context or --max-concurrency",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the program was compiled for another GPU; compile again with --arch native",
    "CUDA_ERROR_INVALID_SOURCE": "the program was compiled for another GPU; compile again with --arch native",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "the device is in use by another process in exclusive mode",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver and its user library differ; reboot or reinstall the driver",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel touched foreign memory; the process must end",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran into the display watchdog",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device memory is faulty",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed; the process must end",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the NVLink fabric is not up; start nvidia-fabricmanager",
    "CUDA_ERROR_UNKNOWN": "the device was lost or the driver is in a bad state; look at dmesg, reboot if it stays",
    "CUDA_ERROR_NOT_PERMITTED": "this user may not use the device",
}
MINIMUM_DRIVER = 13000  # the driver must know CUDA 13.0 cubins


@cache
def api() -> Any:
    """The driver module, initialised. Raises DeviceError when there is no usable driver or it is too old."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"cuda.bindings cannot be imported ({error}); pip install cuda-python==13.0.3") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        raise NoDevice(f"the NVIDIA driver library is not installed ({error}); use --device cpu") from error
    if status in (driver.CUresult.CUDA_ERROR_NO_DEVICE, driver.CUresult.CUDA_ERROR_STUB_LIBRARY):
        raise NoDevice(_message(driver, status, "cuInit"))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(_message(driver, status, "cuInit"))
    status, version = driver.cuDriverGetVersion()
    if version < MINIMUM_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}; 13.0 (driver 580) is needed"
        )
    return driver


def _message(driver: Any, status: Any, what: str) -> str:
    name = getattr(status, "name", str(status))
    advice = _ADVICE.get(name)
    return f"{what}: {name}" + (f"; {advice}" if advice else "")


def call(result: tuple[Any, ...], what: str) -> Any:
    """Unwrap a driver result: raise DeviceError naming ``what``, else return the value (None, one or a tuple)."""
    status, *values = result
    driver = api()
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(_message(driver, status, what))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def device_count() -> int:
    """Number of visible devices; 0 when there is no driver."""
    try:
        return int(call(api().cuDeviceGetCount(), "cuDeviceGetCount"))
    except DeviceError:
        return 0
