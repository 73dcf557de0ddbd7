"""Checks an engine or an export: are its hidden states and logits as near to float64 as PyTorch's float32 ones?

    python tests/diff_logits.py SOURCE model.bin [--text FILE]

SOURCE is what model.bin was made from: a Hugging Face folder, a hub id or a GGUF file. Prints, for each layer and for
the logits, how far run.c and PyTorch float32 are from float64. Exit code: 0 PASS, 1 FAIL, 2 usage.
"""
import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

# Bounds on our error over float64, in terms of PyTorch float32's own (one thread): RMS no larger, largest error of the
# logits at most twice. In the layers one position decides the largest error: where activations of thousands arise, at
# the first token as a rule, the error is a matter of luck (measured on SmolLM2: 0.1 to 7.8 of PyTorch's). Over few
# positions it decides the rest too, hence the slack (RMS at 1 position up to 5.5 of PyTorch's, at 8 1.8, at 64 0.8).
LARGEST, LARGEST_IN_LAYERS = 2.0, 16.0
CLOSE = 1e-4  # argmax may differ where the first two logits of float64 are nearer than this


def slack(positions):
    return 1 + 8 / positions


class Failure(Exception):
    """Something other than numbers went wrong: one line for the user."""


class Errors:
    """Absolute errors over float64, position by position, weighed by `scale` (T,) where they are judged."""

    def __init__(self, x, f64, scale):
        self.position_largest = np.abs(x - f64).max(1)      # (T,)
        self.position_rms = rms(x - f64, axis=1)            # (T,)
        self.largest, self.rms = self.position_largest.max(), rms(self.position_rms)
        self.weighed = self.position_largest / scale        # (T,)
        self.weighed_largest, self.weighed_rms = self.weighed.max(), rms(self.position_rms / scale)


class Row:
    """Errors of one layer, or of the logits. In a layer an error counts in units of the RMS of its position's vector,
    as the next norm sees it: else a position whose activations are a thousand times the others' decides alone."""

    def __init__(self, name, ours, f32, f64, relative):
        """ours, f32, f64: (T, width)."""
        values = rms(f64, axis=1)
        scale = np.maximum(values, 1e-30) if relative else np.ones(len(f64))
        self.name, self.values = name, rms(values)
        self.ours, self.theirs = Errors(ours, f64, scale), Errors(f32, f64, scale)
        # Rounding an exact result to float32 costs up to half a unit in the last place: never held against us.
        floor = rms(values / scale) * 2.0 ** -24
        self.rms_bound = slack(len(f64)) * max(self.theirs.weighed_rms, floor)
        largest = LARGEST_IN_LAYERS if relative else LARGEST
        self.largest_bound = slack(len(f64)) * largest * max(self.theirs.weighed_largest, 4 * floor)

    @property
    def ratio(self):
        theirs, ours = self.theirs.weighed_rms, self.ours.weighed_rms
        return ours / theirs if theirs else float(ours > 0)

    @property
    def good(self):
        """NaN is not good."""
        return bool(self.ours.weighed_rms <= self.rms_bound and self.ours.weighed_largest <= self.largest_bound)

    @property
    def first_position(self):
        beyond = np.flatnonzero(~(self.ours.weighed <= self.largest_bound))
        return int(beyond[0]) if len(beyond) else int(self.ours.weighed.argmax())


def rms(x, axis=None):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=axis))


def compare_all(hidden, logits, f32, f64):
    """Rows for the embedding, each layer and the logits; f32 and f64 are (logits, hidden states)."""
    last = len(hidden) - 1
    names = ["embedding"] + [f"layer {i}" for i in range(last)]
    names[last] += " + norm"
    rows = [Row(name, *states, relative=True) for name, *states in zip(names, hidden, f32[1], f64[1])]
    return rows + [Row("logits", logits, f32[0], f64[0], relative=False)]


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def divergence(logits, f64):
    """KL divergence of softmax(logits) from float64's distribution at each position (T,), in nats."""
    true = log_softmax(f64)
    return (np.exp(true) * (true - log_softmax(logits))).sum(1)


def wrong_argmax(chosen, f64):
    """Positions whose chosen id (T,) is not float64's argmax though its first two are not close; how many are close."""
    first_two = np.partition(f64, -2, axis=1)[:, -2:]
    close = first_two[:, 1] - first_two[:, 0] <= CLOSE
    return np.flatnonzero(~close & (chosen != f64.argmax(1))), int(close.sum())


