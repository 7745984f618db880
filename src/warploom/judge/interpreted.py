"""Imported where candidates run on the CPU, before torch and Triton: kernels are interpreted.

Triton reads the variable when it is imported, which `torch._dynamo` does, and its own functions
stay what they were made then.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
