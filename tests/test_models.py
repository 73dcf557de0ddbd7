"""Random models over a grid of shapes and settings: ./run and PyTorch float32 over float64, at every position.

The table of errors is printed to stderr at the end.
"""
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import checkpoint
import diff_logits
import models
import reference
from conftest import binary, good, sanitized

T = 130          # positions compared; a prefill in chunks of 37 splits them at 37, 74 and 111
CHUNK = 37
MEAN_RATIO = 0.7
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)

# Config values on top of models.SMALL; `small_embedding` scales the embedding so that eps matters.
GRID = {
    "small": dict(),
    "tied": dict(tie_word_embeddings=True),
    "1 kv head": dict(num_attention_heads=8, num_key_value_heads=1),
    "all kv heads": dict(num_key_value_heads=4),
    "12 heads, 2 kv": dict(hidden_size=96, num_attention_heads=12, num_key_value_heads=2),
    "6 heads, 2 kv, head 16": dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=2),
    "dim 40, vocab 97, head 10": dict(hidden_size=40, vocab_size=97, num_key_value_heads=1),
    "dim 40, head 22": dict(hidden_size=40, vocab_size=97, head_dim=22, tie_word_embeddings=True),
    "dim 60, 3 heads, hidden 172, vocab 509": dict(hidden_size=60, intermediate_size=172, vocab_size=509,
                                                   num_attention_heads=3, num_key_value_heads=3),
    "dim 160, head 64": dict(hidden_size=160, head_dim=64),
    "dim 64, head 256, 1 kv": dict(head_dim=256, num_key_value_heads=1),
    "dim 256, hidden 512": dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_hidden_layers=3),
    "head 2": dict(hidden_size=32, num_attention_heads=16, num_key_value_heads=4),
    "mistral, dim 56, 6 heads, head 16": dict(family="mistral", hidden_size=56, num_attention_heads=6, head_dim=16),
    "qwen2": dict(family="qwen2"),
    "attention bias": dict(attention_bias=True),
    "ffn bias": dict(mlp_bias=True),
    "both biases, tied": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "theta 5e5": dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=8.0)),
    "llama3": dict(rope_parameters=LLAMA3),
    "yarn": dict(rope_parameters=YARN),
    "yarn, factor given": dict(rope_parameters=YARN | dict(attention_factor=1.5, beta_fast=16.0, beta_slow=2.0)),
    "eps 1e-5, small embedding": dict(rms_norm_eps=1e-5, small_embedding=1e-3),
    "eps 1e-6, small embedding": dict(rms_norm_eps=1e-6, small_embedding=1e-3),
    "eps 1e-2, small embedding": dict(rms_norm_eps=1e-2, small_embedding=1e-3),
    "bfloat16": dict(dtype="bfloat16"),
    "float16, tied": dict(dtype="float16", tie_word_embeddings=True),
    "sharded": dict(shard="100KB"),
    "sharded bfloat16, tied": dict(dtype="bfloat16", shard="50KB", tie_word_embeddings=True),
}
EPS = [name for name in GRID if name.startswith("eps")]
BITS = ["dim 60, 3 heads, hidden 172, vocab 509", "small", "dim 256, hidden 512", "dim 64, head 256, 1 kv"]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(name) or make(name, values) -> (Hugging Face folder, exported model), made once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def model(name, **values):
        if name not in made:
            values = dict(values or GRID[name])
            factor = values.pop("small_embedding", 1)
            folder = models.tiny_llama(root / str(len(made)), **values)
            if factor != 1:
                models.edit_tensors(folder, lambda t: t["model.embed_tokens.weight"].mul_(factor))
            made[name] = folder, reference.exported(folder, root / f"{len(made)}.bin")
        return made[name]
    return model


@pytest.fixture(scope="module")
def measure(make):
    """measure(name) -> rows of errors, results of PyTorch and ours for one model of the grid, computed once."""
    done = {}

    def compute(name):
        if name not in done:
            folder, model = make(name)
            ids = reference.random_ids(GRID[name].get("vocab_size", 131), T)
            (f32, f64), = reference.references(folder, [ids])
            hidden, logits = engine(model, ids, f64)
            done[name] = SimpleNamespace(ids=ids, f64=f64, logits=logits, model=model,
                                         rows=diff_logits.compare_all(hidden, logits, f32, f64))
        return done[name]
    return compute


