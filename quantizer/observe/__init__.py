"""Statistics of every site and every range group over the calibration batches, as data.

``observation.py`` observes a proxy, ``batch_pass.py`` one pass of it. ``statistics.py`` adds passes up and
``snapshot.py`` writes the sums to a file. ``completeness.py`` counts every product, also outside of sites, by the sizes
in ``rewrite/torch_products.py``; ``plan/coverage.py`` lists those that are not quantized.
"""
