"""What a quantizer goes by: what its calibration decided, what a folder holds, or scales from elsewhere."""

from __future__ import annotations

from torch import nn

from quantizer.calibration.session import CalibrationSession
from quantizer.common.fingerprint import Fingerprint
from quantizer.config import QuantizerConfig
from quantizer.errors import CalibrationError
from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import UnrewrittenSource

__all__ = ["PlanSource"]


class PlanSource:
    """The plan before any fallback, wherever it comes from.

    Attributes:
        calibration: the one that runs or ran here; None: there was none.
    """

    def __init__(self, config: QuantizerConfig) -> None:
        self._config = config
        self.calibration: CalibrationSession | None = None
        # What a folder or scales from elsewhere say counts, until the next calibration.
        self._loaded: Plan | None = None
        self._loaded_products: tuple[CountedProduct, ...] = ()
        self._loaded_regions = Float32Modules()
        self._loaded_fingerprint: Fingerprint | None = None
        self._until_data = False  # what was loaded holds until calibration goes on
        self._earlier: bytes | None = None
        self._waits = False  # decides from what another saw, once the model is there
        self._kept: ReplayBatches | None = None
        self._scales_replaced = False

    def load(
        self,
        plan: Plan,
        products: tuple[CountedProduct, ...],
        regions: Float32Modules,
        observed: bytes | None,
        fingerprint: Fingerprint | None,
        *,
        scales_replaced: bool,
    ) -> None:
        """Take over what a folder holds."""
        self._loaded_regions, self._loaded_fingerprint = regions, fingerprint
        self._loaded, self._loaded_products, self._earlier = plan, products, observed
        self._scales_replaced = scales_replaced

    def follow(self, other: PlanSource) -> None:
        """Decide, for this configuration, from what another saw; once ``show`` has given the model.

        Raises:
            CalibrationError: it kept nothing of what it saw.
        """
        self._earlier = other.seen()
        if self._earlier is None:
            raise CalibrationError(
                "for_backend() needs what calibration saw, which the folder that this Quantizer was loaded from does "
                "not hold; calibrate again"
            )
        self._kept = None if other.calibration is None else other.calibration.observation().kept
        self._loaded_fingerprint = other.fingerprint
        self._waits = True

    def show(self, model: nn.Module, skipped: list[UnrewrittenSource]) -> bool:
        """Give the model to decisions that wait for it; whether they did."""
        if not self._waits:
            return False
        self.calibration = CalibrationSession(
            self._config,
            model,
            skipped,
            self._earlier,
            anew=True,
            kept=self._kept,
            fingerprint=self._loaded_fingerprint,
        )
        self._waits = False
        return True

    def replace(self, plan: Plan) -> None:
        """Go by another plan from now on, with the products that were counted."""
        self._loaded_fingerprint = self.fingerprint
        self._loaded_products, self._loaded_regions = self.products(), self.regions()
        self._loaded, self._until_data, self._scales_replaced = plan, False, True

    def calibrate(self, model: nn.Module, skipped: list[UnrewrittenSource]) -> nn.Module:
        """The proxy of a new calibration."""
        self.calibration = CalibrationSession(self._config, model, skipped)
        self._loaded, self._until_data, self._earlier = None, False, None
        self._waits, self._kept = False, None
        return self.calibration.proxy

    def resume(self, model: nn.Module, skipped: list[UnrewrittenSource]) -> nn.Module:
        """The proxy of the calibration that ran here, or in the quantizer that wrote the folder, to go on with.

        Raises:
            CalibrationError: there is none, or it is of another model.
        """
        if self.calibration is not None:
            if self.calibration.has_weights_of(model):
                self.calibration.resume()
            else:
                # Its proxy computes with the parameters that the model had before.
                former = self.calibration
                self.calibration = CalibrationSession(
                    self._config,
                    model,
                    skipped,
                    former.seen(),
                    kept=former.observation().kept,
                    fingerprint=former.fingerprint,
                )
            self._loaded, self._until_data = None, False
            return self.calibration.proxy
        if self._earlier is None:
            raise CalibrationError(
                "calib(resume=True) needs an earlier calib() of this Quantizer, or a folder whose quantizer kept "
                "what it observed"
            )
        self.calibration = CalibrationSession(
            self._config, model, skipped, self._earlier, fingerprint=self._loaded_fingerprint
        )
        self._until_data = True
        return self.calibration.proxy

    def plan(self) -> Plan:
        """What was decided.

        Raises:
            CalibrationError: nothing was calibrated yet.
        """
        if self._loaded is not None and not self._outdated:
            return self._loaded
        if self._waits:
            raise CalibrationError(
                "what calibration saw is not decided for this backend yet, as this Quantizer has not seen the model: "
                "call quantize(model) first"
            )
        if self.calibration is None:
            raise CalibrationError(
                "nothing was calibrated yet: run data through calib(model), or call calibrate(model, batches)"
            )
        return self.calibration.plan()

    @property
    def decided(self) -> bool:
        """Whether there is a plan."""
        return self._loaded is not None or (self.calibration is not None and self.calibration.has_any)

    @property
    def counts(self) -> bool:
        """Whether there is something that a new calibration would replace; no other rank is asked."""
        return self._loaded is not None or self._waits or (self.calibration is not None and self.calibration.has_begun)

    def products(self) -> tuple[CountedProduct, ...]:
        """What torch computed in calibration."""
        if self._loaded is not None and not self._outdated:
            return self._loaded_products
        return self.calibration.products() if self.calibration is not None else ()

    def regions(self) -> Float32Modules:
        """Which modules float16 cannot hold; none, where nothing was calibrated (a model quantized in place)."""
        if self._loaded is not None and not self._outdated:
            return self._loaded_regions
        return self.calibration.regions() if self.calibration is not None else Float32Modules()

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The weights that calibration saw; None: it is from before that was kept, or there was none."""
        if self._loaded is not None and not self._outdated:
            return self._loaded_fingerprint
        return self.calibration.fingerprint if self.calibration is not None else self._loaded_fingerprint

    def seen(self) -> bytes | None:
        """What calibration observed, for a folder."""
        return self._earlier if self.calibration is None else self.calibration.seen()

    @property
    def scales_replaced(self) -> bool:
        """Whether scales from elsewhere count, and not those of the calibration."""
        return self._scales_replaced and self._loaded is not None and not self._outdated

    @property
    def _outdated(self) -> bool:
        return self._until_data and self.calibration is not None and self.calibration.has_new