def engine(model, ids, f64, *options):
    options = options or ("-b", CHUNK)
    widths = f64[1].shape[2], f64[0].shape[1]
    return [diff_logits.engine(binary(), model, mode, ids, width, options)
            for mode, width in zip(("hidden", "logits"), widths)]


@pytest.mark.parametrize("name", GRID)
def test_errors_are_no_larger_than_pytorchs(measure, name):
    m = measure(name)
    for row in m.rows:
        assert row.good, (row.name, row.first_position, row.ratio)
    logits = m.rows[-1]
    assert logits.ours.rms <= logits.theirs.rms
    assert logits.ours.largest <= 2 * logits.theirs.largest
    assert not len(diff_logits.wrong_argmax(m.logits.argmax(1), m.f64[0])[0])


@pytest.mark.parametrize("name", GRID)
def test_the_file_alone_gives_pytorchs_float64_results(measure, name):
    """The exported tensors and fields, computed by numpy from the format's description: no run.c."""
    m = measure(name)
    for ours, theirs in zip(checkpoint.forward(*checkpoint.read(m.model), m.ids), m.f64):
        assert np.abs(ours - theirs).max() <= 1e-12 * np.abs(theirs).max()


def test_mean_ratio_of_errors(measure, capfd):
    rows = {name: measure(name).rows[-1] for name in GRID}
    mean = np.exp(np.mean([np.log(r.ratio) for r in rows.values()]))
    with capfd.disabled():
        print(f"\n{'logits over float64':40} {'largest error':^19}  {'RMS error':^19}", file=sys.stderr)
        print(f"{'':40} {'run.c':>9} {'PyTorch':>9}  {'run.c':>9} {'PyTorch':>9}  ratio", file=sys.stderr)
        for name, r in rows.items():
            print(f"{name:40} {r.ours.largest:9.2e} {r.theirs.largest:9.2e}  {r.ours.rms:9.2e} {r.theirs.rms:9.2e}  "
                  f"{r.ratio:5.2f}", file=sys.stderr)
        print(f"{'geometric mean of the ratios':82}  {mean:5.2f}", file=sys.stderr)
    assert mean <= MEAN_RATIO


def test_eps_matters(measure):
    """Same weights, three values of eps: three outputs."""
    for a, b in itertools.combinations(EPS, 2):
        assert np.abs(measure(a).logits - measure(b).logits).max() > 1e-2


@pytest.mark.parametrize("name", BITS)
def test_same_bits_whatever_the_chunk(measure, name):
    m = measure(name)
    for mode in "logits", "hidden":
        outputs = {good(m.model, "-m", mode, "-I", " ".join(map(str, m.ids[:67])), "-o", "-", "-b", chunk)
                   for chunk in (1, 2, 3, 7, 8, 16, 64, 67, 256)}
        assert len(outputs) == 1


@pytest.mark.parametrize("name", BITS)
def test_same_bits_whatever_the_threads(measure, name):
    m = measure(name)
    ids = " ".join(map(str, m.ids[:67]))
    generate = ["--ids", "-n", 20, "-s", 42]
    for options in ["-m", "logits", "-o", "-"], [*generate, "-t", 0], [*generate, "-t", 0.8]:
        outputs = {good(m.model, "-I", ids, "-j", threads, *options) for threads in (1, 2, 3, 5, 8, 64)}
        outputs.add(good(m.model, "-I", ids, *options, env={"OMP_NUM_THREADS": "3", "OMP_DYNAMIC": "true"}))
        assert len(outputs) == 1


@pytest.mark.parametrize("name", [*BITS, "dim 40, head 22", "both biases, tied"])
def test_sanitized_build_gives_the_same_bits(measure, name):
    """No access out of bounds with KV heads wider or narrower than dim; -O1 and no -O3, the same sums."""
    m = measure(name)
    for mode in "logits", "hidden":
        arguments = [m.model, "-m", mode, "-I", " ".join(map(str, m.ids[:67])), "-o", "-", "-b", 37]
        assert good(*arguments, program=sanitized()) == good(*arguments)


def test_prefix_gives_the_same_bits(measure):
    """A position's logits depend on what came before it only."""
    m = measure("small")
    for count in 1, 2, 17, 64, 129:
        assert (engine(m.model, m.ids[:count], m.f64)[1] == m.logits[:count]).all()


