"""The source of a quantizer's plan: its calibration, a saved folder, or loaded scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantizer.calibration.bias_correction import BiasCorrection
from quantizer.calibration.session import CalibrationSession
from quantizer.calibration.settings import Settings
from quantizer.common.batches import run_batches
from quantizer.common.data.sizes import DataSizes
from quantizer.common.distributed import get_world_size
from quantizer.common.fingerprint import Fingerprint
from quantizer.common.torch_modes import ordinary_tensors
from quantizer.errors import CalibrationError
from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.observe.snapshot import seen_inputs
from quantizer.plan.site_plan import Plan
from quantizer.plan.weight_scales import ScaledWeights


@dataclass(frozen=True, slots=True, eq=False)
class Empty:
    """The state before any calibration."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """The state with a calibration, whose ``session`` gives the plan from its first batch on."""

    session: CalibrationSession


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """A fixed plan until the next calibration: that of a folder, or one with loaded scales.

    Attributes:
        plan: the plan.
        products: the products that torch computed in calibration.
        regions: the modules whose values in calibration float16 cannot hold.
        fingerprint: the checksum of the weights in calibration; None for a model that was quantized in place.
        scales_replaced: whether the scales were loaded, and are not those of calibration.
        observed: the calibration session, or the statistics of a folder, with which to resume; None: neither.
    """

    plan: Plan
    products: tuple[CountedProduct, ...]
    regions: Float32Modules
    fingerprint: Fingerprint | None
    scales_replaced: bool
    observed: CalibrationSession | bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class Resuming:
    """A fixed plan, until the first new batch in the ``session`` that resumes its calibration."""

    held: Held
    session: CalibrationSession


@dataclass(frozen=True, slots=True, eq=False)
class Inherited:
    """The statistics and kept batches of another quantizer; there is no plan before ``bind`` gives the model."""

    snapshot: bytes
    kept: ReplayBatches | None
    fingerprint: Fingerprint | None


PlanState = Empty | Calibrated | Held | Resuming | Inherited


class PlanSource:
    """The plan before any fallback, and where it comes from.

    Attributes:
        state: the current state; states are immutable, so that a former one can be restored.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.state: PlanState = Empty()

    # -- from one state to the next --------------------------------------------------------------------------------

    def inherit_from(self, other: PlanSource, *, share: bool = False) -> None:
        """Take the statistics of another plan source; the plan for this configuration follows after ``bind``."""
        if share and other._settings == self._settings and isinstance(other.state, Calibrated):
            self.state = other.state
            return
        snapshot = other.seen()
        if snapshot is None:
            raise CalibrationError(
                "for_backend() needs what calibration saw, which the folder that this Quantizer was loaded from does "
                "not hold; calibrate again"
            )
        kept = None if other.calibration is None else other.calibration.observation().kept
        self.state = Inherited(snapshot, kept, other.fingerprint)

    def bind(self, model: nn.Module) -> bool:
        """Start a session for the model from inherited statistics; return whether there were any."""
        match self.state:
            case Inherited(snapshot, kept, fingerprint):
                self.state = Calibrated(
                    CalibrationSession(self._settings, model, snapshot, anew=True, kept=kept, fingerprint=fingerprint)
                )
                return True
            case _:
                return False

    def replace(self, plan: Plan) -> None:
        """Use another plan from now on; the counted products stay."""
        fingerprint, products, regions = self.fingerprint, self.products(), self.regions()
        self.state = Held(
            plan=plan,
            products=products,
            regions=regions,
            fingerprint=fingerprint,
            scales_replaced=True,
            observed=self._observed,
        )

    def start(self, model: nn.Module) -> nn.Module:
        """Return the proxy of a new calibration."""
        session = CalibrationSession(self._settings, model)
        self.state = Calibrated(session)
        return session.proxy

    def resume(self, model: nn.Module) -> nn.Module:
        """Return the proxy with which the calibration continues: that of this quantizer, or of the loaded folder."""
        match self.state:
            case Held(observed=bytes(snapshot)) as held:
                session = CalibrationSession(self._settings, model, snapshot, fingerprint=held.fingerprint)
                self.state = Resuming(held, session)
            case Calibrated(session) | Resuming(session=session) | Held(observed=CalibrationSession() as session):
                if session.has_weights_of(model):
                    session.resume()
                else:
                    # The proxy of the session computes with former parameters of the model.
                    seen, kept = session.seen(), session.observation().kept
                    session = CalibrationSession(
                        self._settings, model, seen, anew=True, kept=kept, fingerprint=session.fingerprint
                    )
                self.state = Calibrated(session)
            case _:
                raise CalibrationError(
                    "calib(resume=True) needs an earlier calib() of this Quantizer, or a folder whose quantizer kept "
                    "what it observed"
                )
        return session.proxy

    def run(self, proxy: nn.Module, batches: Any, *, rows: int | None, progress: bool | None, split: bool) -> None:
        """Run batches through the proxy of the current calibration; see ``Quantizer.calibrate``."""
        assert self.calibration is not None
        dealt = self.calibration.dealt()
        mine = dealt.is_mine if split else lambda batch: True
        count = run_batches(proxy, batches, progress, rows=rows, doubt=True, is_mine=mine)
        # With several ranks, a rank may have no data of its own.
        if count == 0 and (split or get_world_size() == 1):
            raise CalibrationError("the calibration data is empty: at least one batch is needed")
        if split:
            dealt.check()

    def warn_of_constants(self) -> None:
        """Warn of activations that had one value in all of the current calibration; of several ranks all must call."""
        if self.calibration is not None:
            self.calibration.warn_of_constants()

    # -- facts of a state -----------------------------------------------------------------------------------------

    def plan(self, in_float: Mapping[str, str] | None = None, correction: BiasCorrection | None = None) -> Plan:
        """Return the plan of all groups; see ``CalibrationSession.decide`` for groups that are float."""
        with ordinary_tensors():
            match self._deciding:
                case Held(plan=plan):
                    return plan
                case CalibrationSession() as session:
                    return session.decide(in_float, correction)
                case Inherited():
                    raise CalibrationError(
                        "what calibration saw is not decided for this backend yet, as this Quantizer has not seen the "
                        "model: call quantize(model) first"
                    )
                case None:
                    raise CalibrationError(
                        "nothing was calibrated yet: run data through calib(model), or call calibrate(model, batches)"
                    )

    def of_single_sites(self, plan: Plan) -> Plan:
        """Return a plan as it is measured site by site, see ``CalibrationSession``; a plan of a folder as it is."""
        deciding = self._deciding
        return deciding.of_single_sites(plan) if isinstance(deciding, CalibrationSession) else plan

    def correction(self) -> BiasCorrection | None:
        """Return the correction of biases for several fallbacks of the plan; None if there is none."""
        deciding = self._deciding
        return deciding.correction() if isinstance(deciding, CalibrationSession) else None

    def products(self) -> tuple[CountedProduct, ...]:
        """Return the products that torch computed in calibration."""
        match self._deciding:
            case Held(products=products):
                return products
            case CalibrationSession() as session:
                return session.products()
            case _:
                return ()

    def sizes(self) -> DataSizes | None:
        """Return the open axes and the sizes of what calibration saw; None: nothing, or always one size."""
        match self._observed:
            case CalibrationSession() as session:
                return DataSizes.of_shapes(session.observation().inputs)
            case bytes(snapshot):
                return DataSizes.of_shapes(seen_inputs(snapshot))
            case _:
                return None

    def regions(self) -> Float32Modules:
        """Return the modules whose values float16 cannot hold; none for a model that was quantized in place."""
        match self._deciding:
            case Held(regions=regions):
                return regions
            case CalibrationSession() as session:
                return session.regions()
            case _:
                return Float32Modules()

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The checksum of the weights in calibration; None without a calibration."""
        deciding = self._deciding
        return None if deciding is None else deciding.fingerprint

    @property
    def scales_replaced(self) -> bool:
        """True if the scales were loaded, and are not those of calibration."""
        deciding = self._deciding
        return isinstance(deciding, Held) and deciding.scales_replaced

    @property
    def decided(self) -> bool:
        """True if there is a plan."""
        state = self.state
        return state.session.has_any if isinstance(state, Calibrated) else isinstance(state, Held | Resuming)

    @property
    def counts(self) -> bool:
        """True if a new calibration would replace something, found without communication between ranks."""
        state = self.state
        return state.session.has_begun if isinstance(state, Calibrated) else not isinstance(state, Empty)

    @property
    def rows(self) -> int:
        """The number of rows that this process has calibrated on."""
        return 0 if self.calibration is None else self.calibration.extent()[1]

    def described(self) -> str:
        """Return the state in a few words, without making a plan and without communication between ranks."""
        match self._deciding:
            case CalibrationSession() as session if session.has_begun:
                batches, rows, sites = session.extent()
                return f"calibrated on {f'{rows} rows' if rows else f'{batches} batches'}, {sites} sites"
            case Held(plan=plan):
                return f"scales loaded, {len(plan)} sites" if self.scales_replaced else f"calibrated, {len(plan)} sites"
            case Inherited():
                return "calibrated for another backend, no model yet"
            case _:
                return "not calibrated"

    @property
    def calibration(self) -> CalibrationSession | None:
        """The calibration session of this quantizer; None: there was none."""
        observed = self._observed
        return observed if isinstance(observed, CalibrationSession) else None

    @property
    def weights(self) -> ScaledWeights | None:
        """The scales of weights that plans of the calibration were made with; None without a calibration."""
        return None if self.calibration is None else self.calibration.weights

    def seen(self) -> bytes | None:
        """Return the statistics of calibration as the bytes of a folder; None: there are none."""
        observed = self._observed
        return observed.seen() if isinstance(observed, CalibrationSession) else observed

    @property
    def _deciding(self) -> Held | CalibrationSession | Inherited | None:
        """The source of the plan in the current state; None without a calibration."""
        match self.state:
            case Calibrated(session):
                return session
            case Resuming(held, session):
                return session if session.has_new else held
            case Empty():
                return None
            case Held() | Inherited() as state:
                return state

    @property
    def _observed(self) -> CalibrationSession | bytes | None:
        """The session with the statistics of calibration, or their bytes; None: there are none."""
        match self.state:
            case Calibrated(session) | Resuming(session=session):
                return session
            case Held(observed=observed):
                return observed
            case Inherited(snapshot=snapshot):
                return snapshot
            case Empty():
                return None
