"""Measures ./run beside the machine's limits and beside other engines on the same weights.

    python tests/bench.py [PART ...] [--models MODEL ...] [--rounds 5] [--threads N] [--against BINARY]
                          [--llama2c BINARY] [--no-peers] [--json] [--plot] [--quick]

Parts: decode, prefill, short (prompts), context, threads, startup, memory, sweep; default: all. Models: bundled, 1M,
42M, 135M (SmolLM2, where `make smollm2` has brought it) and 1.1B; default: all but bundled. Random models and the
files for other engines are made in tests/.cache/bench, 12 GB with 1.1B. Peers are measured where they are installed:
llama.cpp (pip's llama-cpp-python, compiled here), transformers; llama2.c where --llama2c names its binary. RUN=BINARY
in the environment measures another binary as ours, --against a second one. --quick: the bundled model, briefly, no
peers. --plot writes tests/speed.svg and tests/sweep.svg, if the parts and models are the default ones.

Bandwidth and clock of a machine drift, so contenders take turns in each round, the machine's limits are measured just
before ours, and every ratio is the median of the rounds' own; a first round does not count. "Spread" is half the range.
The peers' tokens are given, ours are sampled. llama.cpp keeps its cache in float16, as it does by default.
"""
import argparse
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

from engines import (CACHE, PROGRAM, ROOT, SHAPES, Ours, Peer, contenders, made, model_file, opened, prompt_of)

PARTS = "decode prefill short context threads startup memory sweep".split()


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
        """What the table and --json show of a contender."""
        times = self.times(contender)
        return dict(part=self.part, model=self.model, case=self.name, contender=contender, rounds=len(times),
                    tokens_per_second=(1 if self.n > 1 else self.T) / median(times),
                    spread=(max(times) - min(times)) / 2 / median(times),
                    giga_per_second=self.work(contender) / median(times) / 1e9,
                    unit="GB/s" if self.n > 1 else "GFLOP/s",
                    limit=median(x[self.n <= 1] for x in self.limits), of_limit=self.of_limit(contender),
                    ours_over_it=self.over(contender))


def plan(o):
    """The cases of each part and model, in lists of those that take turns in a round."""
    models = {"decode": ("bundled", "42M", "135M", "1.1B"), "prefill": ("bundled", "135M", "1.1B"),
              "threads": ("bundled", "1M")}
    for part, model in ((part, model) for part in o.parts for model in o.models):
        c = opened(model_file(model))[0]
        n = 100 if o.quick else min(max(int(4e10 / bytes_of(c, 1, 0)), 16), 1000, c["seq_len"] - 8)
        cases = {"decode": [("decode", 8, n)], "prefill": [("prefill", min(512, c["seq_len"] - 8), 0)],
                 "short": [("8 tokens", 8, 16), ("1 token", 1, 0)], "threads": [("threads", 8, n)],
                 "context": [("position 0", 8, 64), ("position 8000", 8000, 32)],
                 "sweep": [(f"prompt {2**i}", 2**i, 0) for i in range(12)]
                 + [(f"position {T}", T, 16) for T in (8, 1000, 2000, 4000, 6000, 8000)]}
        if part in cases and model in models.get(part, ("135M",)):
            yield [Case(part, model, *case, c) for case in cases[part]]


def agree(c, ours, peers):
    """Peers must compute the same model, or their speed means nothing."""
    logits = ours.logits(prompt_of(c, 8))[:256]
    for peer in peers:
        error = float(np.abs(peer.logits(prompt_of(c, 8))[:256] - logits).max() / logits.std())
        if not error < 0.05:
            sys.exit(f"bench: the logits of {peer.name} are {error:.1e} of their deviation from ours: another model?")


def run_rounds(o, cases):
    """Measures all contenders in all cases, round by round; the first does not count. Long prompts: half the rounds."""
    part, model = cases[0].part, cases[0].model
    all_of_them = contenders(o, part, model)
    rounds = o.rounds if part not in ("context", "sweep") else max(1, o.rounds // 2)
    try:
        agree(cases[0].c, all_of_them[0], [x for x in all_of_them if isinstance(x, Peer)])
        for i in range(rounds + 1):
            for case in cases:
                print(f"\r{part} {model}: {case.name}, round {i} of {rounds}  ", end="", file=sys.stderr)
                for x in all_of_them[:: -1 if i % 2 else 1]:
                    if x.name == "run.c" and i:
                        case.limits.append(probe(model_file(model), o.threads, o.seconds))
                    if i or case.T < 4000:  # a warm-up of seconds is enough
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
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(engine.command(ids, 0, "-b", "256"), **quiet)
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
        ("prompt of 8 over a decoded token, time, 135M", prompts[0] and median(
            x[0] / x[1] for x in prompts[0]), 2.0, 1.3, ""),
        ("decode 1.1B in bf16 over float32", of(
            "decode", "1.1B", lambda case: case.over("run.c", "run.c bf16")), 1.75, 1.95, ""),
        ("bandwidth kept at position 8000, 135M", near and far and far.of_limit("run.c") / near.of_limit("run.c"),
         0.85, 0.95, ""),
        ("decode 1M on 2 threads over 1", over("threads", "1M", "run.c -j 1"), 1.0, 1.4, ""),
        ("exec to the first forward", startup, 30, 10, "ms"),
        ("peak memory over weights and cache", memory, 48, 24, "MB")]
    return [row for row in rows if row[1] is not None]


def print_tables(rows, goals_met, others):
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
    busy = ": too busy to trust" if others > 0.05 else ""
    print(f"\nOther processes took {others:.0%} of the processors{busy}")


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
    points = lambda x, *which: sorted((x(case), 1 / case.row("run.c")["tokens_per_second"], case.expected())
                                      for case in cases if (case.part, case.name.split()[0]) in which)
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
def processor_time():
    """Seconds that all processors have worked, or were withheld by a hypervisor, and those that were for us."""
    ticks = list(map(int, Path("/proc/stat").read_text().split()[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--models", nargs="+", choices=["bundled", *SHAPES])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--against", metavar="BINARY")
    parser.add_argument("--llama2c", metavar="BINARY")
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
    CACHE.mkdir(parents=True, exist_ok=True)
    start, before, cases = time.monotonic(), processor_time(), []
    startup, memory = None, None
    whole = {*o.parts} == {*PARTS} and {*o.models} == {*SHAPES}  # else the pictures would lose what is not measured
    try:
        for together in plan(o):
            run_rounds(o, together)
            cases += together
        path = model_file(o.models[-1])
        startup, memory = (median(f(Ours("run.c", PROGRAM, path, o.threads), opened(path)[0]) for _ in range(o.rounds))
                           if part in o.parts else None for part, f in (("startup", started), ("memory", peak_memory)))
    except KeyboardInterrupt:
        print("interrupted: this is what was measured until then", file=sys.stderr)
        whole = False
    everyone, us = (b - a for a, b in zip(before, processor_time()))
    others = max(0, everyone - us) / (time.monotonic() - start) / os.cpu_count()
    rows, met = [case.row(name) for case in cases for name in case.took], goals(cases, startup, memory)
    if o.json:
        named = [dict(zip("what measured must aim unit".split(), row)) for row in met]
        print(json.dumps(dict(threads=o.threads, others=others, measurements=rows, goals=named), indent=1))
    else:
        print_tables(rows, met, others)
    if o.plot and whole:
        plots(cases, rows)


if __name__ == "__main__":
    main()
