"""Statistics of every site and every range group over the calibration batches, as data.

``observation.py`` observes a proxy, ``batch_pass.py`` one pass of it. ``statistics.py`` adds passes up and
``snapshot.py`` saves the sums. ``completeness.py`` counts every matrix multiplication and convolution, also outside of
sites; ``plan/coverage.py`` lists those that are not quantized.
"""
