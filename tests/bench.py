"""Measures ./run beside the machine's limits and beside other engines on the same weights.

    python tests/bench.py [PART ...] [--models 135M ...] [--rounds 5] [--threads N] [--against BINARY] [--llama2c RUN]
                          [--json] [--plot] [--quick]

Parts: decode, prefill, short, context, threads, startup, memory, sweep (default: all). Models: bundled, 1M, 42M, 135M
(SmolLM2 where `make smollm2` has brought it), 1.1B (TinyLlama's shape); random ones and the files for the other engines
are made in tests/.cache/bench, 12 GB with 1.1B. Peers: llama.cpp (pip install llama-cpp-python, built from source for
this processor), transformers, llama2.c (--llama2c names its binary). RUN names another binary of ours. --quick: the
bundled model, briefly. --plot writes tests/speed.svg and tests/sweep.svg.

Bandwidth and clock of a machine drift, so contenders take turns in each round, after a round of warm-up that does not
count, and every ratio is the median of the rounds' own ratios. A run of ours is a new process, whose page faults count
as prefill; the peers stay loaded, and their tokens are given, not sampled.
"""
import argparse
import ctypes
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import checkpoint

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "tests/.cache/bench"
PARTS = "decode prefill short context threads startup memory sweep".split()
SHAPES = {  # of the models
    "1M": dict(dim=128, hidden_dim=352, n_layers=5, n_heads=8, n_kv_heads=4, vocab_size=1024, seq_len=2048),
    "42M": dict(dim=512, hidden_dim=1376, n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=32000, seq_len=2048),
    "135M": dict(dim=576, hidden_dim=1536, n_layers=30, n_heads=9, n_kv_heads=3, vocab_size=49152, seq_len=8192),
    "1.1B": dict(dim=2048, hidden_dim=5632, n_layers=22, n_heads=32, n_kv_heads=4, vocab_size=32000, seq_len=2048, tied=0)}
