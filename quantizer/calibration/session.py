"""One calibration of one model: the proxy that observes, and the plan that follows from what all processes saw."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from typing import Any

from torch import nn

from quantizer.calibration.choose_ranges import make_plan
from quantizer.calibration.proxied import Proxied
from quantizer.calibration.proxied import proxied_copy
from quantizer.calibration.settings import make_observation
from quantizer.calibration.settings import replays_batches
from quantizer.common.distributed import all_gather_bytes
from quantizer.common.distributed import get_rank
from quantizer.common.distributed import get_world_size
from quantizer.common.fingerprint import Fingerprint
from quantizer.common.fingerprint import warn_of_other_weights
from quantizer.config import QuantizerConfig
from quantizer.errors import CalibrationError
from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.observe.observation import Observation
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.observe.snapshot import restored
from quantizer.observe.snapshot import snapshot
from quantizer.observe.statistics import Seen
from quantizer.plan.site_plan import Plan
from quantizer.proxy.local_hook import LocalHook
from quantizer.proxy.model_sharing import OwnBuffers

__all__ = ["CalibrationSession", "merge_across_ranks"]


class CalibrationSession:
    """The statistics of all batches that went through ``proxy``, and the plan that they give.

    Under ``torch.distributed`` every rank calibrates on data of its own. The first question about the outcome gathers
    what all of them saw, so every rank must ask it; it is gathered again after ``resume()``, and when more data came to
    every rank. Each rank then has the plan that one process would have made of all the data.

    Attributes:
        proxy: gives the float outputs and observes.
        fingerprint: the weights that it observed with; None: nothing went through it yet.
    """

    def __init__(
        self,
        config: QuantizerConfig,
        model: nn.Module,
        earlier: bytes | None = None,
        *,
        anew: bool = False,
        kept: ReplayBatches | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """
        Args:
            config: of the quantizer.
            model: the float model.
            earlier: what ``seen`` gave, to go on with.
            anew: ranges that were chosen by running batches are chosen anew.
            kept: the batches for that.
            fingerprint: the weights that made ``earlier``.

        Raises:
            ConfigError: a rule matches nothing in the model.
            CalibrationError: ``earlier`` is of another model.
        """
        self._proxied = proxied_copy(config, model)
        self.proxy = self._proxied.module
        self._model = weakref.ref(model)
        self.fingerprint = fingerprint
        self._weights_noted = False
        self._pending: Fingerprint | None = None
        self.proxy.register_forward_pre_hook(LocalHook(self._look_at_weights))
        self.proxy.register_forward_hook(LocalHook(self._note_weights))
        self._observation = make_observation(self._proxied)
        # Every rank has read the same folder: its contents count once.
        if earlier is not None and get_rank() == 0:
            self._observation.seen.add(_restored(earlier, self.proxy, self._observation))
        if anew:
            self._observation.seen.forget_choices()
            if kept is not None:
                self._observation.seen.kept = kept.copy()
        self._began_with = self._observation.seen.batches
        # Going on later, or while the model is trained, the proxy follows it.
        buffers = OwnBuffers(self.proxy, model)
        self._observation.attach(self.proxy, self._proxied.sites, buffers.refresh)
        self._gathered: tuple[int, Seen] | None = None
        self._warned = False

    @property
    def has_new(self) -> bool:
        """True if a batch came since it began; of several ranks, if one may have come to any of them."""
        return get_world_size() > 1 or self._observation.seen.batches > self._began_with

    @property
    def has_any(self) -> bool:
        """True if any rank has seen a batch, or took up what an earlier calibration saw."""
        return self.observation().batches > 0

    @property
    def has_begun(self) -> bool:
        """True if this process has seen a batch, or took up what was seen; no other rank is asked."""
        return self._gathered is not None or self._observation.seen.batches > 0

    def resume(self) -> None:
        """More data is to come, for one rank or for all of them."""
        self._gathered = None
        self._weights_noted = False

    def has_weights_of(self, model: nn.Module) -> bool:
        """Return whether the proxy computes with the parameters that ``model`` has now, and not with former ones."""
        now = dict(model.named_parameters())
        return all(now.get(path) is parameter for path, parameter in self.proxy.named_parameters())

    def _look_at_weights(self, proxy: nn.Module, args: Any) -> None:
        """At the first batch: later ones come with the same weights, and a checksum costs a pass over them."""
        if not self._weights_noted:
            self._pending = Fingerprint.of(proxy)

    def _note_weights(self, proxy: nn.Module, args: Any, result: Any) -> None:
        """Take note of the weights once a batch went through as a whole."""
        if self._pending is None:
            return
        now, self._pending, self._weights_noted = self._pending, None, True
        if self.fingerprint is not None:
            warn_of_other_weights(self.fingerprint, now)
        self.fingerprint = now

    def _renew_weights(self, whole: Seen) -> None:
        """Let the weights that were seen be those that the model has now: a parameter may have been replaced.

        Raises:
            CalibrationError: the model has no such parameter, or one of another shape.
        """
        model = self._model()
        if model is None:
            return
        now = dict(model.named_parameters())
        for path, record in whole.records.items():
            for seen in record.operands.values():
                known = seen.weight
                if known is None or known.path is None or now.get(known.path) is known.parameter:
                    continue
                parameter = now.get(known.path)
                if parameter is None or parameter.shape != known.parameter.shape:
                    raise CalibrationError(
                        f"the model changed since it was calibrated: {known.path} of {path} had the shape "
                        f"{list(known.parameter.shape)}, and "
                        + ("is gone" if parameter is None else f"has {list(parameter.shape)} now")
                        + "; calibrate it again"
                    )
                seen.weight = replace(known, parameter=parameter)

    def decide(self) -> Plan:
        """Return what becomes of every site.

        Raises:
            CalibrationError: no rank has seen any data, the ranks have different configurations, or ranges are to be
                chosen by running batches and none are here.
        """
        whole = self.observation()
        if whole.batches == 0:
            raise CalibrationError(
                "nothing was calibrated yet: run data through calib(model), or call calibrate(model, batches)"
            )
        if whole.only_zeros and not self._warned:
            self._warned = True
            warnings.warn(
                f"every input of all {whole.batches} calibration batches is zero, so that no range says anything about "
                "real data: calibrate with real data",
                stacklevel=3,
            )
        choosing = replays_batches(self._proxied.config) and whole.chosen_at != whole.batches
        if choosing and get_world_size() == 1 and not any(True for _ in whole.kept or ()):
            raise CalibrationError(
                "with a list of percentiles, calibrator 'auto' or smooth, each target's ranges are chosen by running "
                "batches, and a folder keeps none: call for_backend() before save(), or calibrate(model, batches, "
                "resume=True) with a few batches"
            )
        self._renew_weights(whole)
        # Choosing ranges runs the proxy again.
        with self._observation.paused(self._proxied.sites):
            return make_plan(self._proxied, whole)

    def products(self) -> tuple[CountedProduct, ...]:
        """Return what torch computed."""
        return self.observation().counted()

    def regions(self) -> Float32Modules:
        """Return which modules float16 cannot hold."""
        return self.observation().regions

    def seen(self) -> bytes:
        """Everything that was seen, to be saved."""
        return snapshot(self.observation())

    def observation(self) -> Seen:
        """Return what all ranks saw."""
        batches = self._observation.seen.batches
        if self._gathered is None or self._gathered[0] != batches:
            whole = merge_across_ranks(self._proxied, self._observation)
            self._gathered = (batches, whole)
        return self._gathered[1]


def merge_across_ranks(proxy: Proxied, observation: Observation) -> Seen:
    """Return what every rank has observed, together; of one process, its own observation. All ranks must call this.

    Raises:
        CalibrationError: the ranks have different configurations or models.
    """
    mine = observation.seen
    if get_world_size() == 1:
        return mine
    configs = all_gather_bytes(proxy.config.model_dump_json().encode())
    for rank, other in enumerate(configs):
        if other != configs[0]:
            raise CalibrationError(f"rank {rank} calibrates with another configuration than rank 0; give all the same")
    whole = Seen.of_sites(mine.records, None if mine.kept is None else mine.kept.shared())
    for seen in all_gather_bytes(snapshot(mine)):
        whole.add(_restored(seen, proxy.module, observation))
    return whole


def _restored(data: bytes, proxy: nn.Module, observation: Observation) -> Seen:
    return restored(data, proxy, observation.seen.records.keys(), observation.make)
