"""Run a command as on a CPU with AVX2 alone, on one with more: what engines do there can be measured here.

    python benchmarks/avx2_only.py FOLDER COMMAND...      (as root, on Linux on x86-64, with gcc and objdump)
    python benchmarks/avx2_only.py /tmp/avx2 python benchmarks/chosen_engine.py minilm

A library asks the CPU what it can with the instruction ``cpuid``. FOLDER gets a copy of this environment (links, where
files stay as they are), in which every ``cpuid`` of torch, ONNX Runtime and OpenVINO is an illegal instruction, and a
small library that answers it in its place, without AVX-512, VNNI, BF16 and AMX. The command sees a ``/proc/cpuinfo``
without them, too. Kernels are those of a CPU with AVX2 alone; clock, caches and ports are those of this one, so read
the ratios. ``python`` in the command is that of the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = (
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libc10.so",
    "onnxruntime/capi/onnxruntime_pybind11_state*.so",
    "openvino/libs/libopenvino.so.*",
    "openvino/libs/libopenvino_intel_cpu_plugin.so",
)
CPUID, ILLEGAL = b"\x0f\xa2", b"\x0f\x0b"
HIDDEN = r" (avx512[a-z0-9_]*|avx_vnni[a-z0-9_]*|amx[a-z0-9_]*|vaes|gfni|vpclmulqdq)\b"
ANSWER = r"""
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <ucontext.h>

static void answer(uint32_t leaf, uint32_t sub, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
  __asm__ volatile("cpuid" : "=a"(*a), "=b"(*b), "=c"(*c), "=d"(*d) : "a"(leaf), "c"(sub));
  if (leaf == 7 && sub == 0) {
    *b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31); /* AVX-512 */
    *c &= ~(1u << 1 | 1u << 6 | 1u << 8 | 1u << 9 | 1u << 10 | 1u << 11 | 1u << 12 | 1u << 14); /* VBMI, VNNI, ... */
    *d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25); /* FP16, AMX, ... */
  } else if (leaf == 7 || leaf == 0x24) {
    *a = *b = *c = *d = 0; /* AVX-VNNI, BF16, AVX10 */
  }
}

static void handle(int number, siginfo_t *info, void *context) {
  greg_t *held = ((ucontext_t *)context)->uc_mcontext.gregs;
  unsigned char *at = (unsigned char *)held[REG_RIP];
  if (at[0] != 0x0f || at[1] != 0x0b) {
    signal(SIGILL, SIG_DFL);
    return;
  }
  uint32_t a, b, c, d;
  answer((uint32_t)held[REG_RAX], (uint32_t)held[REG_RCX], &a, &b, &c, &d);
  held[REG_RAX] = a, held[REG_RBX] = b, held[REG_RCX] = c, held[REG_RDX] = d, held[REG_RIP] += 2;
}

__attribute__((constructor)) static void install(void) {
  struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, 0);
}
"""


def prepare(folder: Path) -> None:
    """Fill the folder, if it is new."""
    done = folder / "prepared"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    venv = folder / "venv"
    shutil.copytree(sys.prefix, venv, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    for pattern in LIBRARIES:
        for path in packages.glob(pattern):
            print(f"{path.name}: {hide(path)} times cpuid", flush=True)
    (folder / "answer.c").write_text(ANSWER)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", folder / "answer.so", folder / "answer.c"], check=True)
    (folder / "cpuinfo").write_text(re.sub(HIDDEN, "", Path("/proc/cpuinfo").read_text()))
    done.touch()


def hide(path: Path) -> int:
    """Replace every ``cpuid`` of a library by an illegal instruction, in a file of its own; return how many."""
    content = bytearray(path.read_bytes())
    found = [offset for offset in places(path, content) if is_cpuid(content, offset)]
    for offset in found:
        content[offset : offset + len(ILLEGAL)] = ILLEGAL
    path.unlink()  # a link to the file of the environment that this one is a copy of
    path.write_bytes(content)
    return len(found)


def places(path: Path, content: bytes) -> Iterator[int]:
    """Yield where in a library's file its code has the two bytes; some are parts of other instructions."""
    headers = subprocess.run(["objdump", "-h", "-w", path], capture_output=True, text=True, check=True).stdout
    for line in headers.splitlines():
        words = line.split()
        if "CODE" not in line or len(words) < 6 or not words[0].isdigit():
            continue
        size, start = int(words[2], 16), int(words[5], 16)
        offset = content.find(CPUID, start, start + size)
        while offset >= 0:
            yield offset
            offset = content.find(CPUID, offset + 1, start + size)


def is_cpuid(content: bytes, offset: int) -> bool:
    """Return whether most disassemblies from somewhat before find the instruction there."""
    votes = 0
    with tempfile.NamedTemporaryFile() as file:
        for before in (64, 61, 47):
            Path(file.name).write_bytes(content[offset - before : offset + 8])
            command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            votes += re.search(rf"^\s*{before:x}:.*\bcpuid\b", text, re.MULTILINE) is not None
    return votes >= 2


def main(folder: Path, command: list[str]) -> None:
    """Prepare the folder, and become the command."""
    prepare(folder)
    environment = {
        "LD_PRELOAD": str(folder / "answer.so"),
        "PATH": f"{folder / 'venv/bin'}:{os.environ['PATH']}",
    }
    words = [f"{name}={value}" for name, value in environment.items()]
    mount = f"mount --bind {folder / 'cpuinfo'} /proc/cpuinfo"
    os.execvp("unshare", ["unshare", "-m", "sh", "-c", f'{mount} && exec env "$@"', "sh", *words, *command])


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
