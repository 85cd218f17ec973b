"""Will it fit, what is sent, how long does a step take: answered without the devices."""

from composable.forecast.devices import DEVICES, Device, calibrate
from composable.forecast.forecast import forecast
from composable.forecast.plans import Comparison, Plan, Suggestion, compare, suggest
from composable.forecast.result import Collective, Forecast, Subject
from composable.forecast.stages import Pipeline, forecast_stages

__all__ = [
    "DEVICES",
    "Collective",
    "Comparison",
    "Device",
    "Forecast",
    "Pipeline",
    "Plan",
    "Subject",
    "Suggestion",
    "calibrate",
    "compare",
    "forecast",
    "forecast_stages",
    "suggest",
]
