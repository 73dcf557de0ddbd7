"""What tests/bench.py measures: checkpoints of several sizes, and the engines that run them.

Each engine has measure(ids, n) -> seconds for the prompt and seconds a token for the n tokens after it (or None). A run
of ours is a new process, whose page faults count as prefill. llama.cpp and transformers stay loaded in a process of
their own, `python tests/engines.py NAME FILE THREADS`, that answers each line of JSON with one.
"""
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import checkpoint

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "tests/.cache/bench"
PROGRAM = os.path.abspath(os.environ.get("RUN", ROOT / "run"))
SOURCES = {"bundled": ROOT / "tests/stories.bin", "135M": ROOT / "smollm2.bin"}
SHAPES = {  # the last is TinyLlama's; where smollm2.bin is lacking, 135M is random too
    "1M": dict(dim=128, hidden_dim=352, n_layers=5, n_heads=8, n_kv_heads=4, vocab_size=1024, seq_len=2048),
    "42M": dict(dim=512, hidden_dim=1376, n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=32000, seq_len=2048),
    "135M": dict(dim=576, hidden_dim=1536, n_layers=30, n_heads=9, n_kv_heads=3, vocab_size=49152, seq_len=8192),
    "1.1B": dict(dim=2048, hidden_dim=5632, n_layers=22, n_heads=32, n_kv_heads=4, vocab_size=32000, seq_len=2048,
                 tied=0)}
NAMES = {  # ours, GGUF's and transformers'
    "token_embedding": ("token_embd", "model.embed_tokens"), "final_norm": ("output_norm", "model.norm"),
    "classifier": ("output", "lm_head"), "attention_norm": ("attn_norm", "input_layernorm"),
    "wq": ("attn_q", "self_attn.q_proj"), "wk": ("attn_k", "self_attn.k_proj"), "wv": ("attn_v", "self_attn.v_proj"),
    "wo": ("attn_output", "self_attn.o_proj"), "ffn_norm": ("ffn_norm", "post_attention_layernorm"),
    "w1": ("ffn_gate", "mlp.gate_proj"), "w2": ("ffn_down", "mlp.down_proj"), "w3": ("ffn_up", "mlp.up_proj")}


# ---- models ---------------------------------------------------------------------------------------------------------
def prompt_of(c, n):
    """n ids, the same each time."""
    return np.random.default_rng(n).integers(3, c["vocab_size"], n).tolist()


def opened(path):
    """The config and tensors of a checkpoint, views of its mapping."""
    return checkpoint.parse(np.memmap(path, mode="r"))


@functools.cache
def dropped(path):
    """A file, out of memory the first time (unless this run makes others of it), so that its engine reads it as after a
    start of the machine. What was written in pieces or in part given up stands in small pages: a prefill of 1.1B took
    1.15 times as long in such."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def made(path, source, write):
    """A file of the cache, written under another name first if it is not there yet or older than its source."""
    if not path.exists() or source.is_file() and path.stat().st_mtime < source.stat().st_mtime:
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"making {path.name}", file=sys.stderr)
        write(new := path.with_suffix(".part"))
        new.rename(path)
    return dropped(path)


class Random(dict):
    """Random tensors of bfloat16's precision, made when they are asked for, as a model of 1.1B takes some memory."""

    def __init__(self, c):
        self.c, self.rng = c, np.random.default_rng(0)
        self.shapes = {name: (dtype, shape) for name, dtype, shape in checkpoint.layout(c)}

    def __missing__(self, name):
        dtype, shape = self.shapes[name]
        if dtype == "<i4":
            return np.full(shape, name == "layer_rope", dtype)
        if name == "rope_freq":
            return checkpoint.frequencies(self.c["rope_dim"], self.c["rope_theta"])[None]
        values = self.rng.standard_normal(shape, dtype=np.float32)
        values = 1 + values / 10 if len(shape) == 1 else values / np.float32(shape[1] ** 0.5)
        return (values.view("<u4") & 0xFFFF0000).view("<f4")


def model_file(name):
    """A model of ours, without ids that would end a run early."""
    source = SOURCES.get(name, ROOT / name)
    if not source.exists():
        c = checkpoint.config(eos=[], **SHAPES[name])
        return made(CACHE / f"{name}-random.bin", CACHE, lambda path: checkpoint.write(path, c, Random(c)))
    c, t = opened(source)
    c, t["eos_ids"] = {**c, "eos": [], "n_eos": 0, "config_json": b"", "config_size": 0}, np.zeros(0, "<i4")
    return made(CACHE / f"{name}.bin", source, lambda path: checkpoint.write(path, c, t))


def bf16_file(path):
    """The same in bfloat16."""
    c, t = opened(path)
    c = {**c, "weight_type": 1}
    narrow = {name: dtype for name, dtype, _ in checkpoint.layout(c)}
    return made(path.with_suffix(".bf16"), path, lambda new: checkpoint.write(
        new, c, {name: checkpoint.stored(w, narrow[name]) for name, w in t.items()}))


