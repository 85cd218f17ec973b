"""The dtypes that parameters are cast from and to, by name; knows no tensor."""

from __future__ import annotations

from typing import Final

REAL: Final = ("float64", "float32", "bfloat16", "float16")
SHORT: Final = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
