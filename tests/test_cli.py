"""Every flag and mode of ./run: what is accepted, what is refused and how, and what reaches stdout and stderr."""
import fcntl
import os
import pty
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import checkpoint
from checkpoint import config, forward, successor_model, write, write_llama2c, write_llama2c_tokenizer
from conftest import ROOT, binary, good, is_one_error, refused, run, sanitized

STATUS = (rb"prompt: (\d+) tokens, \d+\.\d tok/s; generated: (\d+) tokens, \d+\.\d tok/s; seed (\d+)\n")
PREFILL = rb"prompt: (\d+) tokens, \d+\.\d tok/s\n"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random model (300 ids, context 64) and its tokenizer of llama2.c's kind beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    c, t = write(folder / "model.bin", config(seq_len=64), seed=1)
    pieces = write_llama2c_tokenizer(folder / "tokenizer.bin", 300)
    return SimpleNamespace(folder=folder, model=folder / "model.bin", tokenizer=folder / "tokenizer.bin", config=c,
                           tensors=t, pieces=pieces)


def status(done):
    """(prompt tokens, generated tokens, seed) of the last line of stderr."""
    found = re.search(STATUS + rb"\Z", done.stderr)
    assert done.returncode == 0 and found, (done.args, done.returncode, done.stderr)
    return tuple(map(int, found.groups()))


def ids_of(*args, **more):
    return [int(x) for x in good(*args, "--ids", **more).split()]


def rows(out, width):
    return np.frombuffer(out, "<f4").reshape(-1, width)


def on_terminal(*args, stdin=subprocess.DEVNULL):
    """Runs ./run with stdout on a terminal: (what the terminal got, stderr, exit code)."""
    mine, its = pty.openpty()
    with subprocess.Popen([binary(), *map(str, args)], stdin=stdin, stdout=its, stderr=subprocess.PIPE) as p:
        os.close(its)
        got = b""
        while True:
            try:
                part = os.read(mine, 4096)
            except OSError:
                break
            if not part:
                break
            got += part
        err = p.stderr.read()
    os.close(mine)
    return got, err, p.returncode


# Usage: exit 2 and one line

@pytest.mark.parametrize("args", [
    [], ["-i", "x"], ["MODEL", "MODEL"], ["MODEL", "-q"], ["MODEL", "--nope"], ["MODEL", "--idsx"],
    ["MODEL", "--ids=1"], ["MODEL", "-"],
    ["MODEL", "-m"], ["MODEL", "-n"], ["MODEL", "-i"], ["MODEL", "--min-p"], ["MODEL", "-m", "nope"],
    ["MODEL", "-m", ""],
    ["MODEL", "-m", "Generate"], ["MODEL", "-i", "a", "-f", "b"], ["MODEL", "-i", "a", "-I", "1"],
    ["MODEL", "-f", "b", "-I", "1"],
    ["MODEL", "-m", "logits", "-i", "a", "-I", "1"], ["-m", "tokenize"], ["-m", "tokenize", "-z", "TOKENIZER"],
    ["-m", "detokenize", "-z", "TOKENIZER"], ["-m", "logits", "-I", "1"], ["-m", "check"]], ids=" ".join)
def test_usage_errors(tiny, args):
    names = {"MODEL": tiny.model, "TOKENIZER": tiny.tokenizer}
    refused(2, *(names.get(a, a) for a in args))


WHOLE = ["", "x", "1x", "1.5", "--", "1 2", "99999999999999999999999"]
REALS = ["", "x", "1x", "nan", "inf", "-inf", "1.0.0", "0,5", "1 2"]


@pytest.mark.parametrize("flag, values", [
    *((flag, WHOLE) for flag in ("-n", "-b", "-c", "-j", "-k", "-s")),
    *((flag, REALS) for flag in ("-t", "-p", "--min-p", "--repeat-penalty")),
    ("-n", ["-2"]), ("-b", ["0", "-1"]), ("-c", ["0", "-1"]), ("-j", ["0", "-1"]), ("-k", ["-1"]),
    ("-t", ["-1", "-0.001"]),
    ("-p", ["-0.1", "1.1"]), ("--min-p", ["-0.1", "1.1"]), ("--repeat-penalty", ["0", "-1"])])
def test_numbers_are_whole_and_in_range(tiny, flag, values):
    for value in values:
        refused(2, tiny.model, "-I", "1", "--ids", flag, value)
        if flag.startswith("--"):
            refused(2, tiny.model, "-I", "1", "--ids", f"{flag}={value}")


@pytest.mark.parametrize("flags", [
    "-n 0", "-n -1", "-b 1", "-b 100000", "-c 1 -n 0", "-c 64", "-j 1", "-k 0", "-k 1", "-k 2147483647", "-s 0",
    "-s 18446744073709551615",
    "-t 0", "-t 1e-45", "-t 1e3", "-p 0", "-p 1", "-p .5", "--min-p 0", "--min-p 1", "--min-p=0.1",
    "--repeat-penalty=1.5",
    "--repeat-penalty 0.5", "-t 1e0"])
def test_values_that_are_fine(tiny, flags):
    status(run(tiny.model, "-I", "5", "--ids", *flags.split()))


@pytest.mark.parametrize("ids", ["1 x", "1,2", "-1", "1 300", "2147483648", "1 99999999999999999999", "1.0", "1 -5"])
@pytest.mark.parametrize("mode", ["generate", "logits", "hidden", "perplexity"])
def test_bad_ids(tiny, ids, mode):
    done = run(tiny.model, "-m", mode, "-I", ids, "--ids")
    is_one_error(done, done.returncode if done.returncode in (1, 2) else 1)


def test_help_and_version(tiny):
    for flag in ("-h", "--help"):
        done = run(flag)
        assert done.returncode == 0 and not done.stderr
        flags = b"-m -i -f -I -n -b -z -o -t -p -k -s -c -j --min-p --repeat-penalty --ids --help --version"
        for word in flags.split():
            assert word in done.stdout, word
        assert max(map(len, done.stdout.split(b"\n"))) <= 120
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"run.c 1.0\n", b"")


def test_the_last_of_a_repeated_flag_wins(tiny):
    assert status(run(tiny.model, "-I", "5", "--ids", "-n", "9", "-n", "3"))[:2] == (1, 3)
    assert good(tiny.model, "-i", "abc", "-i", "xyz", "-n", "0") == b"xyz"
    assert status(run(tiny.model, "-I", "5", "--ids", "-s", "1", "-s", "7"))[2] == 7
    assert good(tiny.model, "-m", "tokenize", "-m", "generate", "-i", "a", "-n", "0") == b"a"


# Files that are not there or not right: exit 1

