#!/bin/sh
# What needs no Python: the kernels' unit tests, then golden texts and logits of the bundled model (`make check`).
# RUN: the binary to test. RUNNER: what to run it under (valgrind). `tests/check.sh --update` writes new golden texts;
# golden logits, of the last 8 positions, come from
# `python tests/checkpoint.py tests/stories.bin "$(cat tests/golden/ids.txt)" 8 > tests/golden/logits`.
set -u
cd "$(dirname "$0")/.." || exit 1
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY-passive}"  # a busy machine: waiting threads sleep
update=${1-}
run="${RUNNER-} ${RUN-./run} tests/stories.bin"
got=$(mktemp -d) || exit 1
trap 'rm -rf "$got"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAILED: $*"; }

# golden NAME ARGUMENTS...: the output equals the file of that name, byte for byte
golden() {
    name=$1; shift
    if ! $run "$@" </dev/null >"$got/$name" 2>"$got/err"; then
        cat "$got/err"; fail "run $* (exit not 0)"
    elif [ "$update" = --update ]; then
        cp "$got/$name" "tests/golden/$name"
    elif cmp "$got/$name" "tests/golden/$name"; then
        pass
    else
        diff "$got/$name" "tests/golden/$name" | head -n 5; fail "run $* differs from tests/golden/$name"
    fi
}

[ "$update" = --update ] || { ${RUNNER-} tests/unit && pass || fail "tests/unit"; }
golden greedy.txt -i "Once upon a time" -t 0 -n 150
golden sampled.txt -i "Once upon a time" -t 0.8 -s 1 -n 200
golden penalty.txt -i "One day" -t 0.9 -k 40 -p 0.95 --min-p 0.02 --repeat-penalty 1.1 -s 18446744073709551615 -n 100
golden ids.txt -m tokenize -f tests/golden/greedy.txt
golden detokenized.txt -m detokenize -I "$(cat tests/golden/ids.txt)"
golden perplexity.txt -m perplexity -f tests/golden/greedy.txt -c 100
[ "$update" = --update ] && exit "$failed"

# The same bytes however the prompt is cut and however many threads; near the float64 logits of tests/checkpoint.py.
ids=$(cat tests/golden/ids.txt)
$run -m logits -I "$ids" -o "$got/logits" 2>"$got/err" || cat "$got/err"
for flags in "-b 1" "-b 7" "-j 1" "-j 3 -b 50"; do
    $run -m logits -I "$ids" $flags 2>"$got/err" | cmp - "$got/logits" && pass || fail "logits with $flags"
done
tail -c "$(wc -c <tests/golden/logits)" "$got/logits" >"$got/last"
tests/unit "$got/last" tests/golden/logits 1e-4 && pass || fail "logits differ from float64's by more than 1e-4"
$run -m check >"$got/check" && pass || fail "run -m check"

# Refused in one line, with the right exit code
refuses() {
    code=$1; shift
    ${RUNNER-} ${RUN-./run} "$@" </dev/null >"$got/out" 2>"$got/err"
    [ $? = "$code" ] && [ ! -s "$got/out" ] && [ "$(grep -c '^run: ' "$got/err")" = 1 ] && [ "$(wc -l <"$got/err")" = 1 ] && pass ||
        fail "run $*: not exit $code with one line"
}
head -c 100000 tests/stories.bin >"$got/short.bin"
refuses 1 "$got/short.bin" -I 1 --ids
refuses 1 "$got/none.bin"
refuses 1 Makefile
refuses 1 tests/stories.bin -I "1 2 3" --ids -c 2
refuses 2 tests/stories.bin -n 1x
refuses 2 tests/stories.bin -i a -I 1

echo "check: $passed passed, $failed failed"
[ "$failed" = 0 ]
