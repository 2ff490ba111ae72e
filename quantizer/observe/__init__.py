"""Statistics of every site and every range group over the calibration batches, as data.

``observation.py`` observes a proxy, ``batch_pass.py`` one pass of it. ``statistics.py`` adds passes up and
``snapshot.py`` writes the sums to a file. ``completeness/`` counts every product, also outside of sites, by the sizes
in ``operations/aten_products.py``; ``views/coverage.py`` lists those that stay float.
"""