@pytest.mark.parametrize("args, words", [
    (["nowhere.bin"], ["nowhere.bin"]),
    (["MODEL", "-f", "nowhere.txt"], ["nowhere.txt"]),
    (["MODEL", "-f", "."], []),
    (["MODEL", "-z", "nowhere.bin", "-i", "a"], ["nowhere.bin"]),
    (["MODEL", "-z", ".", "-i", "a"], []),
    (["MODEL", "-z", "MODEL", "-i", "a"], ["tokenizer"]),
    (["-m", "tokenize", "-z", "nowhere.bin", "-i", "a"], ["nowhere.bin"]),
    (["MODEL", "-m", "logits", "-I", "1", "-o", "nowhere/out"], ["nowhere/out"]),
    (["MODEL", "-m", "logits", "-I", "1", "-o", "."], []),
    (["MODEL", "-m", "logits", "-I", "1", "-o", ""], [])])
def test_files_that_cannot_be_used(tiny, args, words):
    refused(1, *(tiny.model if a == "MODEL" else a for a in args), words=words, cwd=tiny.folder)


def test_a_name_with_format_characters_and_newlines_stays_one_line(tiny):
    refused(1, "%s%n%d.bin")
    refused(1, "a\nb.bin")


# The prompt

def test_the_prompt_comes_first_and_unchanged(tiny):
    for prompt in ("x", " x", "  x", "\nx", "x ", "a\\nb", "é ö 🦙", "%s%n", "\t", "<0x0A>", "a\r\nb"):
        out = good(tiny.model, "-i", prompt, "-n", "0")
        assert out == prompt.encode(), prompt
        assert good(tiny.model, "-i", prompt, "-n", "5", "-s", "1").startswith(prompt.encode())


def test_f_is_taken_byte_for_byte(tiny, tmp_path):
    for text in (b"abc\n", b"a\0b", b"\0", b"abc\r\n\r\n", b"abc"):
        (tmp_path / "prompt").write_bytes(text)
        assert good(tiny.model, "-f", tmp_path / "prompt", "-n", "0") == text
        assert good(tiny.model, "-f", "-", "-n", "0", stdin=text) == text
        ids = good(tiny.model, "-m", "tokenize", "-f", "-", stdin=text)
        assert ids == good(tiny.model, "-m", "tokenize", "-f", tmp_path / "prompt")
        assert ids.split().count(b"3") == text.count(b"\0")


def test_a_fifo_as_prompt(tiny, tmp_path):
    os.mkfifo(tmp_path / "prompt")
    writer = threading.Thread(target=lambda: (tmp_path / "prompt").write_bytes(b"abc"))
    writer.start()
    assert good(tiny.model, "-f", tmp_path / "prompt", "-n", "0") == b"abc"
    writer.join()


def test_nothing_starts_from_bos(tiny, tmp_path):
    args = (tiny.model, "-t", "0", "-n", "9")
    out = good(*args)
    assert out == good(*args, "-i", "") == good(*args, "-f", "/dev/null")
    first, *rest = ids_of(*args)
    assert first == 1 and rest == ids_of(*args, "-I", "1")[1:]
    write(tmp_path / "model.bin", config(bos_id=-1))
    write_llama2c_tokenizer(tmp_path / "tokenizer.bin")
    refused(1, tmp_path / "model.bin", "--ids", words=["BOS|start"])


def test_raw_ids_need_no_tokenizer(tiny, tmp_path):
    shutil.copy(tiny.model, tmp_path / "alone.bin")
    more = dict(cwd=tmp_path)
    assert ids_of("alone.bin", "-I", "5 6 7", "-n", "2", **more)[:3] == [5, 6, 7]
    assert len(good("alone.bin", "-m", "logits", "-I", "5 6 7", **more)) == 3 * 300 * 4
    good("alone.bin", "-m", "hidden", "-I", "5 6 7", **more)
    good("alone.bin", "-m", "perplexity", "-I", "5 6 7", **more)
    good("alone.bin", "-m", "check", **more)
    refused(1, "alone.bin", "-I", "5 6 7", words=["tokenizer"], **more)
    refused(1, "alone.bin", "-i", "abc", words=["tokenizer"], **more)
    assert ids_of("alone.bin", "-I", " 5\t6\n7 ", "-n", "0", **more) == [5, 6, 7]


def test_ids_are_one_line(tiny):
    out = good(tiny.model, "-I", "5 6", "--ids", "-n", "3", "-s", "1")
    assert re.fullmatch(rb"\d+( \d+)*\n", out) and out.startswith(b"5 6 ")
    assert good(tiny.model, "-I", "5 6", "--ids", "-n", "0") == b"5 6\n"
    text = good(tiny.model, "-m", "tokenize", "-i", "abc")
    assert re.fullmatch(rb"\d+( \d+)*\n", text) and good(tiny.model, "-i", "abc", "--ids", "-n", "0") == text


# How long: -n and -c

@pytest.mark.parametrize("prompt", [14, 15, 16])
def test_prompts_that_fit(tmp_path, prompt):
    """A context of 16 holds prompt and text together: a prompt of 16 leaves room for no new token."""
    successor_model(tmp_path / "m.bin", {}, seq_len=16)
    done = run(tmp_path / "m.bin", "-I", "5 " * prompt, "--ids", "-n", "-1")
    count = status(done)
    assert count[0] == prompt and count[1] == 16 - prompt and len(done.stdout.split()) == 16
    capped = run(tmp_path / "m.bin", "-I", "5 " * prompt, "--ids", "-n", "100")
    assert status(capped)[:2] == count[:2] and b"note: context 16: room for %d new" % (16 - prompt) in capped.stderr
    assert len(capped.stderr.splitlines()) == 2 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("prompt", [17, 5000])
@pytest.mark.parametrize("mode", ["generate", "logits", "hidden"])
def test_prompts_that_do_not_fit(tmp_path, prompt, mode):
    successor_model(tmp_path / "m.bin", {}, seq_len=16)
    start = time.monotonic()
    refused(1, tmp_path / "m.bin", "-m", mode, "-I", "5 " * prompt, "--ids", words=[rf"\b{prompt}\b", r"\b16\b"])
    assert time.monotonic() - start < 1


def test_a_text_prompt_that_does_not_fit(tiny):
    start = time.monotonic()
    refused(1, tiny.model, "-f", "-", stdin=b"x" * 1000000, words=[r"\b\d{6,}\b", r"\b64\b"])
    assert time.monotonic() - start < 2


def test_context_flag(tiny):
    for mode in ("generate", "logits", "hidden", "perplexity", "check"):
        refused(1, tiny.model, "-m", mode, *(["-I", "5 6", "--ids"] if mode != "check" else []), "-c", "65",
                words=[r"\b65\b", r"\b64\b"])
    refused(1, tiny.model, "-I", "5 6 7", "--ids", "-c", "2", words=["3 tokens, the context 2 ", "seq_len is 64"])
    assert status(run(tiny.model, "-I", "5 6 7", "--ids", "-c", "4", "-n", "-1", "-s", "1"))[:2] == (3, 1)


def test_zero_tokens(tiny):
    done = run(tiny.model, "-I", "5 6", "--ids", "-n", "0", "-s", "9")
    assert status(done) == (2, 0, 9) and b"generated: 0 tokens, 0.0 tok/s" in done.stderr


