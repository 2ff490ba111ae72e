"""PlanSource as data, and carrying them out.

``decide_sites.py`` decides for every site, ``decide_operands.py`` for its operands, ``site_plan.py`` is what they give,
``apply.py`` makes a quantized proxy of it and ``saved_folder.py`` a folder.
"""
