"""Models as people outside this project write them, each with the figures that it must reach in every engine.

One file holds one kind. ``case.py`` says what a case states and what is checked.
``python -m outsiders`` (with ``PYTHONPATH=tests``) prints what each case reaches.
"""