@pytest.mark.parametrize("eos", [[9], [7, 8, 9], list(range(9, 25))])
def test_every_end_of_text_id_stops(tmp_path, eos):
    write_llama2c_tokenizer(tmp_path / "tokenizer.bin")
    for end in eos:
        follow = {40: 41, 41: 42, 42: end, end: 43}
        successor_model(tmp_path / "m.bin", follow, eos=eos)
        assert ids_of(tmp_path / "m.bin", "-I", "40", "-t", "0") == [40, 41, 42]
        assert good(tmp_path / "m.bin", "-I", "40", "-t", "0") == bytes([37, 38, 39])      # byte b is id b + 3
        assert ids_of(tmp_path / "m.bin", "-I", f"40 {end}", "-t", "0", "-n", "2") == [40, end, 43, 43]


def test_without_end_of_text_ids(tmp_path):
    successor_model(tmp_path / "m.bin", {5: 6, 6: 2, 2: 5}, eos=[])
    assert ids_of(tmp_path / "m.bin", "-I", "5", "-t", "0", "-n", "5") == [5, 6, 2, 5, 6, 2]


# Sampling from the outside

def test_seed(tiny):
    args = (tiny.model, "-I", "5 6", "--ids", "-n", "30", "-p", "1")
    assert ids_of(*args, "-s", "42") == ids_of(*args, "-s", "42") != ids_of(*args, "-s", "43")
    assert ids_of(*args, "-s", "0") == ids_of(*args, "-s", "0")
    assert status(run(*args, "-s", "0"))[2] == 0
    clock = run(*args)
    assert good(*args, "-s", status(clock)[2]) == clock.stdout
    assert len({status(run(*args))[2] for _ in range(5)}) == 5
    assert run(*args, "-s", "0").stdout not in (clock.stdout, run(*args, "-s", "1").stdout)


def test_greedy_is_decided_by_temperature_alone(tiny):
    args = (tiny.model, "-I", "5 6", "--ids", "-n", "20")
    want = good(*args, "-t", "0")
    for p in ("0", "0.9", "1"):
        for k in ("0", "1", "40"):
            assert good(*args, "-t", "0", "-p", p, "-k", k, "-s", p[-1] + k) == want
    for t in ("1e-30", "1e-45", "0.0", "-0"):
        assert good(*args, "-t", t, "-s", "3") == want, t
    assert good(*args, "-k", "1") == good(*args, "-p", "0") == good(*args, "--min-p", "1") == want


def test_repeat_penalty_reaches_greedy(tmp_path):
    successor_model(tmp_path / "m.bin", {})
    args = (tmp_path / "m.bin", "-I", "5 6", "--ids", "-n", "20", "-t", "0")
    assert ids_of(*args) == [5] + [6] * 21
    far = ids_of(*args, "--repeat-penalty", "1e9")
    assert len(set(far)) == len(far)


def test_same_text_on_any_threads_and_chunk(tiny):
    """B22, B23: bit-equal logits and the same sampled text."""
    ids = " ".join(map(str, np.random.default_rng(0).integers(3, 300, 61)))
    args = (tiny.model, "-I", ids, "-m")
    want = {mode: good(*args, mode) for mode in ("logits", "hidden")}
    text = good(*args, "generate", "--ids", "-s", "5", "-t", "0.8")
    ppl = good(*args, "perplexity")
    for flags in ("-b 1", "-b 2", "-b 3", "-b 7", "-b 8", "-b 16", "-b 60", "-b 61", "-b 64", "-j 1", "-j 2", "-j 3",
                  "-j 5", "-b 5 -j 2"):
        flags = flags.split()
        for mode in ("logits", "hidden"):
            assert good(*args, mode, *flags) == want[mode], flags
        assert good(*args, "generate", "--ids", "-s", "5", "-t", "0.8", *flags) == text, flags
        assert good(*args, "perplexity", *flags) == ppl


def test_odd_sizes_are_bit_equal_too(tmp_path):
    c, _ = write(tmp_path / "m.bin", config(dim=60, hidden_dim=172, vocab_size=509, n_heads=6, n_kv_heads=3,
                                            head_dim=10, seq_len=80))
    ids = " ".join(map(str, np.random.default_rng(1).integers(0, 509, 67)))
    want = good(tmp_path / "m.bin", "-m", "logits", "-I", ids, "-j", "1")
    for b in (1, 2, 3, 7, 8, 16, 64, 67):
        for j in (1, 2, 3):
            assert good(tmp_path / "m.bin", "-m", "logits", "-I", ids, "-b", b, "-j", j) == want, (b, j)


@pytest.mark.parametrize("env", [
    {"OMP_NUM_THREADS": "1000"}, {"OMP_THREAD_LIMIT": "1"}, {"OMP_NUM_THREADS": "0"}, {"OMP_NUM_THREADS": "abc"},
    {"OMP_NUM_THREADS": "-3"}, {"OMP_DYNAMIC": "true"}, {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "64"}], ids=str)
def test_openmp_settings(tiny, env):
    """B95: odd thread counts end, with the same bytes; what libgomp itself says on stderr is its own."""
    args = (tiny.model, "-m", "logits", "-I", "5 6 7 8 9 10")
    assert good(*args, env=env, timeout=60) == good(*args)
    assert good(*args, "-j", "2", env=env, timeout=60) == good(*args)


def test_many_threads(tiny):
    args = (tiny.model, "-m", "logits", "-I", "5 6 7 8 9 10")
    assert good(*args, "-j", "64", timeout=60) == good(*args)


# Modes

def test_logits_and_hidden_states(tiny):
    ids = np.random.default_rng(2).integers(0, 300, 64).tolist()
    logits, hidden = forward(tiny.config, tiny.tensors, ids)
    text = " ".join(map(str, ids))
    done = run(tiny.model, "-m", "logits", "-I", text)
    assert np.abs(rows(done.stdout, 300) - logits).max() < 1e-4
    assert re.fullmatch(PREFILL, done.stderr)[1] == b"64"
    done = run(tiny.model, "-m", "hidden", "-I", text)
    assert np.abs(np.frombuffer(done.stdout, "<f4").reshape(3, 64, 32) - hidden).max() < 1e-4
    assert re.fullmatch(PREFILL, done.stderr)[1] == b"64"
    embedding = np.frombuffer(done.stdout, "<f4").reshape(3, 64, 32)[0]
    assert (embedding == tiny.tensors["token_embedding"][ids]).all()


