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
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
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


# What a forward of T tokens from a position on must move and compute: every matrix once (the embedding only where it is
# the classifier), the cache once; 2 operations a multiply-add; logits of the last token.
def matrices(c):
    """Weights in the matrices of all layers, and in the classifier."""
    q, kv = c["n_heads"] * c["head_dim"], c["n_kv_heads"] * c["head_dim"]
    return c["n_layers"] * c["dim"] * (2 * q + 2 * kv + 3 * c["hidden_dim"]), c["vocab_size"] * c["dim"]


def cache_bytes(c, positions):
    return 8 * c["n_layers"] * c["n_kv_heads"] * c["head_dim"] * positions


def bytes_of(c, T, position, size=4):
    return size * sum(matrices(c)) + cache_bytes(c, position + T)


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
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", name, str(path), "--threads", str(threads)], env=env,
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
    source, flags = ROOT / "tests/probe.c", "-std=c11 -O3 -march=native -ffp-contract=fast -fopenmp".split()
    program = made(CACHE / "probe", source,
                   lambda new: subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", new, source], check=True))
    done = subprocess.run([program, path, str(seconds)], capture_output=True, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return tuple(map(float, done.stdout.split()))


@dataclass
class Case:
    """A prompt of T tokens and n tokens after it: what each contender took, round by round."""
    part: str
    model: str
    name: str
    T: int
    n: int
    c: dict = None
    took: dict = field(default_factory=dict)    # contender: [(seconds of the prompt, seconds of a token after it)]
    limits: list = field(default_factory=list)  # [(GB/s, GFLOP/s)], measured just before ours

    def times(self, contender):
        """Seconds a token where tokens are generated, else of the prompt."""
        return [x[self.n > 1] for x in self.took.get(contender, [])]

    def work(self, contender):
        """Bytes of one of these tokens, or operations of the prompt."""
        if self.n > 1:
            return bytes_of(self.c, 1, self.T + self.n / 2, 2 if contender == "run.c bf16" else 4)
        return flops_of(self.c, self.T, 0)

    def of_limit(self, contender):
        return median(self.work(contender) / took / (limit[self.n <= 1] * 1e9)
                      for took, limit in zip(self.times(contender), self.limits))

    def over(self, contender, us="run.c"):
        """How many times as fast we are."""
        pairs = list(zip(self.times(contender), self.times(us)))
        return median(theirs / ours for theirs, ours in pairs) if pairs else None

    def expected(self, chunk=256):
        """Seconds a token that memory or arithmetic takes, whichever is more; a chunk reads the weights once."""
        bandwidth, peak = (1e9 * median(x) for x in zip(*self.limits))
        if self.n > 1:
            position = self.T + self.n / 2
            return max(bytes_of(self.c, 1, position) / bandwidth, flops_of(self.c, 1, position) / peak)
        moved = -(-self.T // chunk) * bytes_of(self.c, 0, self.T)
        return max(moved / bandwidth, flops_of(self.c, self.T, 0) / peak) / self.T

    def row(self, contender):
        times = self.times(contender)
        return dict(part=self.part, model=self.model, case=self.name, contender=contender, rounds=len(times),
                    tokens_per_second=(1 if self.n > 1 else self.T) / median(times),
                    spread=(max(times) - min(times)) / 2 / median(times),
                    giga_per_second=self.work(contender) / median(times) / 1e9, unit="GFLOP/s" if self.n <= 1 else "GB/s",
                    limit=median(x[self.n <= 1] for x in self.limits), of_limit=self.of_limit(contender),
                    ours_over_it=self.over(contender))


def plan(o):
    """The cases of each part and model, in lists whose rounds go together."""
    models = {"decode": ("bundled", "42M", "135M", "1.1B"), "prefill": ("bundled", "135M", "1.1B"), "threads": ("bundled", "1M")}
    for model in o.models:
        c = opened(model_file(model))[0]
        n = 100 if o.quick else min(max(int(4e10 / bytes_of(c, 1, 0)), 16), 1000, c["seq_len"] - 8)
        cases = {"decode": [("decode", 8, n)], "prefill": [("prefill", min(512, c["seq_len"] - 8), 0)],
                 "short": [("8 tokens", 8, 16), ("1 token", 1, 0)], "threads": [("threads", 8, n)],
                 "context": [("position 0", 8, 64), ("position 8000", 8000, 32)],
                 "sweep": [("prompt", 2 ** i, 0) for i in range(12)] + [("position", max(8, 1000 * i), 16) for i in range(9)]}
        for part in o.parts:
            if part in cases and model in models.get(part, ("135M",)):
                yield [Case(part, model, *case, c) for case in cases[part]]


def contenders(o, part, model):
    """Ours, and what goes with a part: another build, bfloat16, one thread, the peers that are installed."""
    path, program = model_file(model), os.path.abspath(os.environ.get("RUN", ROOT / "run"))
    found = [Ours("run.c", program, path, o.threads)]
    if part == "threads":
        found.append(Ours("run.c -j 1", program, path, 1))
    if o.against:
        found.append(Ours("other build", os.path.abspath(o.against), path, o.threads))
    if part == "decode" and takes_bf16(program):
        found.append(Ours("run.c bf16", program, bf16_file(path), o.threads))
    installed = lambda *names: not o.no_peers and all(map(importlib.util.find_spec, names))
    if part in ("decode", "prefill", "context") and installed("llama_cpp", "gguf"):
        found.append(Peer("llama.cpp", gguf_file(path), o.threads))
    if part in ("decode", "prefill") and installed("transformers"):
        found.append(Peer("transformers", path, o.threads))
    if part == "decode" and o.llama2c:
        found.append(Llama2c("llama2.c", os.path.abspath(o.llama2c), llama2c_file(path), o.threads))
    return found


def takes_bf16(program):
    path = CACHE / "tiny.bf16"
    checkpoint.write(path, checkpoint.config(weight_type=1))
    return not subprocess.run([program, path, "-I", "3", "--ids", "-n", "1"], capture_output=True).returncode


def agree(c, ours, peers):
    """Peers must compute the same model, or their speed means nothing."""
    logits = ours.logits(prompt_of(c, 8))[:256]
    for peer in peers:
        error = float(np.abs(peer.logits(prompt_of(c, 8))[:256] - logits).max() / logits.std())
        if not error < 0.05:
            sys.exit(f"bench: the logits of {peer.name} are {error:.1e} of their deviation from ours: another model?")


def run_rounds(o, cases):
    """Measures all contenders in all cases, round by round; the first round does not count."""
    all_of_them = contenders(o, cases[0].part, cases[0].model)
    try:
        agree(cases[0].c, all_of_them[0], [x for x in all_of_them if isinstance(x, Peer)])
        for i in range(o.rounds + 1):
            for case in cases:
                print(f"\r{case.part} {case.model}: round {i} of {o.rounds}", end="", file=sys.stderr)
                for x in all_of_them[:: -1 if i % 2 else 1]:
                    if x.name == "run.c" and i:
                        case.limits.append(probe(model_file(case.model), o.threads, o.seconds))
                    took = x.measure(prompt_of(case.c, case.T), case.n)
                    if i and took[case.n > 1]:
                        case.took.setdefault(x.name, []).append(took)
    finally:
        print(file=sys.stderr)
        for x in all_of_them:
            x.close()


def started(engine, c):
    """Milliseconds from exec to the start of the first forward: the time until the report, less what it says."""
    ids, start = prompt_of(c, 64), time.perf_counter()
    process = subprocess.Popen(engine.command(ids, 0), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    report = next(line for line in process.stderr if line.startswith(b"prompt:"))
    end = time.perf_counter()
    process.communicate()
    return 1e3 * (end - start - len(ids) / float(re.search(rb"tokens, (\S+) tok/s", report)[1]))


def peak_memory(engine, c):
    """MB of anonymous memory at the most, without the cache, of a prompt of 512 in chunks of 256."""
    ids, peak = prompt_of(c, min(512, c["seq_len"])), 0
    process = subprocess.Popen(engine.command(ids, 0, "-b", "256"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(kb) for kb in re.findall(r"RssAnon:\s+(\d+)", status))])
        time.sleep(0.002)
    return (1024 * peak - cache_bytes(c, len(ids))) / 2**20


# ---- reports --------------------------------------------------------------------------------------------------------
def goals(cases, startup, memory):
    """(what, measured, must, aim, unit) of the goals that were measured; must and aim say which way is better."""
    def of(part, model, f, name=None):
        found = [case for case in cases if (case.part, case.model, case.name) == (part, model, name or part)]
        return f(found[0]) if found else None

    limit = lambda part, model: of(part, model, lambda case: case.of_limit("run.c"))
    over = lambda part, model, peer: of(part, model, lambda case: case.over(peer))
    prompts = [of("short", "135M", lambda case: case.took["run.c"], name) for name in ("8 tokens", "1 token")]
    near, far = (of("context", "135M", lambda case: case, name) for name in ("position 0", "position 8000"))
    rows = [
        ("decode 135M, of the read bandwidth", limit("decode", "135M"), 0.92, 0.97, ""),
        ("decode 1.1B, of the read bandwidth", limit("decode", "1.1B"), 0.92, 0.97, ""),
        ("prefill 512 135M, of the FMA peak", limit("prefill", "135M"), 0.70, 0.80, ""),
        ("prefill 512 1.1B, of the FMA peak", limit("prefill", "1.1B"), 0.75, 0.88, ""),
        ("decode 135M over llama2.c", over("decode", "135M", "llama2.c"), 1.05, 1.12, ""),
        ("decode 42M over llama.cpp F32", over("decode", "42M", "llama.cpp"), 1.25, 1.4, ""),
        ("decode 135M over llama.cpp F32", over("decode", "135M", "llama.cpp"), 1.3, 1.5, ""),
        ("decode 1.1B over llama.cpp F32", over("decode", "1.1B", "llama.cpp"), 1.03, 1.1, ""),
        ("prefill 512 135M over llama.cpp F32", over("prefill", "135M", "llama.cpp"), 1.25, 1.5, ""),
        ("prefill 512 1.1B over llama.cpp F32", over("prefill", "1.1B", "llama.cpp"), 1.15, 1.35, ""),
        ("prefill 512 135M over transformers", over("prefill", "135M", "transformers"), 1.15, 1.5, ""),
        ("decode 135M over transformers", over("decode", "135M", "transformers"), 2.5, 3.3, ""),
        ("prompt of 8 over prompt of 1, time, 135M", prompts[0] and median(
            x[0] / y[0] for x, y in zip(*prompts)), 2.0, 1.3, ""),
        ("prompt of 8 over a decoded token, time, 135M", prompts[0] and median(x[0] / x[1] for x in prompts[0]), 2.0, 1.3, ""),
        ("decode 1.1B in bf16 over float32", of("decode", "1.1B", lambda case: case.over("run.c", "run.c bf16")), 1.75, 1.95, ""),
        ("bandwidth kept at position 8000, 135M", near and far and median(
            far.work("run.c") / x / (near.work("run.c") / y)
            for x, y in zip(far.times("run.c"), near.times("run.c"))), 0.85, 0.95, ""),
        ("decode 1M on 2 threads over 1", over("threads", "1M", "run.c -j 1"), 1.0, 1.4, ""),
        ("exec to the first forward", startup, 30, 10, "ms"),
        ("peak memory over weights and cache", memory, 48, 24, "MB")]
    return [row for row in rows if row[1] is not None]


def print_tables(rows, goals_met, waited):
    print(f"\n{'':40}{'tok/s':>10}{'spread':>8}{'':>16}{'of limit':>16}{'run.c over it':>14}")
    for r in rows:
        what = f"{r['part']} {r['model']}" + (f" {r['case']}" if r["case"] != r["part"] else "")
        rate = f"{r['giga_per_second']:.1f} {r['unit']}"
        print(f"{what + ', ' + r['contender']:<40}{r['tokens_per_second']:>10.1f}{r['spread']:>8.1%}{rate:>16}"
              f"{r['of_limit']:>8.2f} of {r['limit']:<5.0f}{r['ours_over_it']:>13.2f}")
    print(f"\n{'':52}{'measured':>10}{'must':>8}{'aim':>8}")
    for what, value, must, aim, unit in goals_met:
        sign = 1 if aim > must else -1
        verdict = "aim" if sign * value >= sign * aim else "must" if sign * value >= sign * must else "missed"
        print(f"{what:<52}{value:>10.2f}{must:>8}{aim:>8} {unit:<3}{verdict}")
    print(f"\nSome thread waited for a processor {waited:.0%} of the time" + (": too busy to trust" if waited > 0.1 else ""))


def bars(axes, rows):
    """Fractions of the limit, in groups of a part and model."""
    groups = list(dict.fromkeys((r["part"], r["model"]) for r in rows))
    names = list(dict.fromkeys(r["contender"] for r in rows))
    for i, name in enumerate(names):
        shown = [(groups.index((r["part"], r["model"])), r["of_limit"]) for r in rows if r["contender"] == name]
        axes.bar([x + (i - len(names) / 2 + 0.5) * 0.8 / len(names) for x, _ in shown], [y for _, y in shown],
                 0.75 / len(names), label=name)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(groups)), [f"{part}\n{model}" for part, model in groups])
    axes.set_ylabel("of bandwidth or FMA peak")
    axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)


