"""What makes each process of the tests quicker: garbage is looked for seldom."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Leave what is there to the end of the process, and look for cycles in what is new a tenth as often.

    Models and libraries are millions of objects that stay, and each search goes through them: an eighth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