def test_biases_and_an_own_head_dim(tmp_path):
    c, t = write(tmp_path / "m.bin", config(dim=40, n_heads=4, n_kv_heads=1, head_dim=14, biases=7, tied=0, n_layers=3,
                                            hidden_dim=30, vocab_size=97,
                                            rms_norm_eps=1e-2, rope_theta=5e5, rope_attention_factor=1.1))
    ids = np.random.default_rng(3).integers(0, 97, 50).tolist()
    logits, hidden = forward(c, t, ids)
    text = " ".join(map(str, ids))
    assert np.abs(rows(good(tmp_path / "m.bin", "-m", "logits", "-I", text), 97) - logits).max() < 1e-3
    got = np.frombuffer(good(tmp_path / "m.bin", "-m", "hidden", "-I", text), "<f4").reshape(4, 50, 40)
    assert np.abs(got - hidden).max() < 1e-3


@pytest.mark.parametrize("n, context", [(64, None), (64, 10), (60, 59), (61, 60), (11, 10), (2, 2), (5, 2), (5, None),
                                        (63, 64)])
def test_perplexity(tiny, n, context):
    """Windows of the context's length, the first id of each being context only."""
    ids = np.random.default_rng(n).integers(0, 300, n)
    nll = []
    size = context or 64
    for start in range(0, n, size):
        window = ids[start:start + size]
        logits = forward(tiny.config, tiny.tensors, window)[0]
        p = checkpoint.softmax(logits)
        nll += [-np.log(p[i, window[i + 1]]) for i in range(len(window) - 1)]
    done = run(tiny.model, "-m", "perplexity", "-I", " ".join(map(str, ids)), *(["-c", context] if context else []))
    found = re.fullmatch(rb"perplexity (\S+) nll (\S+) tokens (\d+)\n", done.stdout)
    assert found and done.returncode == 0, done
    assert re.fullmatch(PREFILL, done.stderr)
    assert int(found[3]) == len(nll)
    assert abs(float(found[2]) - np.mean(nll)) < 1e-5 * np.mean(nll)
    assert abs(float(found[1]) / np.exp(float(found[2])) - 1) < 1e-7
    assert all(x == b"%.9g" % float(x) for x in found.groups()[:2])


def test_perplexity_longer_than_the_context(tiny):
    ids = np.random.default_rng(7).integers(0, 300, 200)
    assert good(tiny.model, "-m", "perplexity", "-I", " ".join(map(str, ids))).endswith(b" tokens 196\n")
    refused(1, tiny.model, "-m", "perplexity", "-I", "5")
    refused(1, tiny.model, "-m", "perplexity", "-I", "5 6 7", "-c", "1")
    logits = rows(good(tiny.model, "-m", "logits", "-I", "5 6 7"), 300).astype(np.float64)
    nll = np.mean([-np.log(checkpoint.softmax(logits[i])[j]) for i, j in ((0, 6), (1, 7))])
    assert abs(float(good(tiny.model, "-m", "perplexity", "-I", "5 6 7").split()[3]) - nll) < 1e-6


def test_perplexity_of_text_begins_with_bos(tiny):
    ids = good(tiny.model, "-m", "tokenize", "-i", "abc").decode()
    assert ids.startswith("1 ")
    assert good(tiny.model, "-m", "perplexity", "-i", "abc") == good(tiny.model, "-m", "perplexity", "-I", ids)


def test_tokenize_and_detokenize_need_no_model(tiny):
    ids = good("-m", "tokenize", "-z", tiny.tokenizer, "-i", "a\n é")
    assert ids == good(tiny.model, "-m", "tokenize", "-i", "a\n é")
    assert good("-m", "detokenize", "-z", tiny.tokenizer, "-I",
                ids.decode().removeprefix("1 ").strip()) == "a\n é".encode()
    done = run("-m", "detokenize", "-z", tiny.tokenizer, "-I", "243 162 169 156")
    assert (done.stdout, done.stderr) == (bytes([240, 159, 166, 153]), b"")
    refused(1, "-m", "detokenize", "-z", tiny.tokenizer, "-I", "300", words=[r"\b300\b"])


def test_streamed_bytes_are_the_pieces(tiny):
    """B52, B53: what generate prints for -I is every piece's bytes; one space is dropped from the first piece only."""
    space = tiny.pieces.index(" ")
    a = tiny.pieces.index("a")
    assert good(tiny.model, "-I", f"1 {space} {a} {space} {a}", "-n", "0") == b"a a"
    assert good(tiny.model, "-I", f"1 {a} {space} {a}", "-n", "0") == b"a a"
    rng = np.random.default_rng(4)
    for _ in range(20):
        ids = rng.integers(3, 259, 40)
        assert good(tiny.model, "-I", " ".join(map(str, ids)), "-n", "0") == bytes(int(i) - 3 for i in ids)


@pytest.mark.parametrize("text", [b"", b"abc", "é ö 🦙".encode(), b"\x80" * 50, b"\xc3", b"a\xf0\x9f", b"\0\0",
                                  bytes(range(256)) * 40])
@pytest.mark.parametrize("merges", [(), ("ab", "abc", " a", "bc")])
def test_texts_under_the_sanitizers(tiny, tmp_path, text, merges):
    """Whatever the bytes, with and without pieces to merge: it ends well or with one line."""
    write_llama2c_tokenizer(tmp_path / "t.bin", 300, merges)
    for mode in ("tokenize", "generate", "perplexity", "logits"):
        done = run(tiny.model, "-z", tmp_path / "t.bin", "-m", mode, "-f", "-", "-n", "5", stdin=text,
                   program=sanitized())
        assert done.returncode in (0, 1) and len(done.stderr.splitlines()) <= 1, done.stderr[:2000]
        assert b"runtime error" not in done.stderr


