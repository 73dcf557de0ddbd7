"""diff_logits.py passes a right export and, for each of many mistakes, exits 1 and names the layer and position."""
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import transformers

import checkpoint
import diff_logits
import models
import reference
from conftest import ROOT, binary

SHAPE = dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, hidden_size=72, attention_bias=True)
TEXT = "Once upon a time there was a little engine that could say its numbers, and every night it said them twice. " * 4
NAMES = ["embedding", "layer 0", "layer 1", "layer 2 + norm", "logits"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("diff")
    folder = models.tiny_llama(root / "source", **SHAPE)
    return folder, reference.exported(folder, root / "right.bin")


def check(capsys, *args):
    """Exit code and stdout of the tool, run in this process."""
    code = diff_logits.main([*map(str, args), "--run", binary()])
    return code, capsys.readouterr()


def regroup(c, t, layer):
    """Query head h reads key/value head h % n_kv_heads instead of h // (n_heads / n_kv_heads)."""
    order = np.arange(c["n_heads"]).reshape(c["n_kv_heads"], -1).T.ravel()
    heads = lambda x: x.reshape(c["n_heads"], c["head_dim"], -1)[order].reshape(x.shape)
    for name in "wq", "bq":
        t[f"{layer}.{name}"] = heads(t[f"{layer}.{name}"])
    t[f"{layer}.wo"] = heads(np.ascontiguousarray(t[f"{layer}.wo"].T)).T


def swap(t, a, b):
    t[a], t[b] = t[b], t[a]


def scale(t, name, factor):
    t[name] = (t[name] * np.float32(factor)).astype("<f4")


def set_first(t, name, value):
    t[name].flat[0] = value


def theta(c, t, value):
    t["rope_freq"][:] = checkpoint.frequencies(c["rope_dim"], value)


# name: (change of the fields and tensors, place and first position where it must show; None: any position)
MUTATIONS = {
    "eps 1e-6 for 1e-5": (lambda c, t: c.update(rms_norm_eps=1e-6), "layer 0", None),
    "eps 1.1e-5 for 1e-5": (lambda c, t: c.update(rms_norm_eps=1.1e-5), "layer 0", None),
    "theta 5e5 for 1e4": (lambda c, t: theta(c, t, 5e5), "layer 0", 1),
    "theta 10020 for 10000": (lambda c, t: theta(c, t, 10020), "layer 0", None),
    "attention scale": (lambda c, t: c.update(attention_scale=c["dim"] ** -0.5), "layer 0", 1),
    "head grouping in layer 0": (lambda c, t: regroup(c, t, 0), "layer 0", 0),
    "head grouping in layer 1": (lambda c, t: regroup(c, t, 1), "layer 1", 0),
    "w1 and w3 swapped in layer 0": (lambda c, t: swap(t, "0.w1", "0.w3"), "layer 0", 0),
    "w1 and w3 swapped in layer 2": (lambda c, t: swap(t, "2.w1", "2.w3"), "layer 2 + norm", 0),
    "wk and wv swapped in layer 1": (lambda c, t: swap(t, "1.wk", "1.wv"), "layer 1", 0),
    "norms swapped in layer 1": (lambda c, t: swap(t, "1.attention_norm", "1.ffn_norm"), "layer 1", 0),
    "bias left out in layer 1": (lambda c, t: scale(t, "1.bv", 0), "layer 1", 0),
    "wo off by 1e-5 in layer 1": (lambda c, t: scale(t, "1.wo", 1 + 1e-5), "layer 1", None),
    "final norm off by 1e-5": (lambda c, t: scale(t, "final_norm", 1 + 1e-5), "layer 2 + norm", None),
    "classifier off by 1e-5": (lambda c, t: scale(t, "classifier", 1 + 1e-5), "logits", None),
    "embedding rows swapped": (lambda c, t: t["token_embedding"].__setitem__([5, 6], t["token_embedding"][[6, 5]]),
                               "embedding", None),
}


def mutate(model, path, change):
    c, t = checkpoint.read(model)
    t = {name: value.copy() for name, value in t.items()}
    change(c, t)
    path.write_bytes(checkpoint.pack(c, t))
    return path


def test_a_right_export_passes(exported, capsys):
    code, out = check(capsys, *exported)
    assert code == 0 and out.out.endswith("PASS\n") and not out.err
    assert [line[:18].rstrip() for line in out.out.splitlines()[3:8]] == NAMES
    assert "beyond" not in out.out and "argmax: as float64 at 25" in out.out


@pytest.mark.parametrize("tokens", [1, 2, 17, 256])
def test_a_right_export_passes_at_any_length(exported, capsys, tokens):
    code, out = check(capsys, *exported, "--tokens", tokens)
    assert code == 0 and f"{tokens} pseudo-random ids" in out.out


def test_what_is_unchanged_still_passes(exported, capsys, tmp_path):
    model = mutate(exported[1], tmp_path / "same.bin", lambda c, t: None)
    assert model.read_bytes() == exported[1].read_bytes()
    assert check(capsys, exported[0], model)[0] == 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found_and_placed(exported, capsys, tmp_path, name):
    change, place, position = MUTATIONS[name]
    code, out = check(capsys, exported[0], mutate(exported[1], tmp_path / "wrong.bin", change))
    assert code == 1 and out.out.endswith("FAIL\n"), out.out
    found = re.search(r"the error first leaves the bound in: (.*), position (\d+)\n", out.out)
    assert found and found[1] == place, out.out
    assert position is None or int(found[2]) == position, out.out
    rows = out.out.splitlines()[3:8]
    assert not any("beyond" in row for row in rows[:NAMES.index(place)])


def test_not_a_number_fails():
    ones = np.ones((3, 4))
    for value in np.nan, np.inf:
        wrong = ones.astype("f4")
        wrong[1, 2] = value
        row = diff_logits.Row("x", wrong, ones.astype("f4"), ones, relative=True)
        assert not row.good and row.first_position == 1


def test_argmax_counts_only_where_it_is_clear():
    f64 = np.array([[1, 2, 0], [1, 1.00005, 0], [1, 1.0002, 0]])
    logits = np.array([[1, 2, 0], [1, 0.9, 0], [1, 0.9, 0]], dtype="f4")
    wrong, close = diff_logits.wrong_argmax(logits.argmax(1), f64)
    assert wrong.tolist() == [2] and close == 1


def test_divergence():
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    assert diff_logits.divergence(np.log(q) + 3, np.log(p) - 5) == pytest.approx([0.25 * np.log(2)])


@pytest.mark.parametrize("other", [dict(hidden_size=60), dict(vocab_size=120), dict(num_hidden_layers=2)],
                         ids=["dim", "vocabulary", "layers"])
def test_another_model_fails(exported, capsys, tmp_path, other):
    models.tiny_llama(tmp_path / "other", **SHAPE | other)
    code, out = check(capsys, tmp_path / "other", exported[1])
    assert code == 1 and out.out.endswith("FAIL\n") and "of another model" in out.err


def test_a_broken_file_fails_with_the_engines_words(exported, capsys, tmp_path):
    broken = tmp_path / "broken.bin"
    broken.write_bytes(exported[1].read_bytes()[:-100])
    code, out = check(capsys, exported[0], broken)
    assert code == 1 and out.out.endswith("FAIL\n") and "run: " in out.err


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A model with a byte-level tokenizer of 300 ids, and a text."""
    root = tmp_path_factory.mktemp("text")
    folder = models.tiny_llama(root / "source", vocab_size=300)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT.split(), tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (root / "text").write_text(TEXT, encoding="utf-8")
    return folder, reference.exported(folder, root / "model.bin"), root / "text", len(tokenizer.encode(TEXT).ids)


def test_a_text(with_tokenizer, capsys, tmp_path):
    folder, model, text, count = with_tokenizer
    for options, shown in ([], min(count, 256)), (["--tokens", 20], 20):
        code, out = check(capsys, folder, model, "--text", text, *options)
        assert code == 0 and f"{shown} tokens of {text}" in out.out, out
    wrong = mutate(model, tmp_path / "model.bin", MUTATIONS["theta 5e5 for 1e4"][0])
    shutil.copy(model.with_name("model.tokenizer.bin"), tmp_path)
    code, out = check(capsys, folder, wrong, "--text", text)
    assert code == 1 and "layer 0, position 1\n" in out.out
    for wrong in tmp_path / "none", tmp_path / "empty":
        (tmp_path / "empty").touch()
        code, out = check(capsys, folder, model, "--text", wrong)
        assert code == 1 and out.out.endswith("FAIL\n") and out.err.startswith("diff_logits.py: ")


def test_what_is_lost_is_said(exported, capsys, tmp_path):
    for args in [*exported, "--run", tmp_path / "none"], [tmp_path / "none", exported[1], "--run", binary()]:
        assert diff_logits.main([*map(str, args)]) == 1
        out = capsys.readouterr()
        assert out.out.endswith("FAIL\n")
        assert re.fullmatch(r"diff_logits.py: .*" + re.escape(str(tmp_path / "none")) + r".*\n", out.err)


def command(*args):
    return subprocess.run([sys.executable, ROOT / "tests" / "diff_logits.py", *args], capture_output=True, text=True)


def test_exit_codes_of_the_command(exported, tmp_path):
    right = command(*exported, "--run", binary())
    assert right.returncode == 0 and right.stdout.endswith("PASS\n")
    wrong = mutate(exported[1], tmp_path / "wrong.bin", MUTATIONS["theta 5e5 for 1e4"][0])
    assert command(exported[0], wrong, "--run", binary()).returncode == 1
    for args in [], exported[:1], [*exported, "--tokens", "0"], [*exported, "--tokens", "x"], [*exported, "--what"]:
        assert command(*args).returncode == 2
    assert command("--help").returncode == 0
