"""Broken, foreign and mutated checkpoints: each is refused in one line or runs, under the sanitizers."""
import gzip
import io
import os
import random
import re
import struct
import subprocess
import zipfile

import numpy as np
import pytest

import checkpoint
from checkpoint import (REAL, SLOTS, config, offsets, pack, tensors, write, write_llama2c,
                        write_llama2c_tokenizer)
from conftest import binary, is_one_error, refused, run, sanitized

SIZES = dict(dim=16, hidden_dim=20, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=40, seq_len=32)
INTEGERS = [0, -1, 1, 2, 3, 5, 7, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62, -2**62, 2**63 - 1, -2**63]
REALS = [float(x) for x in ("0 -0.0 -1 1 nan inf -inf 1e300 -1e300 1e-300 5e-324 1e38 1e-5").split()]


def short(value):
    return str(value).replace(" ", "")[:60]


def base(**changes):
    return config(**{**SIZES, **changes})


def outcome(path, *args, **more):
    """0 or 1; anything else (a crash, a sanitizer's report, more than one line, words on stdout) is a failure."""
    done = run(path, *args, program=sanitized(), timeout=60, **more)
    if done.returncode != 0:
        assert done.returncode == 1 and re.fullmatch(rb"run: [^\n]+\n", done.stderr), \
        (args, done.returncode, done.stderr[-3000:])
    else:
        assert b"Sanitizer" not in done.stderr and b"runtime error" not in done.stderr, done.stderr
    return done


def both(path):
    """check and generate agree about a header: both take the file or both refuse it, without output."""
    check, text = outcome(path, "-m", "check"), outcome(path, "-I", "1", "--ids", "-n", "3", "-s", "1")
    if check.returncode == 0:
        assert text.returncode == 0, text.stderr
    elif text.returncode:
        assert not text.stdout, text
    return text.returncode


# The header

# What may stand in a field of the base file, whose size the value must also fit; all else is refused.
def fits(name, value):
    real = isinstance(value, float)
    if value == base()[name]:
        return True
    if real and not np.isfinite(value):
        return False
    allowed = {
        "seq_len": lambda: None if value > 2**31 - 1 else 0 < value, "activation": lambda: 0 <= value <= 4,
        "norm_kind": lambda: value in (0, 1), "norm_place": lambda: value == 3, "n_rope_tables": lambda: value == 2,
        "norm_weight_add": lambda: 0 <= value <= 1, "embedding_scale": lambda: 1e-9 <= value <= 1e9,
        "residual_scale": lambda: 1e-9 <= value <= 1e9, "logit_scale": lambda: 1e-9 <= value <= 1e9,
        "attention_softcap": lambda: 0 <= value <= 1e9, "logit_softcap": lambda: 0 <= value <= 1e9,
        "bos_id": lambda: -1 <= value < 40,
        "tokenizer_hash": lambda: True,
        "rope_pairs": lambda: value in (0, 1), "rms_norm_eps": lambda: None if value > 1 else value >= 0,
        "rope_dim": lambda: None if value == 2 else False, "n_eos": lambda: 1 <= value <= 16,
        "rope_theta": lambda: None, "rope_attention_factor": lambda: None, "attention_scale": lambda: None,
        "rope_theta_local": lambda: None,
        "rope_attention_factor_local": lambda: None}
    return allowed[name]() if name in allowed else False


@pytest.mark.parametrize("name", SLOTS)
def test_header_grid(tmp_path, name):
    """B85: every field takes every odd value; None in fits: either answer will do."""
    c = base()
    whole = bytearray(pack(c))
    for value in REALS if name in REAL else INTEGERS:
        struct.pack_into("<d" if name in REAL else "<q", whole, 8 * SLOTS[name], value)
        (tmp_path / "m.bin").write_bytes(whole)
        code, want = both(tmp_path / "m.bin"), fits(name, value)
        assert want is None or code == (0 if want else 1), (name, value, code)


