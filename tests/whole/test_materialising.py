"""Models that are annotated before they have values, and get them where they are: made, loaded, or initialised in place."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable import fully_shard, replicate
from tests.helpers.compare import full
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool, current_device, need_devices


def _blank(annotate: Callable[[nn.Module], object]) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    annotate(model)
    return model


def _shard(model: nn.Module) -> None:
    fully_shard(model, policy={nn.Linear})


def _mix(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    replicate(model[0])
    fully_shard(model)


_VERBS = {"fully_shard": _shard, "replicate": replicate, "replicate inside fully_shard": _mix}


def _forward_too_early(verb: str, cure: str) -> list[str]:
    """What the first forwards say; then the model gets its values and trains."""
    model = _blank(_VERBS[verb])
    x = torch.ones(2, 4, device=current_device())
    said = [refusal(lambda: model(x))]
    assert isinstance(model, nn.Sequential)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(current_device())
    for number, parameter in enumerate(plain.parameters()):
        nn.init.constant_(parameter, 0.5 + number)
    if cure == "load":
        model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
    else:
        model[0].to_empty(device=current_device())
        said.append(refusal(lambda: model(x)))
        model[1].to_empty(device=current_device())
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.5 + number)
    for each in (model, plain):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one), other.detach())
    return said


@pytest.mark.parametrize("cure", ["load", "to_empty"])
@pytest.mark.parametrize("verb", _VERBS)
def test_a_forward_on_the_meta_device_is_refused_by_name_and_trains_once_there_are_values(
    pool: Pool, verb: str, cure: str, device: str
) -> None:
    need_devices(device, 2)
    said = pool.run(2, _forward_too_early, verb, cure, device=device)
    assert said[0] == said[1]
    units = {
        "fully_shard": ["weight' of unit '0", "weight' of unit '1"],
        "replicate": ["0.weight' of unit 'root", "1.weight' of unit 'root"],
    }
    expected = units.get(verb, ["1.weight' of unit '", "1.weight' of unit '"])
    for text, where in zip(said[0], expected, strict=False):
        assert text.startswith(f"PhaseError: parameter '{where}'"), text


def _text() -> str:
    model = _blank(_shard)
    return refusal(lambda: model(torch.ones(2, 4)))


def test_what_is_said_of_a_parameter_on_the_meta_device(pool: Pool) -> None:
    assert_text(
        same_on_all(pool.run(2, _text)),
        """PhaseError: parameter 'weight' of unit '0' is still on the meta device: it has a shape, but no values to compute with. Materialise the model before its first forward: call model.to_empty(device=...) and initialise it, or model.load_state_dict(state_dict, assign=True)""",
    )
