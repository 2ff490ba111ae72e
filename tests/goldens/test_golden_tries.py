"""A search that freezes one proxy again and again, on every golden net: bit for bit what new frozen proxies give."""

from __future__ import annotations

import random

import pytest
import torch
from calibrated import make_calibrated
from daily import some_daily
from golden_nets import NETS
from helpers import Snapshot, assert_same
from tries import seen, without

from quantizer.plan.apply import FrozenTries, frozen_proxy

pytest.importorskip("transformers", reason="some of the nets are transformers models: install enginequant[hf]")

_TRIES = 5


@pytest.mark.parametrize("name", some_daily(sorted(NETS), 6))
def test_every_try_equals_a_new_frozen_proxy(name: str) -> None:
    net, choice = NETS[name], random.Random(name)
    torch.manual_seed(0)
    model, data = net.model().eval(), net.data(9)
    batches = [net.data(seed) for seed in range(2)]
    plan = make_calibrated(
        model, batches, **{"backend": "tensorrt" if name == "wide" else "openvino", **net.config}
    ).plan
    before, tries, built = Snapshot.of(model), FrozenTries(model), set()
    for share in [0.0, *(choice.random() for _ in range(_TRIES)), 1.0, 0.0]:
        tried = without(plan, choice, share)
        found = seen(tries.of(tried), data)
        built.add(id(tries.of(tried)))
        assert_same(found, seen(frozen_proxy(model, tried), data))
    before.assert_unchanged(model)
    # torch's recurrent layers say themselves how they are copied, so that each try builds a proxy.
    assert (len(built) == 1) == (name != "recurrent")
