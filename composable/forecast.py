"""Predict, without the devices, whether a model fits, what is sent, and how long a step takes."""

from composable.extras.forecast.devices import DEVICES, Device, calibrate
from composable.extras.forecast.forecast import Collective, Forecast, Subject, forecast
from composable.extras.forecast.plans import Comparison, Plan, Suggestion, compare, suggest
from composable.extras.forecast.stages import Pipeline, forecast_stages

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
