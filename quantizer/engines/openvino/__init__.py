"""Engines of OpenVINO on the CPU."""
