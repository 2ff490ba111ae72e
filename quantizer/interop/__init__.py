"""Working beside other tools of the field, in their words."""

from __future__ import annotations