def curve(axes, label, points):
    """Milliseconds a token, as measured and as expected from bytes and operations."""
    axes.plot([x for x, _, _ in points], [1e3 * y for _, y, _ in points], "o-", markersize=3, label="run.c")
    axes.plot([x for x, _, _ in points], [1e3 * y for _, _, y in points], "k--", linewidth=0.8, label="expected")
    axes.set(xlabel=label, **({"ylim": (0, None)} if "position" in label else {"xscale": "log", "yscale": "log"}))


def plots(cases, rows):
    """tests/speed.svg: fractions of the limits; tests/sweep.svg: time per token over prompt, position and size."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "run.c", "font.size": 9})
    from matplotlib import pyplot
    points = lambda x, *which: sorted((x(case), median(case.times("run.c")) / (1 if case.n > 1 else case.T), case.expected())
                                      for case in cases if (case.part, case.name) in which)
    speed, axes = pyplot.subplots(figsize=(7, 3))
    bars(axes, [r for r in rows if r["part"] in ("decode", "prefill")])
    sweep, (prompt, position, size) = pyplot.subplots(1, 3, figsize=(9, 3))
    curve(prompt, "prompt length", points(lambda case: case.T, ("sweep", "prompt")))
    curve(position, "position", points(lambda case: case.T, ("sweep", "position")))
    curve(size, "weights", points(lambda case: sum(matrices(case.c)), ("decode", "decode"), ("threads", "threads")))
    prompt.set_ylabel("ms per token")
    prompt.legend(frameon=False)
    for figure, name in ((speed, "speed.svg"), (sweep, "sweep.svg")):
        figure.tight_layout()
        figure.savefig(ROOT / "tests" / name, metadata={"Date": None})


# ---- the command line -----------------------------------------------------------------------------------------------
def waiting():
    """Seconds in which some thread of this machine has waited for a processor."""
    return int(re.search(r"some .* total=(\d+)", Path("/proc/pressure/cpu").read_text())[1]) / 1e6


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--models", nargs="+", choices=["bundled", *SHAPES])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--against", metavar="BINARY")
    parser.add_argument("--llama2c", metavar="BINARY")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    for name in ("--no-peers", "--json", "--plot", "--quick"):
        parser.add_argument(name, action="store_true")
    o = parser.parse_args()
    if unknown := set(o.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)} (there are {', '.join(PARTS)})")
    o.models = o.models or (["bundled"] if o.quick else list(SHAPES))
    o.parts, o.no_peers = o.parts or PARTS, o.no_peers or o.quick
    o.rounds, o.seconds = o.rounds or (2 if o.quick else 5), 0.02 if o.quick else 0.3
    return o


def main():
    o = options()
    if o.serve:
        return serve(o.serve[0], Path(o.serve[1]), o.threads)
    CACHE.mkdir(parents=True, exist_ok=True)
    start, waited, cases = time.monotonic(), waiting(), []
    for together in plan(o):
        run_rounds(o, together)
        cases += together
    ours, c = contenders(argparse.Namespace(**{**vars(o), "no_peers": True}), "startup", o.models[-1])[0], opened(model_file(o.models[-1]))[0]
    startup, memory = (median(f(ours, c) for _ in range(o.rounds)) if part in o.parts else None
                       for part, f in (("startup", started), ("memory", peak_memory)))
    waited = (waiting() - waited) / (time.monotonic() - start)
    rows, met = [case.row(name) for case in cases for name in case.took], goals(cases, startup, memory)
    if o.json:
        named = [dict(zip("what measured must aim unit".split(), row)) for row in met]
        print(json.dumps(dict(threads=o.threads, waited=waited, measurements=rows, goals=named), indent=1))
    else:
        print_tables(rows, met, waited)
    if o.plot:
        plots(cases, rows)


if __name__ == "__main__":
    main()