def test_output_is_streamed(tiny, tmp_path):
    """Each token is flushed as it comes: the prompt can be read while the rest is still being computed."""
    write(tmp_path / "slow.bin", config(dim=512, hidden_dim=2048, n_layers=8, n_heads=8, n_kv_heads=8, seq_len=4000,
                                        eos=[]))
    with subprocess.Popen([binary(), tmp_path / "slow.bin", "-I", "5 6", "--ids", "-n", "3000"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as p:
        got = b""
        while got.count(b" ") < 5:
            got += os.read(p.stdout.fileno(), 100)
        running = p.poll() is None
        p.kill()
    assert got.startswith(b"5 6 ") and running


@pytest.mark.parametrize("name", checkpoint.SLOTS)
def test_check_names_every_field(tiny, name):
    shown = good(tiny.model, "-m", "check").decode()
    found = re.search(rf"\b{name}\b\W+(\S+)", shown)
    assert found, shown
    if name not in ("tokenizer_hash", "weight_type", "activation", "norm_kind", "router"):
        assert float(found[1].rstrip(",;")) == pytest.approx(tiny.config[name]), found[0]


def test_check_shows_tensors_and_memory(tiny, tmp_path):
    done = run(tiny.model, "-m", "check")
    shown = done.stdout.decode()
    assert done.returncode == 0 and not done.stderr
    names = {name.split(".")[-1] for name in tiny.tensors if tiny.tensors[name].dtype.kind == "f"}
    for name in names:
        assert name in shown, name
    write(tmp_path / "long.bin", config(seq_len=500))
    block = 2 * 2 * 64 * 2 * 16 * 4         # k and v, layers, context by 64s, KV heads, head_dim by 16s, bytes
    for model, options, blocks in ((tiny.model, [], 1), (tmp_path / "long.bin", [], 8),
                                   (tmp_path / "long.bin", ["-c", 65], 2)):
        shown = good(model, "-m", "check", *options).decode().replace(",", "")
        assert re.search(rf"\bcache {block * blocks}\b", shown), (options, shown)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["token_embedding", "1.w2", "final_norm", "rope_freq"])
def test_check_finds_what_is_not_finite(tmp_path, name, value):
    c = config()
    t = checkpoint.tensors(c)
    t[name].flat[-1] = value
    write(tmp_path / "m.bin", c, t)
    done = run(tmp_path / "m.bin", "-m", "check")
    assert done.returncode == 1 and re.fullmatch(rb"run: [^\n]+\n", done.stderr), done
    assert name.split(".")[-1].encode() in done.stdout + done.stderr


def test_not_a_number_among_the_logits(tmp_path):
    """B71: an error with the position, in every build."""
    c = config()
    t = checkpoint.tensors(c)
    t["final_norm"][3] = np.nan
    write(tmp_path / "m.bin", c, t)
    for flags in ("-t 0", "-t 1", "-p 1", "-k 5", "-p 0.5 --min-p 0.1 --repeat-penalty 1.1"):
        done = run(tmp_path / "m.bin", "-I", "5 6 7", "--ids", "-n", "9", *flags.split())
        assert done.returncode == 1 and re.fullmatch(rb"run: [^\n]*NaN[^\n]*\n", done.stderr, re.I), done
        assert re.search(rb"position (2|3)\b", done.stderr) and done.stdout in (b"", b"5 6 7", b"5 6 7\n")
    refused(1, tmp_path / "m.bin", "-m", "perplexity", "-I", "5 6 7")


@pytest.mark.parametrize("mode", ["logits", "perplexity"])
def test_not_a_number_in_one_row(tmp_path, mode):
    c = config()
    t = checkpoint.tensors(c)
    t["token_embedding"][7, 3] = np.nan
    c["tied"], t["classifier"] = 0, np.zeros_like(t["token_embedding"])
    write(tmp_path / "m.bin", c, t)
    done = run(tmp_path / "m.bin", "-m", mode, "-I", "5 6 7 8")
    assert done.returncode == 1 and b"at position 2 is " in done.stderr and done.stderr.count(b"\n") == 1, done


def test_infinite_logits(tmp_path):
    """-infinity is probability 0, +infinity an error."""
    for value, code in ((np.float32(3e38), 1), (np.float32(-3e38), 0)):
        c, t = successor_model(tmp_path / "m.bin", {5: 7}, n_layers=1)
        t["classifier"][9] = np.sign(t["token_embedding"][5]) * value
        write(tmp_path / "m.bin", c, t)
        done = run(tmp_path / "m.bin", "-I", "5", "--ids", "-n", "1", "-t", "0")
        assert done.returncode == code, done
        assert done.stdout == b"5 7\n" if code == 0 else b"inf" in done.stderr.lower()


@pytest.mark.parametrize("vocab_size", [5, 8])
def test_infinite_states_behind_the_vocabulary(tmp_path, vocab_size):
    """0 times infinity in the rows that fill up a tile is nobody's logit."""
    c = config(vocab_size=vocab_size, tied=0, bos_id=-1, eos=[])
    t = checkpoint.tensors(c)
    for name in ("0.wo", "1.wo", "0.w2", "1.w2"):
        t[name][:] = 0
    t["token_embedding"][:, 0], t["classifier"][:, 0], t["final_norm"].flat[0] = 50, -1, 3e38
    write(tmp_path / "m.bin", c, t)
    done = run(tmp_path / "m.bin", "-m", "logits", "-I", "1 2")
    assert done.returncode == 0 and (np.frombuffer(done.stdout, "<f4") == -np.inf).all(), done


# llama2.c's files

@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [0, 1])
@pytest.mark.parametrize("kv", [1, 2, 6])
def test_llama2c_files(tmp_path, version, tied, kv):
    c = checkpoint.llama2c_config(dim=36, n_heads=6, n_kv_heads=kv, vocab_size=301, tied=tied, hidden_dim=50,
                                  n_layers=3)
    t = checkpoint.tensors(c, seed=kv)
    write_llama2c(tmp_path / "m.bin", c, t, version)
    ids = np.random.default_rng(5).integers(0, 301, 64).tolist()
    got = rows(good(tmp_path / "m.bin", "-m", "logits", "-I", " ".join(map(str, ids))), 301)
    assert np.abs(got - forward(c, t, ids)[0]).max() < 1e-4
    good(tmp_path / "m.bin", "-m", "check")
    write_llama2c_tokenizer(tmp_path / "tokenizer.bin", 301)
    assert ids_of(tmp_path / "m.bin", "-n", "0") == [1]


@pytest.mark.parametrize("end", [1, 2])
def test_llama2c_files_stop_at_1_and_2(tmp_path, end):
    c, t = successor_model(tmp_path / "m.bin", {5: 6, 6: end},
                           **{k: v for k, v in checkpoint.llama2c_config().items() if k in ("eos", "rope_pairs")})
    for version in (0, 1):
        write_llama2c(tmp_path / "m.bin", c, t, version)
        assert ids_of(tmp_path / "m.bin", "-I", "5", "-t", "0") == [5, 6]


# The tokenizer

