"""The source of a quantizer's plan: its calibration, a saved folder, or scales from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quantizer.calibration.session import CalibrationSession
from quantizer.common.fingerprint import Fingerprint
from quantizer.config import QuantizerConfig
from quantizer.errors import CalibrationError
from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.plan.site_plan import Plan

__all__ = ["Calibrated", "Empty", "Held", "Inherited", "PlanSource", "PlanState", "Resuming"]


@dataclass(frozen=True, slots=True, eq=False)
class Empty:
    """Nothing was calibrated."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """The state in which ``session`` decides, from its first batch on."""

    session: CalibrationSession


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """A plan that stays until the next calibration: a folder's, or one with scales from elsewhere.

    Attributes:
        plan: the one that counts.
        products: what torch computed in the calibration before it.
        regions: the modules that float16 could not hold then.
        fingerprint: the weights that calibration saw; None: it is from before that was kept.
        scales_replaced: its scales are not those of the calibration.
        observed: the calibration that ran here, or what a folder keeps of one, to go on with; None: neither.
    """

    plan: Plan
    products: tuple[CountedProduct, ...]
    regions: Float32Modules
    fingerprint: Fingerprint | None
    scales_replaced: bool
    observed: CalibrationSession | bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class Resuming:
    """A plan that stays until data comes to the ``session`` that goes on from it."""

    held: Held
    session: CalibrationSession


@dataclass(frozen=True, slots=True, eq=False)
class Inherited:
    """The statistics of another quantizer, with the batches that it kept, until the model is there to decide for."""

    snapshot: bytes
    kept: ReplayBatches | None
    fingerprint: Fingerprint | None


PlanState = Empty | Calibrated | Held | Resuming | Inherited


class PlanSource:
    """The plan before any fallback, wherever it comes from.

    Attributes:
        state: what there is to go by; it never changes itself, so whoever keeps it can put it back.
    """

    def __init__(self, config: QuantizerConfig) -> None:
        self._config = config
        self.state: PlanState = Empty()

    # -- from one state to the next --------------------------------------------------------------------------------

    def inherit_from(self, other: PlanSource) -> None:
        """Decide, for this configuration, from what another saw; once ``bind`` has given the model.

        Raises:
            CalibrationError: it kept nothing of what it saw.
        """
        snapshot = other.seen()
        if snapshot is None:
            raise CalibrationError(
                "for_backend() needs what calibration saw, which the folder that this Quantizer was loaded from does "
                "not hold; calibrate again"
            )
        kept = None if other.calibration is None else other.calibration.observation().kept
        self.state = Inherited(snapshot, kept, other.fingerprint)

    def bind(self, model: nn.Module) -> bool:
        """Give the model to what was inherited, and return whether that waited for it."""
        match self.state:
            case Inherited(snapshot, kept, fingerprint):
                self.state = Calibrated(
                    CalibrationSession(self._config, model, snapshot, anew=True, kept=kept, fingerprint=fingerprint)
                )
                return True
            case _:
                return False

    def replace(self, plan: Plan) -> None:
        """Go by another plan from now on, with the products that were counted."""
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
        session = CalibrationSession(self._config, model)
        self.state = Calibrated(session)
        return session.proxy

    def resume(self, model: nn.Module) -> nn.Module:
        """Return the proxy of the calibration that ran here, or in the quantizer that wrote the folder, to go on with.

        Raises:
            CalibrationError: there is none, or it is of another model.
        """
        match self.state:
            case Held(observed=bytes(snapshot)) as held:
                session = CalibrationSession(self._config, model, snapshot, fingerprint=held.fingerprint)
                self.state = Resuming(held, session)
            case Calibrated(session) | Resuming(session=session) | Held(observed=CalibrationSession() as session):
                if session.has_weights_of(model):
                    session.resume()
                else:
                    # Its proxy computes with the parameters that the model had before.
                    seen, kept = session.seen(), session.observation().kept
                    session = CalibrationSession(self._config, model, seen, kept=kept, fingerprint=session.fingerprint)
                self.state = Calibrated(session)
            case _:
                raise CalibrationError(
                    "calib(resume=True) needs an earlier calib() of this Quantizer, or a folder whose quantizer kept "
                    "what it observed"
                )
        return session.proxy

    # -- what a state tells ----------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return what was decided.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        match self._deciding:
            case Held(plan=plan):
                return plan
            case CalibrationSession() as session:
                return session.decide()
            case Inherited():
                raise CalibrationError(
                    "what calibration saw is not decided for this backend yet, as this Quantizer has not seen the "
                    "model: call quantize(model) first"
                )
            case None:
                raise CalibrationError(
                    "nothing was calibrated yet: run data through calib(model), or call calibrate(model, batches)"
                )

    def products(self) -> tuple[CountedProduct, ...]:
        """Return what torch computed in calibration."""
        match self._deciding:
            case Held(products=products):
                return products
            case CalibrationSession() as session:
                return session.products()
            case _:
                return ()

    def regions(self) -> Float32Modules:
        """Return which modules float16 cannot hold; none, where nothing was calibrated (a model quantized in place)."""
        match self._deciding:
            case Held(regions=regions):
                return regions
            case CalibrationSession() as session:
                return session.regions()
            case _:
                return Float32Modules()

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The weights that calibration saw; None: it is from before that was kept, or there was none."""
        deciding = self._deciding
        return None if deciding is None else deciding.fingerprint

    @property
    def scales_replaced(self) -> bool:
        """True if scales from elsewhere count, and not those of the calibration."""
        deciding = self._deciding
        return isinstance(deciding, Held) and deciding.scales_replaced

    @property
    def decided(self) -> bool:
        """True if there is a plan."""
        state = self.state
        return state.session.has_any if isinstance(state, Calibrated) else isinstance(state, Held | Resuming)

    @property
    def counts(self) -> bool:
        """True if there is something that a new calibration would replace; no other rank is asked."""
        state = self.state
        return state.session.has_begun if isinstance(state, Calibrated) else not isinstance(state, Empty)

    @property
    def calibration(self) -> CalibrationSession | None:
        """The one that runs or ran here; None: there was none."""
        observed = self._observed
        return observed if isinstance(observed, CalibrationSession) else None

    def seen(self) -> bytes | None:
        """Return what calibration observed, for a folder."""
        observed = self._observed
        return observed.seen() if isinstance(observed, CalibrationSession) else observed

    @property
    def _deciding(self) -> Held | CalibrationSession | Inherited | None:
        """The session that gives the plan, once it can."""
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
        """The statistics of calibration, or the bytes of them."""
        match self.state:
            case Calibrated(session) | Resuming(session=session):
                return session
            case Held(observed=observed):
                return observed
            case Inherited(snapshot=snapshot):
                return snapshot
            case Empty():
                return None
