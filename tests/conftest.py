"""What the tests share: how ./run is built and called, the `long` marker, and skips that are counted aloud."""
import fcntl
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STRICT = os.environ.get("STRICT") == "1"
sys.path.append(str(ROOT))  # for export.py, also where pytest is not started with python -m

# Two pytest workers share the machine with ./run: waiting threads sleep, and PyTorch keeps to one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What lives until the program ends is left to the system, so leaks are not looked for.
os.environ.setdefault("ASAN_OPTIONS", "exitcode=99:detect_leaks=0:allocator_may_return_null=1")
os.environ.setdefault("UBSAN_OPTIONS", "exitcode=99:print_stacktrace=1")


def need(condition, why):
    """Skips the test where something could not be brought (offline); under STRICT=1 it fails instead."""
    if not condition:
        (pytest.fail if STRICT else pytest.skip)(f"lacking: {why}")


def build(target):
    """Makes a target of the Makefile, one process at a time, and returns its path."""
    with open(ROOT / "Makefile") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(["make", "-s", target], cwd=ROOT, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL)
    assert made.returncode == 0, made.stdout + made.stderr
    return str(ROOT / target)


@lru_cache
def binary():
    """./run, built when it is not; RUN names another one to test."""
    return os.path.abspath(os.environ["RUN"]) if "RUN" in os.environ else build("run")


@lru_cache
def sanitized():
    """The same with AddressSanitizer and UndefinedBehaviorSanitizer."""
    return build("run-debug")


def run(*args, stdin=b"", timeout=120, env=None, program=None, **more):
    """Runs ./run and returns stdout and stderr as bytes, and returncode. env is added to the environment."""
    if not hasattr(stdin, "fileno") and not isinstance(stdin, int):
        more["input"] = stdin
    else:
        more["stdin"] = stdin
    more.setdefault("stdout", subprocess.PIPE)
    more.setdefault("stderr", subprocess.PIPE)
    command = [program or binary(), *(os.fsencode(a) if isinstance(a, (str, Path)) else str(a) for a in args)]
    return subprocess.run(command, timeout=timeout, env={**os.environ, **(env or {})}, **more)


def good(*args, **more):
    """Runs ./run, expects success, and returns its stdout."""
    done = run(*args, **more)
    assert done.returncode == 0, (args, done.returncode, done.stderr.decode(errors="replace"))
    return done.stdout


def is_one_error(done, code, *words):
    """Refused: this exit code, nothing on stdout, one line on stderr that says what is wrong and what to do."""
    shown = (done.args, done.returncode, done.stdout[:200], done.stderr[:2000])
    assert done.returncode == code, shown
    assert not done.stdout, shown
    assert re.fullmatch(rb"run: [^\n]+ \([^\n]+\)\n", done.stderr), shown
    for word in words:
        assert re.search(word if isinstance(word, bytes) else str(word).encode(), done.stderr), (word, shown)


def refused(code, *args, words=(), **more):
    """Runs ./run and expects such an error; words are regular expressions found in its line."""
    is_one_error(run(*args, **more), code, *words)


@pytest.fixture(scope="session")
def run_binary():
    return binary()


@pytest.fixture(scope="session")
def asan_binary():
    return sanitized()


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also the tests marked long")
    parser.addoption("--readme", action="store_true", help="test_families.py writes the README's table")


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes minutes; run by make test-long")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("long")])
    items[:] = [i for i in items if not i.get_closest_marker("long")]


def skipped(config):
    """(place, why) of every test that was skipped."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return [(r.nodeid, r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr)) for r in reports]


def pytest_terminal_summary(terminalreporter, config):
    missing = skipped(config)
    if missing:
        terminalreporter.section(f"{len(missing)} skipped" + (", which STRICT=1 counts as failures" if STRICT else ""))
        for place, why in missing:
            terminalreporter.write_line(f"{place}: {why}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if STRICT and skipped(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
