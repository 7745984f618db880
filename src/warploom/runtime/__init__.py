"""Load, launch, check and time cubins; keep what was measured."""

from warploom.runtime.correctness import CheckReport, CheckSettings
from warploom.runtime.device import CudaError, DeviceInfo
from warploom.runtime.launch import Buffer, LaunchSpec, Null, Pointer, Scalar, TensorMap
from warploom.runtime.measurer import LocalMeasurer, Measurer
from warploom.runtime.session import OUTCOMES, Baseline, Measurement, MeasureSettings
from warploom.runtime.stats import Ratio
from warploom.runtime.store import Deployment, Key, Result, Store, read_deployment, write_deployment
from warploom.runtime.timing import Timing, TimingSettings
from warploom.runtime.workbench import Workload, image_digest

__all__ = [
    "OUTCOMES",
    "Baseline",
    "Buffer",
    "CheckReport",
    "CheckSettings",
    "CudaError",
    "Deployment",
    "DeviceInfo",
    "Key",
    "LaunchSpec",
    "LocalMeasurer",
    "MeasureSettings",
    "Measurement",
    "Measurer",
    "Null",
    "Pointer",
    "Ratio",
    "Result",
    "Scalar",
    "Store",
    "TensorMap",
    "Timing",
    "TimingSettings",
    "Workload",
    "image_digest",
    "read_deployment",
    "write_deployment",
]
