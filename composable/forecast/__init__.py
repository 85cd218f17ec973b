"""Will it fit, what is sent, how long does a step take: answered without the devices."""

from composable.forecast.devices import DEVICES, Device, calibrate
from composable.forecast.forecast import forecast
from composable.forecast.plans import Comparison, Plan, Suggestion, compare, suggest
from composable.forecast.result import Collective, Forecast, Subject

__all__ = [
    "DEVICES",
    "Collective",
    "Comparison",
    "Device",
    "Forecast",
    "Plan",
    "Subject",
    "Suggestion",
    "calibrate",
    "compare",
    "forecast",
    "suggest",
]
