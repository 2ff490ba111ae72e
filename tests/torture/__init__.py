"""Faults, seeded and in numbers: ``PYTHONPATH=tests python -m torture --kind yaml --cases 2000 --seed 0``.

``mutations.py`` damages files, ``readers_*.py`` say what is damaged and how it is read, ``runner.py`` does it in a
process that may die.
"""
