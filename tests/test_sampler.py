"""The sampler inside run.c, through a C driver that includes it, against transformers' logits processors."""
import struct
import subprocess
from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (LogitsProcessorList, MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
                                                    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

from conftest import build


@lru_cache
def driver():
    return build("tests/sampler")


OFF = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, penalty=1.0)


def request(logits, history=(), draws=0, seed=0, **settings):
    """One record for the driver, see tests/sampler.c."""
    s = {**OFF, **settings}
    logits, history = np.asarray(logits, "<f4"), np.asarray(history, "<i4")
    return struct.pack("<4d4iQ", s["temperature"], s["top_p"], s["min_p"], s["penalty"], s["top_k"], len(logits),
                       len(history), draws,
                       seed) + history.tobytes() + logits.tobytes()


def answers(requests):
    """Sends all requests through one process; [(probabilities, drawn ids)] in order."""
    done = subprocess.run([driver()], input=b"".join(requests), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, at = [], 0
    while at < len(done.stdout):
        n, draws = struct.unpack_from("<2i", done.stdout, at)
        p = np.frombuffer(done.stdout, "<f8", n, at + 8)
        found.append((p, np.frombuffer(done.stdout, "<i4", draws, at + 8 + 8 * n)))
        at += 8 + 8 * n + 4 * draws
    assert len(found) == len(requests)
    return found


def ask(logits, **settings):
    return answers([request(logits, **settings)])[0]


def error(logits, **settings):
    done = subprocess.run([driver()], input=request(logits, **settings), capture_output=True, timeout=60)
    assert done.returncode == 1 and not done.stdout and done.stderr.startswith(b"run: "), done
    return done.stderr


def reference(logits, history, temperature, top_p, top_k, min_p, penalty):
    """Probabilities by transformers, in float64 after the penalty; None where a sum or a tie stands at the cut-off."""
    scores = torch.tensor(np.asarray(logits, np.float32))[None]
    ids = torch.tensor([list(history)], dtype=torch.long)
    if penalty != 1 and len(history):
        scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    scores = scores.double()
    steps = LogitsProcessorList()
    if temperature != 1:
        steps.append(TemperatureLogitsWarper(temperature))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    before = steps(ids, scores.clone())
    ranked = before.softmax(-1).sort(descending=True)[0][0].numpy()
    if top_k and (torch.isfinite(before).sum() > min(top_k, len(logits))):
        return None
    if top_p < 1:
        sums = np.cumsum(ranked)
        if np.abs(sums - top_p).min() < 1e-6:
            return None
        last = min(np.searchsorted(sums, top_p), len(sums) - 1)
        if last + 1 < len(ranked) and 0 < ranked[last] == ranked[last + 1]:
            return None
        steps.append(TopPLogitsWarper(top_p))
    if min_p:
        if np.abs(ranked / ranked[0] - min_p).min() < 1e-6:
            return None
        steps.append(MinPLogitsWarper(min_p))
    return steps(ids, scores.clone()).softmax(-1)[0].numpy()


def cases(count, seed):
    rng = np.random.default_rng(seed)
    pick = lambda off, *some: off if rng.random() < 0.4 else some[rng.integers(len(some))]
    for _ in range(count):
        n = int(rng.choice([1, 2, 3, 16, 17, 100, 1000, 4001]))
        logits = rng.standard_normal(n).astype(np.float32) * np.float32(rng.choice([0.1, 1, 4, 20]))
        if rng.random() < 0.2:
            logits[rng.random(n) < 0.3] = -np.inf
            logits[rng.integers(n)] = 1
        if rng.random() < 0.2:
            logits = np.round(logits)                                   # ties
        history = rng.integers(0, n, int(rng.integers(0, 30)))
        yield logits, history, dict(
            temperature=pick(1.0, 1e-6, 0.01, 0.5, 0.8, 1.7, 100.0, rng.uniform(0.1, 2)),
            top_p=pick(1.0, 0.0, 0.1, 0.5, 0.9, 0.999, rng.uniform()),
            top_k=int(pick(0, 1, 2, 5, 40, 100000)), min_p=float(pick(0.0, 0.02, 0.1, 0.5, 1.0, rng.uniform())),
            penalty=float(pick(1.0, 1.1, 1.3, 2.0, 0.7)))


def compare(count, seed):
    made = list(cases(count, seed))
    left_out = 0
    for (logits, history, settings), (p, _) in zip(made, answers([request(l, h, **s) for l, h, s in made])):
        want = reference(logits, history, **settings)
        if want is None:
            left_out += 1
            continue
        assert p.sum() == pytest.approx(1, abs=1e-6)
        assert np.abs(p - want).max() < 1e-6, (len(logits), settings, np.abs(p - want).max())
    return left_out / count


def test_probabilities_are_those_of_transformers():
    assert compare(3000, 0) < 0.35


@pytest.mark.long
def test_probabilities_of_many_more():
    for seed in range(1, 40):
        compare(3000, seed)


def test_large_vocabulary():
    rng = np.random.default_rng(1)
    for scale in (0.01, 1.0, 5.0):
        logits = rng.standard_normal(128256).astype(np.float32) * np.float32(scale)
        for settings in (dict(), dict(top_p=0.9), dict(top_p=0.999, temperature=1.3), dict(top_k=50), dict(min_p=0.05),
                         dict(top_k=70000, top_p=0.5)):
            want = reference(logits, [], **{**OFF, **settings})
            if want is not None:
                assert np.abs(ask(logits, **settings)[0] - want).max() < 1e-6


HALVES = np.log([0.5, 0.25, 0.25])


@pytest.mark.parametrize("p, kept", [(0.0, [0]), (0.5, [0]), (0.6, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2]),
                                     (1.0, [0, 1, 2])])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, kept):
    """B69: probabilities exact in binary; at a tie the lower id goes first; 10,000 draws follow what is kept."""
    logits = np.array([np.float32(1), np.float32(1) - np.log(np.float32(2)), 0], "<f4")
    logits[2] = logits[1]
    chance, drawn = ask(logits, top_p=p, draws=10000, seed=7)
    want = np.zeros(3)
    want[kept] = np.array([0.5, 0.25, 0.25])[kept]
    want /= want.sum()
    if p not in (0.5, 0.75):                                            # the float32 logits are not exact halves
        assert np.abs(chance - want).max() < 1e-6
    counts = np.bincount(drawn, minlength=3) / 10000
    assert np.abs(counts - chance).max() < 0.02 and not counts[chance == 0].any()


