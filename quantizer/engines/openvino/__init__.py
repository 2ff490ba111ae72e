"""Engines of OpenVINO, for CPUs."""
