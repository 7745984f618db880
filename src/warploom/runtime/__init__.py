"""Load, launch, check and time cubins: the one road to the GPU."""

from warploom.runtime.correctness import CheckReport, CheckSettings
from warploom.runtime.device import CudaError
from warploom.runtime.launch import Buffer, LaunchSpec, Null, Pointer, Scalar, TensorMap
from warploom.runtime.measurer import LocalMeasurer
from warploom.runtime.session import Baseline, MeasureSettings
from warploom.runtime.timing import Timing, TimingSettings
from warploom.runtime.workbench import Workload

__all__ = [
    "Baseline",
    "Buffer",
    "CheckReport",
    "CheckSettings",
    "CudaError",
    "LaunchSpec",
    "LocalMeasurer",
    "MeasureSettings",
    "Null",
    "Pointer",
    "Scalar",
    "TensorMap",
    "Timing",
    "TimingSettings",
    "Workload",
]