SOURCES = {"bundled": ROOT / "tests/stories.bin", "135M": ROOT / "smollm2.bin"}
NAMES = {  # ours, GGUF's and transformers'
    "attention_norm": ("attn_norm", "input_layernorm"), "wq": ("attn_q", "self_attn.q_proj"),
    "wk": ("attn_k", "self_attn.k_proj"), "wv": ("attn_v", "self_attn.v_proj"), "wo": ("attn_output", "self_attn.o_proj"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm"), "w1": ("ffn_gate", "mlp.gate_proj"),
    "w2": ("ffn_down", "mlp.down_proj"), "w3": ("ffn_up", "mlp.up_proj"), "token_embedding": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"), "classifier": ("output", "lm_head")}


# ---- models ---------------------------------------------------------------------------------------------------------
def prompt_of(c, n):
    return np.random.default_rng(n).integers(3, c["vocab_size"], n).tolist()


def opened(path):
    """The config and tensors of a checkpoint, views of its mapping."""
    return checkpoint.parse(np.memmap(path, mode="r"))


class Random(dict):
    """Random tensors, made when they are asked for; matrices keep the length of a vector and survive bfloat16."""

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


def made(path, source, write):
    """A file of the cache, written under another name first if it is not there yet or older than its source."""
    if not path.exists() or source.is_file() and path.stat().st_mtime < source.stat().st_mtime:
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"making {path.name}", file=sys.stderr)
        write(path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return path


def model_file(name):
    """Our checkpoint, without ids that would end a run early."""
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
    lazy = type("", (), {"__getitem__": lambda self, name: checkpoint.stored(t[name], kinds[name])})()
    kinds = {name: dtype for name, dtype, _ in checkpoint.layout(c)}
    return made(path.with_suffix(".bf16"), path, lambda new: checkpoint.write(new, c, lazy))


def adjacent(c, name, w):
    """Rows of wq and wk in the order of engines that rotate adjacent pairs."""
    if name.split(".")[-1] not in ("wq", "wk") or c["rope_pairs"]:
        return w
    return w.reshape(-1, 2, c["head_dim"] // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def gguf_file(path):
    """The same as an F32 GGUF without a vocabulary."""
    import gguf
    c, t = opened(path)

    def write(new):
        out = gguf.GGUFWriter(str(new), "llama")
        for add, value in ((out.add_context_length, c["seq_len"]), (out.add_embedding_length, c["dim"]),
                           (out.add_block_count, c["n_layers"]), (out.add_feed_forward_length, c["hidden_dim"]),
                           (out.add_head_count, c["n_heads"]), (out.add_head_count_kv, c["n_kv_heads"]),
                           (out.add_layer_norm_rms_eps, c["rms_norm_eps"]), (out.add_rope_freq_base, c["rope_theta"]),
                           (out.add_rope_dimension_count, c["rope_dim"]), (out.add_vocab_size, c["vocab_size"]),
                           (out.add_tokenizer_model, "no_vocab"), (out.add_file_type, 0)):
            add(value)
        names = [(name, *name.rpartition(".")[::2]) for name in t if name.rpartition(".")[2] in NAMES]
        for name, layer, role in names:
            theirs = f"blk.{layer}.{NAMES[role][0]}.weight" if layer else f"{NAMES[role][0]}.weight"
            out.add_tensor_info(theirs, t[name].shape, t[name].dtype, t[name].nbytes)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
        for name, _, _ in names:
            out.write_tensor_data(np.ascontiguousarray(adjacent(c, name, t[name])))
        out.close()
    return made(path.with_suffix(".gguf"), path, write)


def llama2c_file(path):
    """The same as llama2.c's legacy file, with a tokenizer beside it."""
    c, t = opened(path)
    new = made(path.with_suffix(".llama2c"), path, lambda new: checkpoint.write_llama2c(
        new, c, {name: adjacent(c, name, w) for name, w in t.items()}))
    made(path.with_suffix(".tokenizer"), path, lambda new: checkpoint.write_llama2c_tokenizer(new, c["vocab_size"]))
    return new


# What a forward of T tokens from a position on must move and compute: every matrix once (of an embedding that is not
# the classifier no more than T rows, not counted), the cache once; 2 operations a multiply-add, logits of one token.
def matrices(c):
    """Weights in the matrices of all layers, and in the classifier."""
    q, kv = c["n_heads"] * c["head_dim"], c["n_kv_heads"] * c["head_dim"]
    return c["n_layers"] * c["dim"] * (2 * q + 2 * kv + 3 * c["hidden_dim"]), c["vocab_size"] * c["dim"]


def bytes_of(c, T, position, size=4):
    cached = 8 * c["n_layers"] * c["n_kv_heads"] * c["head_dim"] * (position + T)
    return size * sum(matrices(c)) + cached


def flops_of(c, T, position):
    layers, classifier = matrices(c)
    pairs = T * position + T * (T + 1) / 2                     # of a query and a key
    return 2 * (T * layers + classifier) + 4 * c["n_layers"] * c["n_heads"] * c["head_dim"] * pairs


# ---- contenders: measure(ids, n) -> seconds for the prompt, seconds a token for n tokens after it -------------------
class Ours:
    def __init__(self, name, program, path, threads):
        self.name, self.program, self.path, self.threads = name, program, path, threads

    def command(self, ids, n, *more):
        return [self.program, str(self.path), "-I", " ".join(map(str, ids)), "--ids", "-t", "0", "-n", str(n),
                "-j", str(self.threads), *more]

    def measure(self, ids, n):
        """From the line on stderr. It has one decimal, too few for slow models: those are timed as the ids arrive."""
        process = subprocess.Popen(self.command(ids, n), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        arrived = []
        while n < 100 and (part := os.read(process.stdout.fileno(), 1 << 16)):
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
        done = subprocess.run(self.command(ids, 0, "-m", "logits"), capture_output=True, check=True)
        return np.frombuffer(done.stdout, "<f4").reshape(len(ids), -1)[-1]

    def close(self):
        pass


class Peer:
    """An engine loaded in a process of its own, that answers a line of JSON with one."""

    def __init__(self, name, path, threads):
        self.name = name
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", name, str(path), str(threads)], env=env,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def ask(self, *what):
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else sys.exit(f"bench: {self.name} ended (--serve shows why)")

    def measure(self, ids, n):
        return self.ask(ids, n)[:2]

    def logits(self, ids):
        return np.array(self.ask(ids, 0)[2])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Llama2c(Ours):
    def measure(self, ids, n):
        """Its tok/s, from the second token on. It takes the prompt token by token, hence no prefill."""
        command = [self.program, self.path, "-z", self.path.with_suffix(".tokenizer"), "-t", "0", "-n", len(ids) + n]
        done = subprocess.run(list(map(str, command)), capture_output=True,
                              env={**os.environ, "OMP_NUM_THREADS": str(self.threads)})
        rate = re.search(rb"achieved tok/s: (\S+)", done.stdout + done.stderr)
        return None, 1 / float(rate[1]) if rate else sys.exit(f"bench: {self.program} failed: {done.stderr[-500:]}")


def load_llama_cpp(path, threads):
    """-> reset(), step(ids) -> logits of the last"""
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
    state = {}
    for name in t:
        layer, _, role = name.rpartition(".")
        if role in NAMES:
            state[f"model.layers.{layer}.{NAMES[role][1]}.weight" if layer else f"{NAMES[role][1]}.weight"] = \
                torch.from_numpy(t[name].copy())
    model.load_state_dict(state, strict=not c["tied"], assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    cache = [None]

    def reset():
        cache[0] = transformers.DynamicCache(config=config)

    def step(ids):
        return model(torch.tensor([ids]), past_key_values=cache[0], use_cache=True, logits_to_keep=1).logits[0, -1].numpy()
    return reset, step


def serve(name, path, threads):
    """A Peer's process."""
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


# ---- measuring ------------------------------------------------------------------------------------------------------
def probe(path, threads, seconds):
    """(GB/s, GFLOP/s) that the machine gives now."""
    source = ROOT / "tests/probe.c"
    flags = "-std=c11 -O3 -march=native -ffp-contract=fast -fopenmp".split()
    made(CACHE / "probe", source,
         lambda new: subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", new, source], check=True))
    done = subprocess.run([CACHE / "probe", path, "8", str(seconds)], capture_output=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return tuple(map(float, done.stdout.split()))


class Bench:
    def __init__(self, options):
        self.o, self.models, self.rounds = options, {}, options.rounds
        self.results = {}       # (part, model, case) -> {contender: [(prompt seconds, token seconds) a round]}
        self.cases = {}         # (part, model, case) -> (prompt tokens, new tokens)
        self.program = os.path.abspath(os.environ.get("RUN", ROOT / "run"))
        self.bf16 = self.takes_bf16()

    def takes_bf16(self):
        path = CACHE / "tiny.bf16"
        checkpoint.write(path, checkpoint.config(weight_type=1))
        return not subprocess.run([self.program, path, "-I", "3", "--ids", "-n", "1"], capture_output=True).returncode

    def contenders(self, part, path):
        """Ours, and what goes with a part: another build, bfloat16, the peers there are."""
        o, threads = self.o, self.o.threads
        found = [Ours("run.c", self.program, path, threads)]
        if part == "threads":
            return found + [Ours("run.c -j 1", self.program, path, 1)]
        if o.against:
            found.append(Ours("other build", os.path.abspath(o.against), path, threads))
        if part == "decode" and self.bf16:
            found.append(Ours("run.c bf16", self.program, bf16_file(path), threads))
        if part in ("decode", "prefill", "context") and not o.no_peers:
            has = lambda name: importlib.util.find_spec(name) is not None
            if has("llama_cpp") and has("gguf"):
                found.append(Peer("llama.cpp", gguf_file(path), threads))
            if has("transformers") and part != "context":
                found.append(Peer("transformers", path, threads))
            if o.llama2c and part == "decode":
                found.append(Llama2c("llama2.c", os.path.abspath(o.llama2c), llama2c_file(path), threads))
        return found

    def agree(self, c, contenders):
        """Peers must compute the same model, or their speed means nothing."""
        ids = prompt_of(c, 8)
        ours = contenders[0].logits(ids)[:256]
        for peer in contenders:
            if isinstance(peer, Peer):
                error = float(np.abs(peer.logits(ids)[:256] - ours).max() / ours.std())
                print(f"{peer.name}: logits within {error:.1e} of their deviation", file=sys.stderr)
                if not error < 0.05:
                    sys.exit(f"bench: {peer.name} does not compute the same logits")

    def run(self, part, model, cases):
        """Rounds over cases {name: (prompt tokens, new tokens)} and contenders, the machine's limits measured beside."""
        path = model_file(model)
        c = self.models[model] = opened(path)[0]
        contenders = self.contenders(part, path)
        try:
            self.agree(c, contenders)
            for i in range(-1, self.rounds):
                for case, (T, n) in cases.items():
                    self.cases[part, model, case] = T, n
                    found = self.results.setdefault((part, model, case), {})
                    for x in contenders[:: -1 if i % 2 else 1]:
                        limits = probe(path, self.o.threads, self.o.seconds) if x is contenders[0] else None
                        time_taken = x.measure(prompt_of(c, T), n)
                        if i >= 0:
                            found.setdefault(x.name, []).append(time_taken)
                        if i >= 0 and limits:
                            found.setdefault("limits", []).append(limits)
                    print(f"{part} {model} {case}: round {i + 1} of {self.rounds}", end="\r", file=sys.stderr)
        finally:
            print(file=sys.stderr)
            for x in contenders:
                x.close()

    def ratio(self, f, *keys):
        """The median over rounds of f of the rounds of each (part, model, case, contender); None if one is lacking."""
        columns = [self.results.get(key[:3], {}).get(key[3]) for key in keys]
        if None in columns:
            return None
        values = [f(*values) for values in zip(*columns)]
        return None if None in values else median(values)

    def fraction(self, key, contender):
        """Of the machine's limit: bandwidth for decoding, multiply-adds for a prompt alone."""
        c, (T, n) = self.models[key[1]], self.cases[key]
        if n > 1:
            size = bytes_of(c, 1, T + n / 2, 2 if contender == "run.c bf16" else 4) / 1e9
            return self.ratio(lambda x, limit: x[1] and size / x[1] / limit[0], (*key, contender), (*key, "limits"))
        flops = flops_of(c, T, 0) / 1e9
        return self.ratio(lambda x, limit: x[0] and flops / x[0] / limit[1], (*key, contender), (*key, "limits"))


def started(engine, c):
    """Seconds from exec to the start of the first forward: the time until the report less what it says."""
    ids = prompt_of(c, 64)
    start = time.perf_counter()
    process = subprocess.Popen(engine.command(ids, 0), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    report = next(line for line in process.stderr if line.startswith(b"prompt:"))
    end = time.perf_counter()
    process.communicate()
    return end - start - len(ids) / float(re.search(rb"tokens, (\S+) tok/s", report)[1])


def peak_memory(engine, c):
    """Largest anonymous memory of a prompt of 512 in chunks of 256, less the cache, in bytes."""
    ids, peak = prompt_of(c, min(512, c["seq_len"])), 0
    process = subprocess.Popen(engine.command(ids, 0, "-b", "256"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max(peak, *(1024 * int(kb) for kb in re.findall(r"RssAnon:\s+(\d+)", status)), 0)
        time.sleep(0.002)
    return peak - 8 * c["n_layers"] * c["n_kv_heads"] * c["head_dim"] * len(ids)


# ---- reports --------------------------------------------------------------------------------------------------------
def measurements(b):
    """A dictionary for each (part, model, case, contender)."""
    for key, found in b.results.items():
        c, (T, n) = b.models[key[1]], b.cases[key]
        for name in found:
            if name == "limits" or found[name][0][n > 1] is None:
                continue
            times = [x[n > 1] / (1 if n > 1 else T) for x in found[name]]
            size = bytes_of(c, 1, T + n / 2, 2 if name == "run.c bf16" else 4) if n > 1 else flops_of(c, T, 0) / T
            yield dict(part=key[0], model=key[1], case=key[2], contender=name, rounds=len(times),
                       tokens_per_second=1 / median(times), spread=(max(times) - min(times)) / 2 / median(times),
                       giga_per_second=size / median(times) / 1e9, unit="GB/s" if n > 1 else "GFLOP/s",
                       limit=median(x[n < 2] for x in found["limits"]), of_limit=b.fraction(key, name),
                       ours_over_it=b.ratio(lambda us, x: x[n > 1] / us[n > 1], (*key, "run.c"), (*key, name)))


def targets(b):
    """(what, measured, must, aim, unit) of the goals; a must below or above its aim says which way is better."""
    def over(part, model, peer, of=1):
        return b.ratio(lambda us, x: us[of] and x[of] and x[of] / us[of], (part, model, part, "run.c"), (part, model, part, peer))

    def limit(part, model):
        key = part, model, part
        return b.fraction(key, "run.c") if key in b.results else None

    short = lambda f, *cases: b.ratio(f, *(("short", "135M", case, "run.c") for case in cases))
    kept = [b.ratio(lambda x: bytes_of(b.models["135M"], 1, T + n / 2) / x[1], ("context", "135M", case, "run.c"))
            for case, (T, n) in CONTEXT.items()]
    rows = [(f"decode {m}, of the read bandwidth", limit("decode", m), 0.92, 0.97, "") for m in ("135M", "1.1B")]
    rows += [(f"prefill 512 {m}, of the FMA peak", limit("prefill", m), *goal, "")
             for m, goal in (("135M", (0.70, 0.80)), ("1.1B", (0.75, 0.88)))]
    rows += [("decode 135M over llama2.c", over("decode", "135M", "llama2.c"), 1.05, 1.12, "")]
    rows += [(f"decode {m} over llama.cpp F32", over("decode", m, "llama.cpp"), *goal, "")
             for m, goal in (("42M", (1.25, 1.4)), ("135M", (1.3, 1.5)), ("1.1B", (1.03, 1.1)))]
    rows += [(f"prefill 512 {m} over llama.cpp F32", over("prefill", m, "llama.cpp", 0), *goal, "")
             for m, goal in (("135M", (1.25, 1.5)), ("1.1B", (1.15, 1.35)))]
    rows += [(f"prefill 512 {m} over transformers", over("prefill", m, "transformers", 0), 1.15, 1.5, "") for m in ("135M", "1.1B")]
    rows += [(f"decode {m} over transformers", over("decode", m, "transformers"), 2.5, 3.3, "") for m in ("135M", "1.1B")]
    rows += [("a prompt of 8 over one of 1, time, 135M", short(lambda x, y: x[0] / y[0], "8 tokens", "1 token"), 2.0, 1.3, ""),
             ("a prompt of 8 over a decoded token, time, 135M", short(lambda x: x[0] / x[1], "8 tokens"), 2.0, 1.3, "")]
    rows += [("bf16 over float32, decode 1.1B", b.ratio(lambda x, y: y[1] / x[1], ("decode", "1.1B", "decode", "run.c bf16"),
                                                         ("decode", "1.1B", "decode", "run.c")), 1.75, 1.95, "")]
    rows += [("bandwidth kept at position 8000, 135M", kept[1] / kept[0] if all(kept) else None, 0.85, 0.95, "")]
    rows += [("2 threads over 1, decode 1M", over("threads", "1M", "run.c -j 1"), 1.0, 1.4, "")]
    rows += [("exec to the first forward", b.startup and b.startup * 1e3, 30, 10, "ms"),
             ("peak memory over weights and cache", b.memory and b.memory / 2**20, 48, 24, "MB")]
    return [row for row in rows if row[1] is not None]


CONTEXT = {"position 0": (8, 64), "position 8000": (8000, 32)}


def print_tables(rows, goals):
    print(f"\n{'':34}{'tok/s':>10}{'spread':>8}{'':>12}{'of limit':>18}{'run.c over it':>15}")
    for r in rows:
        what = f"{r['part']} {r['model']}" + (f" {r['case']}" if r["case"] != r["part"] else "")
        rate = f"{r['giga_per_second']:.1f} {r['unit']}"
        print(f"{what + ', ' + r['contender']:<34.40}{r['tokens_per_second']:>10.1f}{r['spread']:>8.1%}{rate:>16}"
              f"{r['of_limit']:>8.2f} of {r['limit']:<6.0f}{r['ours_over_it']:>11.2f}")
    print(f"\n{'':52}{'measured':>10}{'must':>8}{'aim':>8}")
    for what, value, must, aim, unit in goals:
        better = 1 if aim > must else -1
        word = "aim" if value * better >= aim * better else "must" if value * better >= must * better else "MISSED"
        print(f"{what:<52}{value:>10.2f}{must:>8}{aim:>8} {unit:<3}{word}")


def plots(b, rows):
    """tests/speed.svg: fractions of the limit; tests/sweep.svg: time per token beside what bytes and operations take."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "run.c", "font.size": 9})
    from matplotlib import pyplot as plt

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(ROOT / "tests" / name, metadata={"Date": None})

    shown = [r for r in rows if r["part"] in ("decode", "prefill")]
    if shown:
        groups = list(dict.fromkeys((r["part"], r["model"]) for r in shown))
        names = list(dict.fromkeys(r["contender"] for r in shown))
        figure, axes = plt.subplots(figsize=(7, 3))
        for i, name in enumerate(names):
            bars = [(groups.index((r["part"], r["model"])), r["of_limit"]) for r in shown if r["contender"] == name]
            axes.bar([x + (i - len(names) / 2 + 0.5) * 0.8 / len(names) for x, _ in bars], [y for _, y in bars],
                     0.75 / len(names), label=name)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(groups)), [f"{part}\n{model}" for part, model in groups])
        axes.set_ylabel("of read bandwidth, FMA peak")
        axes.legend(fontsize=8, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False)
        save(figure, "speed.svg")

    sweeps = [sweep_points(b, "prompt", "prompt length"), sweep_points(b, "position", "position in the context"),
              size_points(b, rows)]
    if not any(points for _, points in sweeps):
        return
    figure, all_axes = plt.subplots(1, 3, figsize=(9, 3))
    for axes, (label, points) in zip(all_axes, sweeps):
        xs, measured, expected = zip(*points) if points else ((), (), ())
        axes.plot(xs, [1e3 * y for y in measured], "o-", markersize=3, label="run.c")
        axes.plot(xs, [1e3 * y for y in expected], "--", color="black", linewidth=0.8, label="expected")
        axes.set_xlabel(label)
        if "position" not in label:
            axes.set_xscale("log")
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    all_axes[0].set_ylabel("ms per token")
    all_axes[0].legend(fontsize=8, frameon=False)
    save(figure, "sweep.svg")


def expected(c, T, position, n, limits, chunk=256):
    """Seconds a token: of what memory and arithmetic take the longer; a prompt reads the weights once a chunk."""
    bandwidth, peak = (median(x[i] for x in limits) * 1e9 for i in (0, 1))
    if n > 1:
        return max(bytes_of(c, 1, T + n / 2) / bandwidth, flops_of(c, 1, T + n / 2) / peak)
    return max(-(-T // chunk) * bytes_of(c, T, 0) / bandwidth, flops_of(c, T, 0) / peak) / T


def sweep_points(b, kind, label):
    """(prompt length or position, seconds a token, expected) of a sweep's cases."""
    points = []
    for key, (T, n) in b.cases.items():
        if key[0] == "sweep" and key[2].startswith(kind):
            found = b.results[key]
            took = median(x[1] if n > 1 else x[0] / T for x in found["run.c"])
            points.append((T, took, expected(b.models[key[1]], T, 0, n, found["limits"])))
    return label, points


def size_points(b, rows):
    points = [(sum(matrices(b.models[r["model"]])), 1 / r["tokens_per_second"],
               expected(b.models[r["model"]], *b.cases[r["part"], r["model"], r["case"]][:1], 0, 2,
                        b.results[r["part"], r["model"], r["case"]]["limits"]))
              for r in rows if r["part"] in ("decode", "threads") and r["contender"] == "run.c"]
    return "weights", sorted(points)


# ---- the command line -----------------------------------------------------------------------------------------------
def plan(o):
    """(part, model, cases) in the order of the models, whose files then stay in memory."""
    uses = {"decode": ("42M", "135M", "1.1B"), "prefill": ("135M", "1.1B"), "threads": ("1M",)}
    for model in o.models:
        c = opened(model_file(model))[0]
        most = c["seq_len"] - 8
        n = min(max(int(4e10 / bytes_of(c, 1, 0)), 16), 1000, most) if not o.quick else 32
        cases = {"decode": {"decode": (8, n)}, "prefill": {"prefill": (min(512, most), 0)},
                 "short": {"8 tokens": (8, 16), "1 token": (1, 0)}, "context": CONTEXT,
                 "threads": {"threads": (8, n)},
                 "sweep": {**{f"prompt {T}": (T, 0) for T in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)},
                           **{f"position {T}": (T, 16) for T in (8, 1000, 2000, 4000, 6000, 8000)}}}
        for part in o.parts:
            fits = part in cases and max(T + m for T, m in cases[part].values()) <= c["seq_len"]
            if fits and (model == "bundled" or model in uses.get(part, ("135M",))):
                yield part, model, cases[part]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--models", nargs="+", choices=["bundled", *SHAPES])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--against", metavar="BINARY", help="another build of ours, in turn with this one")
    parser.add_argument("--llama2c", metavar="RUN", help="llama2.c's binary (-Ofast -march=native -fopenmp)")
    parser.add_argument("--no-peers", action="store_true")
    for name in ("--json", "--plot", "--quick"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.serve:
        return serve(o.serve[0], Path(o.serve[1]), int(o.serve[2]))
    if unknown := set(o.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    o.models = o.models or (["bundled"] if o.quick else ["1M", "42M", "135M", "1.1B"])
    o.parts, o.no_peers = o.parts or PARTS, o.no_peers or o.quick
    o.rounds, o.seconds = o.rounds or (2 if o.quick else 5), 0.02 if o.quick else 0.3
    CACHE.mkdir(parents=True, exist_ok=True)
    b = Bench(o)
    for part, model, cases in plan(o):
        b.run(part, model, cases)
    path = model_file(o.models[-1])
    engine, c = Ours("run.c", b.program, path, o.threads), opened(path)[0]
    b.startup = median(started(engine, c) for _ in range(o.rounds)) if "startup" in o.parts else None
    b.memory = median(peak_memory(engine, c) for _ in range(o.rounds)) if "memory" in o.parts else None
    rows, goals = list(measurements(b)), targets(b)
    if o.json:
        keys = "what measured must aim unit".split()
        print(json.dumps(dict(threads=o.threads, measurements=rows, goals=[dict(zip(keys, g)) for g in goals]), indent=1))
    else:
        print_tables(rows, goals)
    if o.plot:
        plots(b, rows)


if __name__ == "__main__":
    main()