def test_greedy_generation(make, measure):
    """Every generated id is the argmax of float64's logits, where its first two are not close."""
    out = [int(i) for i in good(measure("small").model, "-I", "5 6 7", "-t", 0, "-n", 100, "--ids").split()]
    assert out[:3] == [5, 6, 7] and 3 < len(out) <= 103
    f64 = reference.forward(reference.to_float64(reference.load(make("small")[0])), out[:-1])[0]
    wrong, _ = diff_logits.wrong_argmax(np.array(out[1:]), f64)
    assert not len(wrong[wrong >= 2])


def window_nll(model, ids):
    """Sum of -log p of every id of a window but the first, by float64."""
    return -sum(diff_logits.log_softmax(reference.forward(model, ids)[0][:-1])[range(len(ids) - 1), ids[1:]])


@pytest.mark.parametrize("context", [2, 50, 65, 128, 130])
def test_perplexity(make, measure, context):
    m = measure("small")
    model = reference.to_float64(reference.load(make("small")[0]))
    windows = [m.ids[i:i + context] for i in range(0, T, context)]
    count = sum(len(w) - 1 for w in windows)
    nll = sum(window_nll(model, w) for w in windows if len(w) > 1) / count
    words = good(m.model, "-m", "perplexity", "-I", " ".join(map(str, m.ids)), "-c", context).split()
    assert words[::2] == [b"perplexity", b"nll", b"tokens"] and int(words[5]) == count
    assert float(words[3]) == pytest.approx(nll, rel=1e-6)
    assert float(words[1]) == pytest.approx(np.exp(nll), rel=1e-5)


LONG = {"theta 5e5": dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)),
        "llama3": dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=512)),
        "yarn": dict(rope_parameters=YARN | dict(original_max_position_embeddings=1024))}


@pytest.mark.parametrize("name", LONG)
def test_long_positions(make, name):
    """Errors at positions 1, 500 and 3000: PyTorch's grow with the position (its angles are float32), ours do not."""
    folder, model = make("long " + name, max_position_embeddings=4096, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=32, **LONG[name])
    ids = reference.random_ids(131, 3001)
    (f32, f64), = reference.references(folder, [ids])
    ours, theirs = (np.abs(x - f64[0]) for x in (engine(model, ids, f64, "-b", 250)[1], f32[0]))
    for position in 1, 500, 3000:
        assert diff_logits.rms(ours[position]) <= 2 * diff_logits.rms(theirs[position])
    assert diff_logits.rms(ours) <= diff_logits.rms(theirs)
    assert diff_logits.rms(ours[2900:]) <= 2 * diff_logits.rms(ours[100:200])


@pytest.mark.parametrize("name", ["theta 5e5", "linear", "llama3", "yarn", "dim 40, vocab 97, head 10", "bfloat16"])
def test_frequencies_are_transformers_own(make, name):
    """Bit for bit, in float32 whatever the type of the weights; the attention factor too."""
    folder, model = make(name)
    fields, tensors = checkpoint.read(model)
    rotary = reference.load(folder).model.rotary_emb
    assert tensors["rope_freq"].tobytes() == rotary.inv_freq.numpy().tobytes()
    assert fields["rope_attention_factor"] == rotary.attention_scaling


def test_llama3_frequencies(make):
    """Llama 3.2's and 3.1's tables, by their ratio to plain ones."""
    expected = {(64, 32.0): ([0.605573, 0.303743, 0.103448], 15, 18), (128, 8.0): (
        [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211], 29, 35)}
    for (head, factor), (ratios, first, last) in expected.items():
        scaling = LLAMA3 | dict(factor=factor, original_max_position_embeddings=8192)
        _, model = make(f"llama3 {head}", head_dim=head, num_attention_heads=1, num_key_value_heads=1,
                        max_position_embeddings=131072, rope_parameters=scaling)
        ratio = checkpoint.read(model)[1]["rope_freq"][0] / checkpoint.frequencies(head, 5e5)
        np.testing.assert_allclose(ratio[:first], 1, rtol=3e-7)
        np.testing.assert_allclose(ratio[first:last], ratios, rtol=2e-5)
        np.testing.assert_allclose(ratio[last:], 1 / factor, rtol=3e-7)
