"""Proxy models: copies of a module tree that share its parameters and whose products are sites."""

from __future__ import annotations
