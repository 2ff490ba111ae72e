"""What makes processes of the tests quicker: garbage is looked for seldom, and the C++ compiler prepares nothing."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager


def collect_seldom() -> None:
    """Leave what is there to the end of the process, and look for cycles in what is new a tenth as often.

    Models and libraries are millions of objects that stay, and each search goes through them: an eighth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def quick_compiler() -> AbstractContextManager[None]:
    """Let Inductor compile a few small kernels: headers for many, and a look at the CPU, take ten seconds each."""
    import torch._inductor.config

    return torch._inductor.config.patch({"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True})