def test_ties_go_to_the_lower_id():
    n = 1000
    logits = np.zeros(n)
    assert (np.flatnonzero(ask(logits, top_k=7)[0]) == np.arange(7)).all()
    assert (np.flatnonzero(ask(logits, top_p=0.0995)[0]) == np.arange(100)).all()
    assert ask(logits, temperature=0.0, draws=5)[1].tolist() == [0] * 5
    logits[[900, 500, 700]] = 1
    assert ask(logits, temperature=0.0, draws=5)[1].tolist() == [500] * 5
    assert np.flatnonzero(ask(logits, top_k=2)[0]).tolist() == [500, 700]
    assert np.flatnonzero(ask(logits, top_k=4)[0]).tolist() == [0, 500, 700, 900]


def test_greedy_and_tiny_temperatures():
    """B67: never a division by zero, never NaN."""
    rng = np.random.default_rng(3)
    for n in (1, 2, 17, 1000):
        logits = rng.standard_normal(n) * 10
        for t in (0.0, 1e-45, 1e-39, 1e-30, 1e-300):
            for more in (dict(), dict(top_p=0.0), dict(top_p=0.9), dict(top_k=40), dict(min_p=0.5)):
                assert (ask(logits, temperature=t, draws=3, **more)[1] == np.argmax(logits)).all(), (n, t, more)


