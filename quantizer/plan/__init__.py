"""Plans: the decision for every site, as data, and its application to a proxy.

``decide_sites.py`` decides for every site, ``decide_operands.py`` for its operands. ``site_plan.py`` defines the plan,
``apply.py`` applies it to a proxy and ``saved_folder.py`` saves and loads it.
"""
