"""Models that must train as if no annotation were there; knows no annotation but the experts'
own.
"""

from __future__ import annotations

from tests.helpers.battery.case import DTYPE, Case
from tests.helpers.battery.odd import ODD
from tests.helpers.battery.outputs import OUTPUTS
from tests.helpers.battery.ready_made import READY_MADE
from tests.helpers.battery.transformers import TRANSFORMERS

BATTERY: dict[str, Case] = {
    case.name: case for case in (*TRANSFORMERS, *READY_MADE, *ODD, *OUTPUTS)
}

__all__ = ["BATTERY", "DTYPE", "Case"]