def test_where_the_tokenizer_is_looked_for(tiny, tmp_path):
    """-z, STEM.tokenizer.bin, tokenizer.bin beside the model as named, ./tokenizer.bin; each has its own piece 259."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here, tmp_path / "other"):
        folder.mkdir()
    places = [("flag", tmp_path / "other" / "z.bin"), ("stem", there / "story.tokenizer.bin"),
              ("beside", there / "tokenizer.bin"), ("here", here / "tokenizer.bin")]
    for name, path in places:
        write_llama2c_tokenizer(path, 300, extra=[name])
    write_llama2c_tokenizer(tmp_path / "other" / "tokenizer.bin", 300, extra=["linked"])
    shutil.copy(tiny.model, tmp_path / "other" / "real.bin")
    (there / "story.bin").symlink_to(tmp_path / "other" / "real.bin")
    args = (there / "story.bin", "-I", "259", "-n", "0")
    assert good(*args, "-z", places[0][1], cwd=here) == b"flag"
    for name, path in places[1:]:
        assert good(*args, cwd=here) == name.encode()
        assert good("../there/story.bin", "-m", "detokenize", "-I", "259", cwd=here) == name.encode()
        path.unlink()
    refused(1, *args, cwd=here, words=["tokenizer"])


def test_a_model_without_suffix_has_the_tokenizer_beside_it(tiny, tmp_path):
    shutil.copy(tiny.model, tmp_path / "story")
    write_llama2c_tokenizer(tmp_path / "tokenizer.bin", 300, extra=["beside"])
    assert good(tmp_path / "story", "-I", "259", "-n", "0") == b"beside"
    assert good("story", "-I", "259", "-n", "0", cwd=tmp_path) == b"beside"


def test_a_tokenizer_of_another_size(tiny, tmp_path):
    """B17: more ids than embedding rows is refused with both numbers, fewer is noted."""
    write_llama2c_tokenizer(tmp_path / "more.bin", 301)
    refused(1, tiny.model, "-z", tmp_path / "more.bin", "-i", "a",
            words=[r"\b301\b", r"\b300\b", "more.bin", "model.bin"])
    write_llama2c_tokenizer(tmp_path / "fewer.bin", 290)
    done = run(tiny.model, "-z", tmp_path / "fewer.bin", "-i", "a", "-n", "0")
    assert done.returncode == 0 and re.search(rb"\b290\b.*\b300\b|\b300\b.*\b290\b", done.stderr.splitlines()[0])
    done = run(tiny.model, "-z", tmp_path / "fewer.bin", "-I", "295", "-n", "0")        # a row without a piece: no text
    assert (done.returncode, done.stdout) in ((0, b""), (1, b""))


def test_a_tokenizer_of_another_model(tmp_path):
    """The bundled pair fits; with another fingerprint in the header it is refused, by both numbers and paths."""
    model = tmp_path / "stories.bin"
    data = bytearray((ROOT / "tests/stories.bin").read_bytes())
    at = 8 * checkpoint.SLOTS["tokenizer_hash"]
    mark, = struct.unpack_from("<Q", data, at)
    assert mark
    shutil.copy(ROOT / "tokenizer.bin", tmp_path / "tokenizer.bin")
    struct.pack_into("<Q", data, at, mark ^ 1)
    model.write_bytes(data)
    for mode in ("generate", "logits", "perplexity", "tokenize", "check"):
        args = ["-i", "Once upon a time"] if mode != "check" else ["-z", tmp_path / "tokenizer.bin"]
        refused_words = [f"{mark}", f"{mark ^ 1}", "stories.bin", "tokenizer.bin"]
        done = run(model, "-m", mode, *args)
        if mode != "check":
            is_one_error(done, 1, *refused_words)
        assert done.returncode == 1 and all(w.encode() in done.stderr for w in refused_words), done
    struct.pack_into("<Q", data, at, mark)
    model.write_bytes(data)
    good(model, "-i", "Once upon a time", "-n", "4")
    struct.pack_into("<Q", data, at, 0)
    model.write_bytes(data)
    good(model, "-i", "Once upon a time", "-n", "4")


# stdout, stderr, stdin

def test_a_final_newline_on_a_terminal_only(tiny):
    got, err, code = on_terminal(tiny.model, "-i", "abc", "-n", "0", "-s", "1")
    assert (got, code) == (b"abc\r\n", 0) and re.fullmatch(STATUS, err)
    assert good(tiny.model, "-i", "abc", "-n", "0") == b"abc"


@pytest.mark.parametrize("mode", ["logits", "hidden"])
def test_no_binary_to_a_terminal(tiny, tmp_path, mode):
    got, err, code = on_terminal(tiny.model, "-m", mode, "-I", "5 6")
    assert (got, code) == (b"", 2) and err == b"run: -m %s is binary (give -o)\n" % mode.encode()
    got, err, code = on_terminal(tiny.model, "-m", mode, "-I", "5 6", "-o", "-")
    assert (got, code) == (b"", 2)
    got, err, code = on_terminal(tiny.model, "-m", mode, "-I", "5 6", "-o", tmp_path / "out")
    assert (got, code) == (b"", 0) and (tmp_path / "out").stat().st_size > 0


def test_nothing_on_stderr_for_the_other_modes(tiny):
    for args in (["-m", "tokenize", "-i", "a"], ["-m", "detokenize", "-I", "50"], ["-m", "check"]):
        assert run(tiny.model, *args).stderr == b""


@pytest.mark.parametrize("flags", ["generate -n 60", "generate --ids -n 60", "logits", "hidden", "tokenize", "check",
                                   "--help"])
def test_a_closed_pipe_ends_quietly(tiny, flags):
    mode = flags.split() if flags == "--help" else ["-m", *flags.split()]
    text = [] if flags in ("check", "--help") else ["-i", "abcdefghij" * 6 if "generate" not in flags else "a"]
    with subprocess.Popen([binary(), tiny.model, *mode, *text], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        p.stdout.close()
        err = p.stderr.read()
        code = p.wait()
    assert code in (0, 1, 141, -signal.SIGPIPE) and b"run:" not in err, (code, err)


def test_closed_descriptors(tiny, tmp_path):
    """A file opened while 0, 1 or 2 is closed must not take its place."""
    want = good(tiny.model, "-m", "logits", "-I", "5 6 7")
    shell = lambda command: subprocess.run(["sh", "-c", command, "sh", binary(), tiny.model], cwd=tmp_path,
                                           capture_output=True, timeout=60)
    for closed in ("<&-", "2>&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        shell(f'"$1" "$2" -m logits -I "5 6 7" -o out {closed}')
        assert (tmp_path / "out").read_bytes() == want, closed
        (tmp_path / "out").unlink()
    for closed in ("<&-", "2>&-", "<&- 2>&-"):
        assert shell(f'"$1" "$2" -m logits -I "5 6 7" {closed}').stdout == want, closed
    is_one_error(shell('"$1" "$2" -f - <&-'), 1)
    for command in ('-i abc >&-', '-m logits -I "5 6" >&-', '-m tokenize -i abc >&-', '-m check >&-'):
        done = shell(f'"$1" "$2" {command}')
        assert done.returncode == 1 and done.stderr.startswith(b"run: "), (command, done)


@pytest.mark.parametrize("args", ["-i abc -n 5", "-I 5 --ids -n 5", "-m logits -I 5", "-m hidden -I 5",
                                  "-m tokenize -i a", "-m detokenize -I 50",
                                  "-m perplexity -I 5", "-m check", "--help", "--version"])
def test_a_full_disk(tiny, args):
    if args == "-m perplexity -I 5":
        args = "-m perplexity -i abc"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([binary(), tiny.model, *args.split()], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and re.search(rb"^run: [^\n]*\n\Z", done.stderr, re.M), done


# -o

def device(folder, name, minor):
    """/dev/null or /dev/full; root, with whose rights a broken program could replace them, gets a node of its own."""
    if os.getuid():
        return f"/dev/{name}"
    try:
        os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("root that may not make device nodes")
    return folder / name


def test_o_through_a_link(tiny, tmp_path):
    """The link stays; the file that it leads to is replaced."""
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    good(tiny.model, "-m", "logits", "-I", "1 2", "-o", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").stat().st_size == 2 * 4 * 300


def test_o_is_not_what_is_read(tiny, tmp_path):
    """By no name does -o replace the checkpoint, the tokenizer or the prompt that is being read."""
    model, tokenizer, prompt = (tmp_path / name for name in ("model.bin", "model.tokenizer.bin", "prompt"))
    for path, source in ((model, tiny.model), (tokenizer, tiny.tokenizer), (prompt, None)):
        path.write_bytes(source.read_bytes() if source else b"hello")
    (tmp_path / "link").symlink_to(model), os.link(model, tmp_path / "other")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path in [*before, tmp_path / "../" / tmp_path.name / "model.bin"]:
        refused(1, model, "-m", "logits", "-f", prompt, "-o", path, words=["-o names", "which is read"])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before and (tmp_path / "link").is_symlink()


def test_o_beyond_a_size_limit_and_after_a_killed_run(tiny, tmp_path):
    command = f"""ulimit -f 4; exec "$0" "$1" -m logits -I "{' '.join(['1'] * 40)}" -o "$2" """
    done = subprocess.run(["sh", "-c", command, binary(), tiny.model, tmp_path / "out"], capture_output=True)
    is_one_error(done, 1, "File too large")
    assert not list(tmp_path.iterdir())
    again = """touch "$2.$$.part"; exec "$0" "$1" -m logits -I 1 -o "$2" """
    done = subprocess.run(["sh", "-c", again, binary(), tiny.model, tmp_path / "out"], capture_output=True)
    assert done.returncode == 0 and [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_model_that_shrinks(tiny, tmp_path):
    """A read beyond the end of the file is one line and exit 1, not a signal."""
    write(tmp_path / "m.bin", config(dim=64, hidden_dim=256, n_layers=8, seq_len=20000, eos=[]))
    with subprocess.Popen([binary(), tmp_path / "m.bin", "-I", "1", "--ids", "-n", "-1", "-j", "1"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as p:
        fcntl.fcntl(p.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that it cannot run ahead of us
        p.stdout.read(20)
        os.truncate(tmp_path / "m.bin", 600)
        p.stdout.read()
        assert p.stderr.read() == b"run: the model's file has become shorter (copy it again)\n"
    assert p.returncode == 1


def test_perplexity_of_all_minus_infinity(tmp_path):
    c = config(dim=16, vocab_size=20, tied=0)
    t = checkpoint.tensors(c, 1)
    t["token_embedding"][:] = 1e3
    t["final_norm"][:] = 1
    t["classifier"][:] = -3e38
    write(tmp_path / "m.bin", c, t)
    refused(1, tmp_path / "m.bin", "-m", "perplexity", "-I", "3 4 5", words=("-inf",))


def test_o_replaces_files(tiny, tmp_path):
    args = (tiny.model, "-m", "logits", "-I", "5 6 7")
    want = good(*args)
    assert good(*args, "-o", "-") == want
    assert good(*args, "-o", tmp_path / "out") == b"" and (tmp_path / "out").read_bytes() == want
    (tmp_path / "out").write_bytes(b"x" * 100000)
    for mode in (0o600, 0o755, 0o646):                                  # kept, whatever the umask
        (tmp_path / "out").chmod(mode)
        assert good(*args, "-o", "out", cwd=tmp_path) == b"" and (tmp_path / "out").read_bytes() == want
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["out"]


def test_o_writes_devices_and_fifos_in_place(tiny, tmp_path):
    args = (tiny.model, "-m", "logits", "-I", "5 6 7")
    want = good(*args)
    null, full = device(tmp_path, "null", 3), device(tmp_path, "full", 7)
    assert good(*args, "-o", null) == b"" and stat.S_ISCHR(os.stat(null).st_mode)
    refused(1, *args, "-o", full, words=["full"])
    assert stat.S_ISCHR(os.stat(full).st_mode)
    os.mkfifo(tmp_path / "fifo")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "fifo").read_bytes()))
    reader.start()
    assert good(*args, "-o", tmp_path / "fifo") == b""
    reader.join()
    assert got == [want] and stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1" if os.path.exists("/proc/self/fd") else "/dev/fd/1")
    assert good(*args, "-o", tmp_path / "stdout") == want and (tmp_path / "stdout").is_symlink()
    assert not [name for name in os.listdir(tmp_path) if name not in ("fifo", "stdout", "null", "full")]


def test_o_keeps_the_old_file_on_an_error(tiny, tmp_path):
    (tmp_path / "out").write_bytes(b"old")
    refused(1, tiny.model, "-m", "logits", "-I", "5 " * 65, "-o", tmp_path / "out")
    refused(1, tiny.model, "-m", "logits", "-I", "5 300", "-o", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"old" and os.listdir(tmp_path) == ["out"]


def test_o_on_a_disk_that_fills_up(tiny, tmp_path):
    """A file size limit stands for the disk: no short file, no temporary one, the old one kept."""
    (tmp_path / "out").write_bytes(b"old")
    done = subprocess.run(["sh", "-c", 'ulimit -f 8; trap "" XFSZ; exec "$0" "$@"', binary(), tiny.model, "-m",
                           "logits", "-I", "5 " * 60,
                           "-o", tmp_path / "out"], capture_output=True, timeout=60)
    is_one_error(done, 1, "out")
    assert (tmp_path / "out").read_bytes() == b"old" and os.listdir(tmp_path) == ["out"]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A model on which a prompt of 20,000 ids takes many seconds."""
    path = tmp_path_factory.mktemp("slow") / "m.bin"
    write(path, config(dim=128, hidden_dim=512, n_layers=6, n_heads=8, n_kv_heads=8, seq_len=30000, eos=[]))
    return path


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_signals_remove_the_temporary_file(slow, tmp_path, name, code):
    (tmp_path / "out").write_bytes(b"old")
    for mode in ("logits", "hidden"):
        with subprocess.Popen([binary(), slow, "-m", mode, "-I", "5 6 " * 10000, "-o", tmp_path / "out"],
                              stderr=subprocess.PIPE) as p:
            end = time.monotonic() + 20
            while len(os.listdir(tmp_path)) < 2 and p.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            assert len(os.listdir(tmp_path)) == 2, "no temporary file seen"
            p.send_signal(getattr(signal, name))
            returned = p.wait(10)
        assert (returned if returned >= 0 else 128 - returned) == code
        assert (tmp_path / "out").read_bytes() == b"old" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_signals_end_generate(slow, name, code):
    with subprocess.Popen([binary(), slow, "-I", "5", "--ids", "-n", "-1"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as p:
        os.read(p.stdout.fileno(), 1)
        p.send_signal(getattr(signal, name))
        out, err = p.communicate(timeout=10)
    assert (p.returncode if p.returncode >= 0 else 128 - p.returncode) == code and b"run:" not in err


# The environment

@pytest.mark.parametrize("env", [
    {"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LC_ALL": "C.UTF-8"}, {"LC_ALL": "tr_TR.UTF-8"}, {"LC_ALL": "de_DE.UTF-8"},
    {"LC_ALL": "nonsense"}, {"TZ": "Asia/Tokyo"}, {"LANG": "de_DE", "LC_NUMERIC": "de_DE"},
    {"HOME": "", "PATH": "", "TMPDIR": "/nowhere"}], ids=str)
def test_locale_and_environment_change_nothing(tiny, env):
    for args in (["-i", "Iıİi é ö 🦙", "-n", "20", "-s", "3", "-t", "0.7", "--min-p=0.01"],
                 ["-m", "tokenize", "-i", "Iıİi é ö 🦙"],
                 ["-m", "perplexity", "-i", "abc"], ["-m", "check"]):
        assert good(tiny.model, *args, env=env) == good(tiny.model, *args, env={"LC_ALL": "C"})


def test_two_processes_at_once(tiny):
    args = [binary(), tiny.model, "-I", "5 6 7", "--ids", "-n", "50", "-s", "5", "-t", "0.9"]
    both = [subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    assert len({p.communicate(timeout=60)[0] for p in both}) == 1 and not any(p.returncode for p in both)


def peak_kilobytes(args):
    """Peak resident memory of a command, measured from a small process (a child inherits its parent's peak at fork)."""
    code = ("import resource, subprocess, sys; off = subprocess.DEVNULL;"
            "p = subprocess.run(sys.argv[1:], stdin=off, stdout=off, stderr=off);"
            "print(p.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    out = subprocess.run([sys.executable, "-S", "-I", "-c", code, *map(str, args)], capture_output=True, text=True,
                         check=True, timeout=120).stdout
    code, peak = map(int, out.split())
    assert code == 0
    return peak


def long_context(path, seq_len, n_layers):
    """A model that stops after one token, with the cache of a Llama 3.2: 4 KiB a layer and position."""
    successor_model(path, {5: 2}, dim=32, hidden_dim=32, n_layers=n_layers, n_heads=32, n_kv_heads=8, head_dim=64,
                    seq_len=seq_len)
    return path, "-I", "5", "--ids", "-t", "0"


@pytest.mark.parametrize("n_layers, cache", [(16, 8_589_934_592), (28, 15_032_385_536)])
def test_a_long_context_takes_only_what_is_used(tmp_path, n_layers, cache):
    """B37: a full context of 131,072 asks for gigabytes of cache; one token touches little of it."""
    args = long_context(tmp_path / "m.bin", 131072, n_layers)
    for flags in (["-n", "8"], ["-n", "-1"], ["-n", "8", "-c", "131072"]):
        assert peak_kilobytes([binary(), *args, *flags]) < 100_000
    assert str(cache).encode() in good(args[0], "-m", "check").replace(b",", b"")


def test_a_context_that_no_memory_holds(tmp_path):
    """Lowered by default, which is said; an error that names -c where -c asks for it."""
    args = long_context(tmp_path / "m.bin", 2**31 - 1, 28)
    done = run(*args, "-n", "-1")
    assert done.returncode == 0 and done.stdout == b"5\n" and re.search(rb"^run: note: .*\b2147483647\b", done.stderr)
    refused(1, *args, "-n", "-1", "-c", 2**31 - 1, words=[r"\b\d{15,}\b", "-c"])
    assert good(*args, "-n", "3", "-c", 2**31 - 1) == b"5\n"


def test_too_little_address_space(tmp_path):
    """An allocation that fails is one line with the number of bytes and what to lower."""
    args = long_context(tmp_path / "m.bin", 131072, 16)
    done = subprocess.run(["sh", "-c", 'ulimit -v 500000; exec "$0" "$@"', binary(), *args, "-n", "-1", "-j", "1",
                           "-c", "131072"], capture_output=True, timeout=60)
    is_one_error(done, 1, r"\b\d{10,}\b", "-c")


def test_a_file_of_5_gib(tmp_path):
    """B97: a sparse file whose embedding lies across 4 GiB; the hidden states touch only the rows in use."""
    c = config(dim=1024, hidden_dim=16, n_layers=1, n_heads=4, n_kv_heads=1, vocab_size=1_400_000)
    small = checkpoint.tensors({**c, "vocab_size": 1})
    places = checkpoint.offsets(c)
    row = np.random.default_rng(0).standard_normal(1024).astype("<f4")
    with open(tmp_path / "m.bin", "wb") as f:
        f.write(checkpoint.header(c))
        for name, (at, size) in places.items():
            if name == "token_embedding":
                f.seek(at + 1_399_999 * 4096)
                f.write(row.tobytes())
            else:
                f.seek(at)
                f.write(small[name].tobytes())
    assert (tmp_path / "m.bin").stat().st_size > 5 << 30
    got = np.frombuffer(good(tmp_path / "m.bin", "-m", "hidden", "-I", "1399999 7"), "<f4").reshape(2, 2, 1024)
    assert (got[0, 0] == row).all() and not got[0, 1].any()
    for size in ((5 << 30) - 4, (1 << 32) + 4):
        os.truncate(tmp_path / "m.bin", size)
        refused(1, tmp_path / "m.bin", "-m", "hidden", "-I", "7", words=[str(size)])


def test_no_fast_math():
    text = "\n".join(l for l in (ROOT / "Makefile").read_text().splitlines() if not l.lstrip().startswith("#"))
    assert not re.search(r"-Ofast|fast-math|finite-math|unsafe-math|associative-math", text)


def threads_of(*args, **env):
    """How many threads ./run has while it writes; it is bound to one CPU and stopped in the middle."""
    command = [binary(), str(ROOT / "tests/stories.bin"), "-i", "Once", "-n", "400", "-s", "1", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**clean_environment(), **env},
                          preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})) as p:
        p.stdout.read(10)
        p.send_signal(signal.SIGSTOP)
        with open(f"/proc/{p.pid}/status") as file:
            count = int(re.search(r"Threads:\s*(\d+)", file.read())[1])
        p.kill()
    return count


def clean_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def test_threads_only_to_compute():
    """What needs no threads starts none, and answers, or says what is wrong, where there is no memory for them."""
    def limited(*args):
        command = ["sh", "-c", 'ulimit -v 500000; exec "$@"', "sh", binary(), *args, "-j", "1000"]
        return subprocess.run(command, capture_output=True, env=clean_environment())
    assert limited("-m", "tokenize", "-z", ROOT / "tokenizer.bin", "-i", "Once upon").stdout == b"1 524 530\n"
    assert b"cannot open nosuch.bin" in limited("nosuch.bin", "-i", "a").stderr


def test_threads_by_default():
    """A process bound to one CPU takes one thread; OMP_NUM_THREADS and, above it, -j say otherwise."""
    assert threads_of() == 1
    if b"without OpenMP" in run(ROOT / "tests/stories.bin", "-i", "a", "-n", "1", "-j", "2").stderr:
        return
    assert threads_of(OMP_NUM_THREADS="3") == 3
    assert threads_of("-j", "2", OMP_NUM_THREADS="3") == 2
