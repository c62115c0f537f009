"""NVIDIA's library as a test wants it; in `sys.modules` as pynvml, the program finds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GB = 1 << 30


class NVMLError(Exception):
    """The library's own."""


def library(
    devices: list[dict[str, Any]],
    fails_at: int | None = None,
    starts: bool = True,
    cuda: int | None = None,
    driver: str = "580.95",
) -> Any:
    """NVML with these devices: what a device lacks raises, and so does the device at `fails_at`.

    cuda: the driver's, such as 12040 for 12.4; None raises. driver: its own version.
    """

    def get(name: str) -> Any:
        def ask(device: dict[str, Any]) -> Any:
            if name not in device:
                raise NVMLError("Not Supported")
            return device[name]

        return ask

    def handle(number: int) -> dict[str, Any]:
        if number == fails_at:
            raise NVMLError("GPU is lost")
        return devices[number]

    def start() -> None:
        if not starts:
            raise NVMLError("NVML Shared Library Not Found")

    def version() -> int:
        if cuda is None:
            raise NVMLError("Function Not Found")
        return cuda

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=version,
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetMemoryInfo=get("memory"),
        nvmlDeviceGetName=get("name"),
        nvmlDeviceGetCudaComputeCapability=get("capability"),
        nvmlDeviceGetUUID=get("uuid"),
        nvmlDeviceGetCurrPcieLinkGeneration=get("generation"),
        nvmlDeviceGetCurrPcieLinkWidth=get("lanes"),
        nvmlDeviceGetMaxPcieLinkGeneration=get("most_generation"),
        nvmlDeviceGetMaxPcieLinkWidth=get("most_lanes"),
    )


def device(name: str | bytes = "NVIDIA GeForce RTX 3090", **more: Any) -> dict[str, Any]:
    return {"name": name, "memory": SimpleNamespace(total=24 * GB, free=20 * GB), **more}