def test_huge_logits_and_temperatures():
    for logits in ([3e38, -3e38, 0], [1e30, 1e30, -1e30], [-3e38] * 3, [88, 89, -1000]):
        for t in (1e-6, 1.0, 1e30, 1e300):
            p, drawn = ask(logits, temperature=t, draws=10)
            assert np.isfinite(p).all() and abs(p.sum() - 1) < 1e-6 and ((drawn >= 0) & (drawn < 3)).all()
    for penalty in (0.5, 1e-300, 1e300):                                # beyond float32: the largest there is
        p, drawn = ask([1e38, 3e38, -3e38], history=[0, 1, 2], penalty=penalty, draws=10)
        assert np.isfinite(p).all() and abs(p.sum() - 1) < 1e-6 and ((drawn >= 0) & (drawn < 3)).all()


def test_logits_of_minus_infinity():
    """B71: -infinity is probability 0, all of them an error (of NaN and +infinity logits_of() dies: test_cli.py)."""
    inf = np.inf
    for settings in (dict(), dict(temperature=0.0), dict(top_p=0.9), dict(top_k=2), dict(min_p=0.1),
                     dict(penalty=1.5, history=[0])):
        for logits in ([-inf] * 4, [-inf]):
            error(logits, draws=1, **settings)
        for logits in ([-inf, 3, -inf], [-inf, 3, 2.9, -inf]):
            p, drawn = ask(logits, draws=50, **settings)
            assert p[0] == p[-1] == 0 and abs(p.sum() - 1) < 1e-6 and ((drawn > 0) & (drawn < len(logits) - 1)).all()
    assert np.abs(ask([5.0] * 10)[0] - 0.1).max() < 1e-7


def test_repetition_penalty_counts_each_id_once():
    logits = [2.0, -2.0, 1.0, 0.0]
    want = reference(logits, [0, 1], **{**OFF, "penalty": 2.0})
    for history in ([0, 1], [0, 1, 1, 0, 0], [1, 0] * 500):
        assert np.abs(ask(logits, history=history, penalty=2.0)[0] - want).max() < 1e-7
    inf = ask([-np.inf, 1, 2], history=[0, 1, 2], penalty=0.5)[0]
    assert inf[0] == 0 and np.isfinite(inf).all()


def test_repetition_penalty_rounds_as_transformers():
    """A logit that ties to the bit with a penalized one: the lower id goes first."""
    rng, requests = np.random.default_rng(8), []
    for penalty in (1.05, 1.1, 1.3, 0.7) * 100:
        logit = np.float32(rng.standard_normal() * 10)
        tie = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[0]]), torch.tensor([[float(logit)]])).item()
        requests += [request([tie, logit], [1], 1, temperature=0.0, penalty=penalty),
                     request([logit, tie], [0], 1, temperature=0.0, penalty=penalty)]
    assert not any(drawn[0] for _, drawn in answers(requests))


def test_draws_follow_the_probabilities():
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(50)
    for settings in (dict(), dict(top_p=0.9), dict(temperature=0.5, top_k=10), dict(min_p=0.1)):
        p, drawn = ask(logits, draws=100_000, seed=11, **settings)
        counts = np.bincount(drawn, minlength=50)
        kept = p > 0
        assert not counts[~kept].any()
        chi2 = ((counts[kept] - 100_000 * p[kept]) ** 2 / (100_000 * p[kept])).sum()
        freedom = kept.sum() - 1
        assert chi2 < freedom + 5 * np.sqrt(2 * freedom), (settings, chi2, freedom)


def test_seeds_give_different_draws():
    draws = {tuple(ask(np.zeros(1000), draws=20, seed=s)[1]) for s in (*range(50), 2**32, 2**63, 2**64 - 1)}
    assert len(draws) == 53
    same = ask(np.zeros(1000), draws=20, seed=4)[1]
    assert (same == ask(np.zeros(1000), draws=20, seed=4)[1]).all()
