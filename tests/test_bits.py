"""The same bits every time: logits are a function of the model and the ids alone, on any number of threads, in any
chunks, from any compiler, for any processor. tests/golden/bits.txt holds their hashes; a change that may move them:

    python tests/test_bits.py > tests/golden/bits.txt
"""
import hashlib
import itertools
import math
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

import checkpoint
from conftest import ROOT, binary, good, need

GOLDEN = ROOT / "tests/golden/bits.txt"
T = 150  # ids of a prompt: two blocks of positions and a part of one
# Sizes that are multiples of nothing, and of everything; both have sums of more than 1024 terms.
SHAPES = {"odd": dict(dim=75, hidden_dim=1173, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=22, vocab_size=509,
                      seq_len=256, tied=0, biases=7, rope_dim=18, rope_pairs=1, attention_scale=1 / math.sqrt(22)),
          "tidy": dict(dim=128, hidden_dim=1536, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=32, vocab_size=512,
                       seq_len=256, attention_scale=1 / math.sqrt(32))}
FMA = {"x86-64": "", "x86-64-v3": "avx2 fma", "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl"}


def noise(first, shape):
    """Uniform in [-1, 1) from SplitMix64: no library's generator, no rounding, the same everywhere."""
    count = math.prod(shape)
    z = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    return ((z >> np.uint64(40)).astype(np.float32) * np.float32(2 ** -23) - np.float32(1)).reshape(shape)


def write_model(path, name):
    """A model whose every bit is made by exact or correctly rounded operations."""
    c, first = checkpoint.config(**SHAPES[name]), 1
    t = checkpoint.tensors(c)
    t["rope_freq"] = np.float32(1) / np.arange(1, c["rope_dim"] // 2 + 1, dtype=np.float32)[None] ** 2
    for tensor, dtype, shape in checkpoint.layout(c):
        if dtype == "<f4" and tensor != "rope_freq":
            values = noise(first, shape)
            t[tensor] = 1 + values / 8 if tensor.endswith("norm") else values * np.float32(math.sqrt(3 / shape[-1]))
            first += values.size
    checkpoint.write(path, c, t)


def write_models(folder):
    for name in SHAPES:
        write_model(Path(folder) / f"{name}.bin", name)
    return Path(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("bits"))


def prompt(name):
    return [(37 * i + i * i + 5) % SHAPES[name]["vocab_size"] for i in range(T)]


def sha(output):
    return hashlib.sha256(output).hexdigest()


def results(folder, name, *options, program=None):
    """{what: hash} of the logits, and of ids sampled after the prompt: those were decoded one at a time."""
    arguments = [folder / f"{name}.bin", "-I", " ".join(map(str, prompt(name))), *options]
    return {f"{name} logits": sha(good(*arguments, "-m", "logits", "-o", "-", program=program, timeout=600)),
            f"{name} sampled": sha(good(*arguments, "--ids", "-n", 50, "-s", 7, program=program, timeout=600))}


def text(program=None):
    return {"text": sha(good(ROOT / "tests/stories.bin", "-i", "Once upon a time", "-s", 1, "-n", 100, program=program,
                             timeout=600))}


def golden():
    return dict(line.rsplit(" ", 1) for line in GOLDEN.read_text().splitlines())


def expect(found):
    assert found == {what: golden()[what] for what in found}


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 40])  # 40: more than a matrix has parts
@pytest.mark.parametrize("name", SHAPES)
def test_threads_and_chunks(folder, name, threads):
    for chunk in (1, 7, 64, T) if threads < 8 else (7, T):
        expect(results(folder, name, "-j", threads, "-b", chunk))


def test_again(folder):
    for _ in range(10):
        expect(results(folder, "odd"))
    expect(text())


@pytest.mark.parametrize("name", SHAPES)
def test_decoding_is_prefill(folder, name):
    """Ids that were decoded greedily, one at a time, are the argmax of what a prefill of them all gives."""
    model, ids = folder / f"{name}.bin", prompt(name)[:20]
    out = good(model, "-I", " ".join(map(str, ids)), "--ids", "-t", 0, "-n", 60).split()
    logits = np.frombuffer(good(model, "-I", b" ".join(out).decode(), "-m", "logits", "-o", "-"), "<f4")
    best = logits.reshape(len(out), -1).argmax(1)
    assert len(out) > 40 and [int(i) for i in out[20:]] == best[19:-1].tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_golden_is_right(folder, name):
    """What the hash is of is near the logits in float64."""
    got = good(folder / f"{name}.bin", "-I", " ".join(map(str, prompt(name))), "-m", "logits", "-o", "-")
    want = checkpoint.forward(*checkpoint.read(folder / f"{name}.bin"), prompt(name))[0]
    assert np.abs(np.frombuffer(got, "<f4").reshape(T, -1) - want).max() < 2e-5


def build(path, cc, arch, opt, omp, flags=""):
    """Builds run.c with the Makefile's flags for these choices."""
    choices = [f"CC={cc}", f"ARCH={arch}", f"OPT={opt}", f"OMP={omp}", f"CFLAGS={flags}"]
    command = subprocess.run(["make", "-s", "--eval", "command: ; @echo '$(BUILD)'", "command", *choices], cwd=ROOT,
                             capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(command) == 1, command  # or the compiler lacks the processor or OpenMP
    subprocess.run([*command[0].split(), "-o", path, "run.c", "-lm"], cwd=ROOT, check=True, timeout=600)
    return path


def check_build(folder, program):
    for name in SHAPES:
        for options in ["-j", 1], ["-j", 1, "-b", 1], ["-j", 2, "-b", 7], ["-j", 2]:
            expect(results(folder, name, *options, program=program))
    expect(text(program))


def runs_here(arch):
    """Whether this processor has what `arch` stands for."""
    has = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return arch == "native" or platform.machine() == "x86_64" and all(flag in has for flag in FMA[arch].split())


ALL = list(itertools.product(["gcc", "clang"], [a for a in (*FMA, "native") if runs_here(a)], ["-O2", "-O3"], [1, 0]))
SOME = [("gcc", "x86-64-v3", "-O2", 1), ("clang", "native", "-O3", 0)]  # besides ./run itself


@pytest.mark.parametrize("choice", [pytest.param(c, marks=() if c in SOME else pytest.mark.long) for c in ALL], ids=str)
def test_builds(folder, tmp_path, choice):
    check_build(folder, build(tmp_path / "run", *choice))


@pytest.mark.long
@pytest.mark.parametrize("opt", ["-O2", "-O3"])
@pytest.mark.parametrize("cc", ["aarch64-linux-gnu-gcc", "clang --target=aarch64-linux-gnu"])
def test_aarch64(folder, tmp_path, cc, opt):
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    need(emulator and shutil.which("aarch64-linux-gnu-gcc"), "gcc-aarch64-linux-gnu and qemu-user (apt-get install)")
    program = build(tmp_path / "run", cc, "", opt, 0, "-static")
    wrapper = tmp_path / "emulated"
    wrapper.write_text(f'#!/bin/sh\nexec {emulator} {program} "$@"\n')
    wrapper.chmod(0o755)
    check_build(folder, wrapper)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write_models(made)
        for what, value in {**results(Path(made), "odd"), **results(Path(made), "tidy"), **text()}.items():
            print(what, value)