@pytest.mark.parametrize("slot", [0, *range(47, 64)])
def test_magic_and_unused_slots(tmp_path, slot):
    whole = bytearray(pack(base()))
    for bit in (0, 7, 63):
        changed = bytearray(whole)
        changed[8 * slot + bit // 8] ^= 1 << bit % 8
        (tmp_path / "m.bin").write_bytes(changed)
        assert both(tmp_path / "m.bin") == 1


@pytest.mark.parametrize("changes", [
    dict(n_heads=3, n_kv_heads=2, head_dim=4), dict(n_heads=2, n_kv_heads=4, head_dim=4),
    dict(n_heads=4, n_kv_heads=3, head_dim=4),
    dict(head_dim=3, rope_dim=3), dict(head_dim=4, rope_dim=6),
    dict(head_dim=8, rope_dim=5), dict(head_dim=1, rope_dim=0),
    dict(n_layers=0), dict(dim=0, head_dim=4, n_heads=1, n_kv_heads=1), dict(vocab_size=0), dict(hidden_dim=0),
    dict(seq_len=0), dict(eos=[40]), dict(eos=[-1]),
    dict(eos=[2**31 - 1]), dict(eos=list(range(17))), dict(bos_id=40), dict(bos_id=-2), dict(version=2),
    dict(weight_type=2),
    dict(tied=2), dict(activation=5), dict(norm_place=21), dict(norm_place=16), dict(norm_place=32), dict(qk_norm=4),
    dict(biases=32), dict(n_rope_tables=3), dict(n_rope_tables=0), dict(norm_kind=2), dict(n_experts=4),
    dict(kv_lora_rank=8)], ids=short)
def test_headers_that_contradict_themselves(tmp_path, changes):
    """The file's size is what the header implies, so that only the contradiction can be the reason."""
    write(tmp_path / "m.bin", base(**changes))
    done = outcome(tmp_path / "m.bin", "-I", "1", "--ids", "-n", "3")
    is_one_error(done, 1)
    is_one_error(outcome(tmp_path / "m.bin", "-m", "check"), 1)


@pytest.mark.parametrize("changes, value", [
    (dict(version=2), "version.*2"), (dict(weight_type=7), "weight_type.*7"),
    (dict(n_heads=6, n_kv_heads=4, head_dim=4), "6.*4|4.*6"),
    (dict(eos=[-5]), "end id -5 is no id of"), (dict(eos=[40]), "end id 40 is no id of"),
    (dict(n_experts=8), "n_experts.*8"), (dict(logit_softcap=-30.0), "logit_softcap.*-30"),
    (dict(norm_kind=2), "norm_kind.*2"), (dict(norm_place=20), "norm_place 20"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps.*nan"), (dict(embedding_scale=-2.0), "embedding_scale.*-2")],
    ids=short)
def test_the_error_names_field_and_value(tmp_path, changes, value):
    write(tmp_path / "m.bin", base(**changes))
    refused(1, tmp_path / "m.bin", "-I", "1", "--ids", words=[value])


@pytest.mark.parametrize("windows, ropes, code", [
    ([-1, 0], [1, 1], 1), ([0, 0], [3, 1], 1), ([0, 0], [1, -1], 1), ([0, -2**31], [1, 1], 1), ([4, 0], [0, 2], 0),
    ([1, 2**31 - 1], [2, 0], 0)], ids=short)
def test_windows_and_tables_of_layers(tmp_path, windows, ropes, code):
    c = base(n_rope_tables=2)
    t = tensors(c)
    t["layer_window"], t["layer_rope"] = np.array(windows, "<i4"), np.array(ropes, "<i4")
    write(tmp_path / "m.bin", c, t)
    assert both(tmp_path / "m.bin") == code
    if code:
        is_one_error(outcome(tmp_path / "m.bin", "-I", "1 2", "--ids"), 1, "layer [01] has window")


@pytest.mark.parametrize("changes", [
    dict(), dict(biases=1), dict(biases=2), dict(biases=4), dict(biases=7), dict(tied=0), dict(biases=31, tied=0),
    dict(norm_place=0), dict(norm_place=10, qk_norm=2), dict(norm_place=15, qk_norm=1, norm_weight_add=1.0),
    dict(norm_place=17, norm_kind=1, qk_norm=3, biases=8, rope_pairs=1, rope_dim=2), dict(norm_place=27, biases=8),
    dict(activation=4, attention_softcap=5.0, logit_softcap=1e-300, logit_scale=0.1), dict(n_rope_tables=2),
    dict(head_dim=6, n_heads=3, n_kv_heads=1), dict(n_kv_heads=4),
    dict(eos=[]), dict(eos=list(range(16))), dict(config_json=b'{"a": 1}'), dict(config_json=b"x"),
    dict(config_json=bytes(1000)), dict(rms_norm_eps=0.0),
    dict(rope_theta=5e5, rope_attention_factor=1.2), dict(head_dim=2),
    dict(dim=1, n_heads=1, n_kv_heads=1, head_dim=2, hidden_dim=1, n_layers=1),
    dict(vocab_size=3, eos=[2]), dict(seq_len=2**31 - 1), dict(rope_pairs=1), dict(bos_id=-1), dict(n_layers=100)],
    ids=short)
def test_good_files(tmp_path, changes):
    write(tmp_path / "m.bin", base(**changes))
    assert outcome(tmp_path / "m.bin", "-m", "check").returncode == 0
    assert outcome(tmp_path / "m.bin", "-I", "1 2", "--ids", "-n", "3").returncode == 0
    assert outcome(tmp_path / "m.bin", "-m", "logits", "-I", "1 2").returncode == 0


def test_the_config_block_is_opaque(tmp_path):
    write(tmp_path / "a.bin", base())
    write(tmp_path / "b.bin", base(config_json=bytes(range(256)) * 3))
    assert run(tmp_path / "a.bin", "-m", "logits", "-I", "1 2").stdout == run(tmp_path / "b.bin", "-m", "logits", "-I",
        "1 2").stdout != b""


# The size

def test_truncation_at_every_boundary(tmp_path):
    """Every field, every tensor's first and last byte, and their neighbours."""
    c = base(tied=0, biases=7, config_json=b'{"a": 1}', n_layers=1)
    whole = pack(c)
    edges = {8 * slot for slot in range(65)} | {at for start,
                                                size in offsets(c).values() for at in (start, start + size)}
    for cut in sorted({e + d for e in edges for d in (-1, 0, 1, 4)} & set(range(len(whole)))):
        (tmp_path / "m.bin").write_bytes(whole[:cut])
        done = run(tmp_path / "m.bin", "-I", "1 2 3", "--ids", "-n", "3")
        is_one_error(done, 1, *([rf"\b{cut}\b"] if cut >= 512 else []))
    for args in (["-m", "check"], ["-I", "1 2", "--ids"]):
        (tmp_path / "m.bin").write_bytes(whole[:-1])
        is_one_error(outcome(tmp_path / "m.bin", *args), 1, rf"\b{len(whole)}\b", rf"\b{len(whole) - 1}\b")


def test_trailing_bytes(tmp_path):
    for c in (base(), base(config_json=b"{}")):
        for more in (b"\0", b"\0" * 4, b"\0" * 64, b"x" * 1000):
            (tmp_path / "m.bin").write_bytes(pack(c) + more)
            is_one_error(outcome(tmp_path / "m.bin", "-I", "1", "--ids"), 1)


# Foreign files

def zipped():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("archive/data.pkl", b"x" * 1000)
    return out.getvalue()


FOREIGN = {
    "GGUF": b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(1000),
    "safetensors": struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + bytes(4),
    "safetensors ": struct.pack("<Q", 900) + b'{"__metadata__":{"format":"pt"}}'.ljust(900) + bytes(400),
    "zip|PyTorch": zipped(),
    "ggml": b"lmgg" + bytes(2000),
    "ggml ": b"tjgg" + struct.pack("<I", 3) + bytes(2000),
    "HTML": b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n" * 20,
    "HTML ": b"<html>\n<body>404</body></html>\n" * 20,
    "LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "gzip": gzip.compress(b"x" * 10000, 0),
    "tokenizer": b"run.t\r\n\x1a" + bytes(1000),
    "int8|version 2|quantized": struct.pack("<2I7iBi", 0x616B3432, 2, 16, 20, 2, 4, 2, 40, 32, 1, 4).ljust(256,
        b"\0") + bytes(3000),
    "version 3": struct.pack("<2I7iB", 0x616B3432, 3, 16, 20, 2, 4, 2, 40, 32, 1).ljust(256, b"\0") + bytes(3000),
    "JSON": b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}\n' * 20,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_refused(tmp_path, name):
    (tmp_path / "m.bin").write_bytes(FOREIGN[name])
    for args in (["-I", "1", "--ids"], ["-m", "check"]):
        is_one_error(outcome(tmp_path / "m.bin", *args), 1, "m.bin")


def test_big_endian(tmp_path):
    c = base()
    swapped = bytearray(pack(c))
    for slot in range(1, 64):
        swapped[8 * slot:8 * slot + 8] = swapped[8 * slot:8 * slot + 8][::-1]
    (tmp_path / "m.bin").write_bytes(swapped)
    is_one_error(outcome(tmp_path / "m.bin", "-I", "1", "--ids"), 1, "version")
    shape = [c[k] for k in "dim hidden_dim n_layers n_heads n_kv_heads vocab_size seq_len".split()]
    (tmp_path / "m.bin").write_bytes(struct.pack(">7i", *shape) + bytes(20000))
    is_one_error(outcome(tmp_path / "m.bin", "-I", "1", "--ids"), 1, "m.bin")


@pytest.mark.parametrize("data", [b"", b"r", b"run.c", b"run.c\r\n\x1a", b"run.c\n\x1a", b"\0" * 7, b"\0" * 28,
                                  b"\0" * 100000, b"\xff" * 28, b"\xff" * 5000, b"hello\n" * 1000],
                         ids=lambda d: f"{d[:8]!r}x{len(d)}")
def test_files_that_are_nothing(tmp_path, data):
    (tmp_path / "m.bin").write_bytes(data)
    is_one_error(outcome(tmp_path / "m.bin", "-I", "1", "--ids"), 1, "m.bin")
    is_one_error(outcome(tmp_path / "m.bin", "-m", "check"), 1, "m.bin")


def test_a_magic_spoiled_by_text_mode(tmp_path):
    """The magic holds \\r\\n and ^Z so that a transfer as text shows."""
    (tmp_path / "m.bin").write_bytes(pack(base()).replace(b"\r\n", b"\n"))
    is_one_error(outcome(tmp_path / "m.bin", "-I", "1", "--ids"), 1)


def test_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", "/dev/null", "/dev/zero", "/dev/full"):
        for args in (["-I", "1", "--ids"], ["-m", "check"]):
            is_one_error(run(path, *args, timeout=10), 1, str(path))
    write(tmp_path / "m.bin", base())
    for path in (tmp_path, tmp_path / "fifo", "/dev/null", "/dev/zero"):
        is_one_error(run(tmp_path / "m.bin", "-i", "a", "-z", path, timeout=10), 1, str(path))


def test_no_permission(tmp_path):
    write(tmp_path / "m.bin", base())
    os.chmod(tmp_path / "m.bin", 0)
    program = binary()
    if os.getuid() == 0:                                # root may read anything: be nobody
        for folder in (tmp_path, *tmp_path.parents[:3]):
            os.chmod(folder, 0o755)
        copy = tmp_path / "program"
        copy.write_bytes(open(program, "rb").read())
        os.chmod(copy, 0o755)
        done = subprocess.run([copy, tmp_path / "m.bin", "-I", "1", "--ids"], user=65534, group=65534, extra_groups=[],
                              capture_output=True)
    else:
        done = run(tmp_path / "m.bin", "-I", "1", "--ids")
    is_one_error(done, 1, "m.bin", "(?i)permission")


# llama2.c's files

@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [0, 1])
def test_llama2c_headers(tmp_path, version, tied):
    c = checkpoint.llama2c_config(**SIZES, tied=tied)
    write_llama2c(tmp_path / "m.bin", c, tensors(c), version)
    whole = (tmp_path / "m.bin").read_bytes()
    assert both(tmp_path / "m.bin") == 0
    for cut in (1, 4, 27, 28, 255, 256, 300, len(whole) // 2, len(whole) - 4, len(whole) - 1):
        (tmp_path / "m.bin").write_bytes(whole[:cut])
        assert both(tmp_path / "m.bin") == 1
    (tmp_path / "m.bin").write_bytes(whole + b"\0\0\0\0")
    assert both(tmp_path / "m.bin") == 1
    first = 0 if version == 0 else 8
    for field in range(7):
        for value in (0, -1, 1, 3, 7, 2**31 - 1, -2**31, 65536):
            changed = bytearray(whole)
            struct.pack_into("<i", changed, first + 4 * field, value)
            (tmp_path / "m.bin").write_bytes(changed)
            # version 1 holds nothing sized by the context; a negative vocabulary means an own classifier in version 0
            right = struct.unpack_from("<i", whole,
                                       first + 4 * field)[0] == value or (version == 1 and field == 6 and value > 0)
            assert both(tmp_path / "m.bin") == (0 if right else 1), (field, value)


def test_a_small_file_of_a_huge_model(tmp_path):
    """28 bytes that promise heads of 2^31 - 2 elements: refused before a table of their frequencies is made."""
    (tmp_path / "m.bin").write_bytes(struct.pack("<7i", 2**31 - 2, 1, 1, 1, 1, 2, 1))
    is_one_error(run(tmp_path / "m.bin", "-m", "check", timeout=3), 1, "28")


# Mutations

def mutate(data, rng, head):
    """A few bytes changed, moved, cut or repeated; half of the time in the header."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(head) if rng.random() < 0.6 else rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 1, 127, 128, 255))
        elif kind == 2 and at + 8 <= len(data):
            struct.pack_into("<q", data, at // 8 * 8, rng.choice(INTEGERS))
        elif kind == 3 and at + 8 <= len(data):
            struct.pack_into("<d", data, at // 8 * 8, rng.choice(REALS))
        elif kind == 4 and at + 4 <= len(data):
            struct.pack_into("<i", data, at // 4 * 4, rng.choice((0, -1, 2**31 - 1, -2**31, 65536)))
        elif kind == 5 and rng.random() < 0.2:
            del data[at:at + rng.choice((1, 4, 64))]
        elif kind == 6 and rng.random() < 0.2:
            data[at:at] = data[at:at + rng.choice((1, 4, 64))]
        if len(data) < 64:
            break
    return bytes(data)


def mutations(tmp_path, count, seed):
    rng = random.Random(seed)
    kinds = []
    for c in (base(biases=7, tied=0, config_json=b'{"a": 1}'), base(n_layers=1)):
        kinds.append((pack(c), 512 + 256, ["-I", "1 2 3", "--ids", "-n", "4", "-s", "1"]))
    for version in (0, 1):
        write_llama2c(tmp_path / "m.bin", checkpoint.llama2c_config(**SIZES), tensors(base()), version)
        kinds.append(((tmp_path / "m.bin").read_bytes(), 40, ["-I", "1 2 3", "--ids", "-n", "4", "-s", "1"]))
    codes = []
    for i in range(count):
        whole, head, args = kinds[i % len(kinds)]
        (tmp_path / "m.bin").write_bytes(mutate(whole, rng, head))
        done = outcome(tmp_path / "m.bin", *rng.choice((args, ["-m", "check"], ["-m", "logits", "-I", "1 2 3"],
            ["-m", "hidden", "-I", "1 2 3"])))
        codes.append(done.returncode)
    return codes


def tokenizer_mutations(tmp_path, count, seed):
    rng = random.Random(seed)
    write_llama2c_tokenizer(tmp_path / "good.bin", 300, extra=["ab", "abc", " a", "é"])
    whole = (tmp_path / "good.bin").read_bytes()
    for _ in range(count):
        (tmp_path / "t.bin").write_bytes(mutate(whole, rng, 64))
        done = run("-m", "tokenize", "-z", tmp_path / "t.bin", "-i", "abc é\n zz", program=sanitized(), timeout=60)
        assert done.returncode in (0, 1), done
        assert re.fullmatch(rb"(run: [^\n]+\n)?", done.stderr), done


def test_mutated_files(tmp_path):
    codes = mutations(tmp_path, 300, 1)
    assert 0.1 < np.mean(codes) < 0.95                  # the mutations are neither all fatal nor all harmless


def test_mutated_tokenizers(tmp_path):
    tokenizer_mutations(tmp_path, 150, 2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_mutated_files(tmp_path, seed):
    mutations(tmp_path, 1500, seed)
    tokenizer_mutations(tmp_path, 500, seed)
