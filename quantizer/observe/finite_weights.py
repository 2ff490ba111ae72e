"""A check for parameters that are not finite, which names them: their results reach other sites first, or none."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from quantizer.common.tensor_stamp import tensor_version
from quantizer.errors import CalibrationError
from quantizer.proxy.weight import non_finite


class FiniteParameters:
    """A check of a model's parameters before each pass, repeated only for those that changed."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, int, str | None]] = {}

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check all parameters.

        Raises:
            CalibrationError: one has NaN or inf. A parameter with -inf only may be a mask; see ``check_weight``.
        """
        for name, parameter in parameters:
            if self._of(parameter) not in (None, "-inf"):
                raise self._error(name, parameter)

    def check_weight(self, name: str, parameter: Tensor) -> None:
        """Check a parameter that is a weight, so that -inf is no mask.

        Raises:
            CalibrationError: the parameter has NaN or an infinite value.
        """
        if self._of(parameter) is not None:
            raise self._error(name, parameter)

    def _of(self, parameter: Tensor) -> str | None:
        version = tensor_version(parameter)
        known = self._found.get(id(parameter))
        if known is None or known[0] is not parameter or known[1] != version:
            known = self._found[id(parameter)] = (parameter, version, non_finite(parameter))
        return known[2]

    def _error(self, name: str, parameter: Tensor) -> CalibrationError:
        return CalibrationError(
            f"the weight {name!r}, shape {tuple(parameter.shape)}, has {self._of(parameter)} among its values: nothing "
            "that the model gives can be trusted; load its weights again, or look at what its training made of them"
        )