def call(command):
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True)
    except OSError as error:
        raise Failure(f"cannot start {command[0]}: {error.strerror} (build it with make, or name it with --run)")
    if done.returncode:
        raise Failure(f"{command[0]} exits {done.returncode}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def engine(run, model, mode, ids, width, options=()):
    """The float32 rows of `-m logits` (T, width) or `-m hidden` (n_layers + 1, T, width)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        call([run, model, "-m", mode, "-I", " ".join(map(str, ids)), "-o", out, *options])
        data = np.fromfile(out, dtype="<f4")
    rows, rest = divmod(len(data), width * len(ids))
    if rest or not rows:
        raise Failure(f"{model} gives {len(data)} floats in mode {mode}, not a multiple of {len(ids)} x {width} "
                      "(it is of another model)")
    return data.reshape(-1, len(ids), width) if mode == "hidden" else data.reshape(-1, width)


def report(rows, kl, wrong, close):
    """Prints the table; True where all is within the bounds."""
    print(f"{'':18}{'RMS of':>9}  {'largest error':^19}  {'RMS error':^19}")
    print(f"{'':18}{'values':>9}  {'run.c':>9} {'PyTorch':>9}  {'run.c':>9} {'PyTorch':>9}  ratio")
    for r in rows:
        print(f"{r.name:18}{r.values:9.2e}  {r.ours.largest:9.2e} {r.theirs.largest:9.2e}  "
              f"{r.ours.rms:9.2e} {r.theirs.rms:9.2e}  {r.ratio:5.2f}{'' if r.good else '  <- beyond the bound'}")
    count = len(rows[-1].ours.weighed)
    print("ratio: of the RMS errors, run.c's over PyTorch's; in the layers relative to the RMS of each position,\n"
          "or else one position with activations of thousands would decide alone")
    print(f"KL divergence from float64, mean and largest: run.c {kl[0].mean():.1e} {kl[0].max():.1e}, "
          f"PyTorch {kl[1].mean():.1e} {kl[1].max():.1e}")
    print(f"argmax: as float64 at {count - close - len(wrong)} of {count - close} positions" +
          (f"; wrong first at position {wrong[0]}" if len(wrong) else "") +
          (f"; {close} left out, where float64's first two differ by {CLOSE} or less" if close else ""))
    bad = next((r for r in rows if not r.good), None)
    if bad:
        print(f"the error first leaves the bound in: {bad.name}, position {bad.first_position}")
    return not bad and not len(wrong)


def diff(source, model, run, text=None, count=256):
    import reference  # takes seconds: not for --help
    torch_model = reference.load(source)
    config = torch_model.config.get_text_config()
    if text:
        ids = [int(i) for i in call([run, model, "-m", "tokenize", "-f", text]).split()]
        if not ids:
            raise Failure(f"{text} holds no tokens")
    else:
        ids = reference.random_ids(config.vocab_size, count)
    ids = ids[:min(count, config.max_position_embeddings)]
    print(f"{model} against {source}: {len(ids)} {'tokens of ' + str(text) if text else 'pseudo-random ids'}, "
          "errors over PyTorch float64")
    hidden = engine(run, model, "hidden", ids, config.hidden_size)
    logits = engine(run, model, "logits", ids, config.vocab_size)
    f32 = reference.forward(torch_model, ids)
    f64 = reference.forward(reference.to_float64(torch_model), ids)
    if hidden.shape != f64[1].shape or logits.shape != f64[0].shape:
        raise Failure(f"{model} has {len(hidden) - 1} layers, {source} {len(f64[1]) - 1} (it is of another model)")
    rows = compare_all(hidden, logits, f32, f64)
    return report(rows, [divergence(x, f64[0]) for x in (logits, f32[0])], *wrong_argmax(logits.argmax(1), f64[0]))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", metavar="SOURCE", help="Hugging Face folder, hub id or GGUF file")
    parser.add_argument("model", metavar="model.bin", help="what export.py made of it")
    parser.add_argument("--text", metavar="FILE", help="compare on this text (needs the tokenizer beside the model); "
                        "without it on a fixed pseudo-random sequence of ids")
    parser.add_argument("--tokens", metavar="N", type=int, default=256, help="length of the sequence (256)")
    parser.add_argument("--run", metavar="PATH", default=Path(__file__).resolve().parent.parent / "run",
                        help="the engine (run, beside tests)")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens} is less than 1")
    try:
        good = diff(args.source, args.model, args.run, args.text, args.tokens)
    except (Failure, ImportError, OSError, TypeError, ValueError) as error:
        print(f"diff_logits.py: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        good = False
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
