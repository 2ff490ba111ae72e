"""Statistics of calibration batches: what every site and every range group sees, as data.

``observation.py`` runs a batch through a proxy, ``batch_pass.py`` follows it, ``statistics.py`` holds the sums and
``snapshot.py`` writes them to a file. Products that no site computes are counted in ``completeness/``; what becomes of
them is said in ``views/unquantized.py``, and how large they are in ``operations/aten_products.py``.
"""