def adjacent(c, name, w):
    """Rows of wq and wk in the order of engines that rotate adjacent pairs."""
    if name.split(".")[-1] not in ("wq", "wk") or c["rope_pairs"]:
        return w
    return w.reshape(-1, 2, c["head_dim"] // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def renamed(t, column, layers):
    """{name of a tensor: name elsewhere}, `layers` being the prefix of what belongs to a layer."""
    split = {name: name.rpartition(".") for name in t}
    return {name: (f"{layers}.{layer}." if layer else "") + NAMES[role][column] + ".weight"
            for name, (layer, _, role) in split.items() if role in NAMES}


def gguf_file(path):
    """The same as an F32 GGUF without a vocabulary."""
    c, t = opened(path)

    def write(new):
        import gguf
        out = gguf.GGUFWriter(str(new), "llama")
        for key, value in dict(
                context_length=c["seq_len"], embedding_length=c["dim"], block_count=c["n_layers"],
                feed_forward_length=c["hidden_dim"], head_count=c["n_heads"], head_count_kv=c["n_kv_heads"],
                layer_norm_rms_eps=c["rms_norm_eps"], rope_freq_base=c["rope_theta"],
                rope_dimension_count=c["rope_dim"], vocab_size=c["vocab_size"], tokenizer_model="no_vocab",
                file_type=0).items():
            getattr(out, f"add_{key}")(value)
        for name, theirs in renamed(t, 0, "blk").items():
            out.add_tensor_info(theirs, t[name].shape, t[name].dtype, t[name].nbytes)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
        for name in renamed(t, 0, "blk"):
            out.write_tensor_data(np.ascontiguousarray(adjacent(c, name, t[name])))
        out.close()
    return made(path.with_suffix(".gguf"), path, write)


def llama2c_file(path):
    """The same as llama2.c's legacy file, with a tokenizer beside it."""
    c, t = opened(path)
    made(path.with_suffix(".tokenizer"), path, lambda new: checkpoint.write_llama2c_tokenizer(new, c["vocab_size"]))
    return made(path.with_suffix(".llama2c"), path, lambda new: checkpoint.write_llama2c(
        new, c, {name: adjacent(c, name, w) for name, w in t.items()}))


# ---- engines --------------------------------------------------------------------------------------------------------
class Ours:
    """A build of run.c."""

    def __init__(self, name, program, path, threads):
        self.name, self.program, self.path, self.threads = name, program, path, threads

    def command(self, ids, n, *more):
        return [self.program, str(self.path), "-I", " ".join(map(str, ids)), "--ids", "-t", "0", "-n", str(n),
                "-j", str(self.threads), *more]

    def measure(self, ids, n):
        """As the line on stderr says. One decimal is too few for slow models: those are timed as their ids arrive. The
        ids of others go nowhere: who reads them takes the processors from whom is measured (1M: 17% of the time)."""
        slow, arrived = n < 32, []  # plan() gives slow models few
        process = subprocess.Popen(self.command(ids, n), stdout=subprocess.PIPE if slow else subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)
        while slow and (part := os.read(process.stdout.fileno(), 1 << 16)):
            arrived += [time.perf_counter()] * (len(part.split()))
        _, report = process.communicate()
        numbers = re.search(rb"prompt: (\d+) tokens, (\S+) tok/s; generated: (\d+) tokens, (\S+) tok/s", report)
        if process.returncode or not numbers or int(numbers[3]) != n:
            sys.exit(f"bench: {self.program} failed on {self.path}: {report.decode(errors='replace')}")
        prompt = len(ids) / float(numbers[2])
        if n < 2:
            return prompt, None
        rate = float(numbers[4])
        return prompt, (arrived[-1] - arrived[-n]) / (n - 1) if arrived and rate < 100 else 1 / rate

    def logits(self, ids):
        """Of the last id."""
        done = subprocess.run(self.command(ids, 0, "-m", "logits"), capture_output=True, check=True)
        return np.frombuffer(done.stdout, "<f4").reshape(len(ids), -1)[-1]

    def close(self):
        pass


class Peer:
    """An engine in a process of its own."""

    def __init__(self, name, path, threads):
        self.name = name
        self.process = subprocess.Popen([sys.executable, __file__, name, str(path), str(threads)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        env={**os.environ, "OMP_NUM_THREADS": str(threads)})

    def ask(self, ids, n):
        self.process.stdin.write(json.dumps([ids, n]).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else sys.exit(f"bench: it failed: {' '.join(self.process.args)}")

    def measure(self, ids, n):
        return self.ask(ids, n)[:2]

    def logits(self, ids):
        """The first of the last id's."""
        return np.array(self.ask(ids, 0)[2])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Llama2c(Ours):
    """llama2.c's run, which reports tok/s from the second token on, and takes a prompt token by token."""

    def measure(self, ids, n):
        command = [self.program, self.path, "-z", self.path.with_suffix(".tokenizer"), "-t", "0", "-n", len(ids) + n]
        with tempfile.TemporaryFile() as out:  # a reader would take the processors
            subprocess.run(list(map(str, command)), stdout=out, stderr=out,
                           env={**os.environ, "OMP_NUM_THREADS": str(self.threads)})
            out.seek(0)
            rate = re.search(rb"achieved tok/s: (\S+)", said := out.read())
        return None, 1 / float(rate[1]) if rate else sys.exit(f"bench: {self.program} failed: {said[-500:]}")


def load_llama_cpp(path, threads):
    """-> reset(), which empties the cache, and step(ids) -> logits of the last."""
    import llama_cpp as l
    l.llama_backend_init()
    model = l.llama_model_load_from_file(str(path).encode(), l.llama_model_default_params())
    options = l.llama_context_default_params()
    options.n_ctx, options.n_batch = l.llama_model_n_ctx_train(model), 512
    options.n_threads = options.n_threads_batch = threads
    context = l.llama_init_from_model(model, options)
    n_vocab = l.llama_vocab_n_tokens(l.llama_model_get_vocab(model))

    def step(ids):
        for i in range(0, len(ids), 512):
            part = (l.llama_token * len(ids[i:i + 512]))(*ids[i:i + 512])
            assert l.llama_decode(context, l.llama_batch_get_one(part, len(part))) == 0
        return np.ctypeslib.as_array(l.llama_get_logits_ith(context, -1), (n_vocab,))
    return lambda: l.llama_memory_clear(l.llama_get_memory(context), False), step


def load_transformers(path, threads):
    """The same."""
    import torch
    import transformers
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    c, t = opened(path)
    config = transformers.LlamaConfig(
        hidden_size=c["dim"], intermediate_size=c["hidden_dim"], num_hidden_layers=c["n_layers"],
        num_attention_heads=c["n_heads"], num_key_value_heads=c["n_kv_heads"], vocab_size=c["vocab_size"],
        max_position_embeddings=c["seq_len"], rms_norm_eps=c["rms_norm_eps"], tie_word_embeddings=bool(c["tied"]),
        rope_parameters=dict(rope_type="default", rope_theta=c["rope_theta"]))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {theirs: torch.from_numpy(t[name].copy()) for name, theirs in renamed(t, 1, "model.layers").items()}
    model.load_state_dict(state, strict=not c["tied"], assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    cache = None

    def reset():
        nonlocal cache
        cache = transformers.DynamicCache(config=config)

    def step(ids):
        out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].numpy()
    return reset, step


def serve(name, path, threads):
    """Answers [ids, n] with seconds of the prompt and of a token after it, and the first logits after the prompt."""
    reset, step = {"llama.cpp": load_llama_cpp, "transformers": load_transformers}[name](path, threads)
    for line in sys.stdin:
        ids, n = json.loads(line)
        reset()
        start = time.perf_counter()
        logits = step(ids)[:256].tolist()
        first = time.perf_counter()
        for i in range(n - 1):
            step(ids[:1])
        end = time.perf_counter()
        print(json.dumps([first - start, (end - first) / (n - 1) if n > 1 else None, logits]), flush=True)


def takes_bf16():
    """Does ours read bfloat16 checkpoints yet?"""
    path = CACHE / "tiny.bf16"
    checkpoint.write(path, checkpoint.config(weight_type=1))
    return not subprocess.run([PROGRAM, path, "-I", "3", "--ids", "-n", "1"], capture_output=True).returncode


def contenders(o, part, model):
    """Ours, and what goes with a part: another build, bfloat16, one thread, the peers that are installed."""
    path = model_file(model)
    found = [Ours("run.c", PROGRAM, path, o.threads)]
    if part == "threads":
        found.append(Ours("run.c -j 1", PROGRAM, path, 1))
    if o.against:
        found.append(Ours("other build", os.path.abspath(o.against), path, o.threads))
    if part == "decode" and takes_bf16():
        found.append(Ours("run.c bf16", PROGRAM, bf16_file(path), o.threads))
    installed = lambda *names: not o.no_peers and all(map(importlib.util.find_spec, names))
    if part in ("decode", "prefill") and installed("llama_cpp", "gguf"):
        found.append(Peer("llama.cpp", gguf_file(path), o.threads))
    if part in ("decode", "prefill") and installed("transformers"):
        found.append(Peer("transformers", path, o.threads))
    if part == "decode" and o.llama2c:
        found.append(Llama2c("llama2.c", os.path.abspath(o.llama2c), llama2c_file(path), o.threads))
    return found


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
