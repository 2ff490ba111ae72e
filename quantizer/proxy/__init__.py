"""Proxy models: copies of a module tree that share its parameters, with every product as a site."""

from __future__ import annotations
