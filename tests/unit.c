// Unit tests of run.c's kernels against long double, without any file: tests/unit
// Compares two files of float32 as well:                             tests/unit GOT WANT LARGEST_DIFFERENCE
#define RUN_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"
#define _GNU_SOURCE
#include <sched.h>
#ifdef __linux__
static _Thread_local int bound_to = -1;  // where this thread was when it was last bound to one processor
static int set_affinity(pid_t thread, size_t size, const cpu_set_t *cpus) {
    int failed = sched_setaffinity(thread, size, cpus);
    if (!failed && CPU_COUNT(cpus) == 1) bound_to = sched_getcpu();
    return failed;
}
#define sched_setaffinity set_affinity
#include <sys/mman.h>
static int advice_given;  // last, on `advised` bytes
static size_t advised;
static int advise(void *start, size_t size, int advice) {
    return advice_given = advice, advised = size, madvise(start, size, advice);
}
#define madvise advise
#endif
#include "../run.c"
#include <sys/wait.h>

static size_t n_passed, n_failed;

// Counts a condition; says what was expected where it does not hold (the first 50 times).
#define EXPECT(condition, ...) ((condition) ? (void)n_passed++ : failed(__LINE__, #condition, __VA_ARGS__))

__attribute__((format(printf, 3, 4))) static void failed(int line, const char *condition, const char *format, ...) {
    if (n_failed++ >= 50) return;
    va_list values;
    va_start(values, format);
    printf("unit.c:%d: %s: ", line, condition);
    vprintf(format, values);
    printf("\n");
    va_end(values);
}

static uint64_t test_state = 1;
static float random_float(void) { return uniform(&test_state) * 2 - 1; }
static size_t random_below(size_t n) { return (size_t)((double)uniform(&test_state) * (double)n); }

static float *random_floats(size_t n) {
    float *x = allocate(n, sizeof *x, "a test");
    for (size_t i = 0; i < n; i++) x[i] = random_float();
    return x;
}

// The larger error; once NaN, always NaN.
static double worse(double worst, long double error) {
    return error <= (long double)worst || isnan(worst) ? worst : (double)error;
}

static bool same_floats(const float *a, const float *b, size_t n) { return !memcmp(a, b, n * sizeof *a); }

// |got - want| in units in the last place of a float at want.
static double ulps(float got, long double want) {
    int exponent;
    frexpl(want, &exponent);
    return (double)(fabsl((long double)got - want) / ldexpl(1, (exponent < -125 ? -125 : exponent) - 24));
}

static void test_sizes(void) {
    EXPECT(mul(1ul << 32, (1ul << 32) - 1) == 0xffffffff00000000ul, "a product that just fits");
    EXPECT(add(SIZE_MAX - 1, 1) == SIZE_MAX, "a sum that just fits");
    EXPECT(round_up(0, 64) == 0 && round_up(1, 64) == 64 && round_up(64, 64) == 64 && round_up(65, 64) == 128,
           "round_up");
}

// A call that must end with exit code 1 and one line on stderr.
static void dies(void (*call)(void), const char *name) {
    int ends[2], status = 0;
    char line[4096] = "";
    if (pipe(ends)) die("no pipe: %s (free some descriptors)", strerror(errno));
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], STDERR_FILENO);
        call();
        _exit(0);
    }
    close(ends[1]);
    size_t size = 0;
    for (ssize_t n; (n = read(ends[0], line + size, sizeof line - 1 - size)) > 0;) size += (size_t)n;
    close(ends[0]);
    waitpid(child, &status, 0);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1, "%s: status %x", name, (unsigned)status);
    const char *said = strstr(line, "run: ");  // a sanitizer may say more before
    EXPECT(said && strchr(said, '\n') == line + size - 1, "%s: %s", name, line);
}

static void product_overflows(void) { mul(1ul << 32, 1ul << 32); }
static void sum_overflows(void) { add(SIZE_MAX, 1); }
static void *volatile unused;  // keeps compilers from leaving an allocation out
static volatile size_t too_many = SIZE_MAX / 2;
static void allocation_overflows(void) { unused = allocate(too_many, 4, "a test"); }
static void allocation_fails(void) { unused = allocate(1ul << 47, 8, "a test"); }
static void line_is_long(void) {
    char text[10000];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    text[5] = '\n';
    die("%s", text);
}

static void test_errors(void) {
    dies(product_overflows, "mul");
    dies(sum_overflows, "add");
    dies(allocation_overflows, "allocate of too much");
    dies(allocation_fails, "allocate of more than there is");
    dies(line_is_long, "a long value with a newline");
}

static void test_buffer(void) {
    Buffer b = {0};
    for (size_t i = 0; i < 3000; i++) {
        unsigned char piece[300];
        memset(piece, (int)(i % 251), sizeof piece);
        append(&b, piece, i % 300);
    }
    size_t at = 0;
    bool right = true;
    for (size_t i = 0; i < 3000; i++)
        for (size_t j = 0; j < i % 300; j++) right &= b.data[at++] == i % 251;
    EXPECT(right && at == b.size && b.size <= b.room, "%zu bytes of %zu", at, b.size);
    free(b.data);
}

static void test_exp(void) {
    double worst = 0;
    for (float x = -87; x < 88; x += 0.0007f) worst = worse(worst, ulps(fast_exp(x), expl((long double)x)));
    for (float x = 1; x > 1e-9f; x *= 0.7f) {
        worst = worse(worst, ulps(fast_exp(x), expl((long double)x)));
        worst = worse(worst, ulps(fast_exp(-x), expl(-(long double)x)));
    }
    EXPECT(worst < 1.5, "e^x is %g ulp off", worst);
    EXPECT(fast_exp(0) == 1 && fast_exp(-0.0f) == 1, "e^0");
    EXPECT(fast_exp(-INFINITY) == 0 && fast_exp(-1000) == 0 && fast_exp(-FLT_MAX) == 0, "e^-large");
    EXPECT(fast_exp(1000) > 1e38f && isfinite(fast_exp(FLT_MAX)), "e^large");
    EXPECT(isnan(fast_exp(NAN)), "e^NaN");
}

// Largest error of a function in ulp over what float takes, both signs; below 1e-30 it may be 0.
static double function_error(float (*f)(float), long double (*exact)(long double), float from, float to) {
    double worst = 0;
    for (float x = from; x < to; x = x * 1.0003f + 1e-12f)
        for (int sign = -1; sign < 2; sign += 2) {
            long double want = exact((long double)x * sign);
            if (fabsl(want) > 1e-30L) worst = worse(worst, ulps(f(x * (float)sign), want));
        }
    return worst;
}

static long double exact_silu(long double x) { return x / (1 + expl(-x)); }
static long double exact_sigmoid(long double x) { return 1 / (1 + expl(-x)); }
static long double exact_gelu(long double x) { return x * erfcl(-x * sqrtl(0.5L)) / 2; }
static long double exact_gelu_tanh(long double x) {
    return x / (1 + expl(-2 * sqrtl(2 / 3.14159265358979323846L) * (x + 0.044715L * x * x * x)));
}
static float call_tanh(float x) { return capped(x, 1); }
static float call_erf(float x) { return fast_erf(x); }

static void test_functions(void) {
    double error = function_error(call_tanh, tanhl, 1e-9f, 100);
    EXPECT(error < 2, "tanh is %g ulp off", error);
    error = function_error(call_erf, erfl, 1e-9f, 100);
    EXPECT(error < 2, "erf is %g ulp off", error);
    EXPECT(capped(INFINITY, 1) == 1 && capped(-1000, 1) == -1 && fast_erf(INFINITY) == 1 && fast_erf(-5) == -1, "ends");
    EXPECT(isnan(capped(NAN, 1)) && isnan(fast_erf(NAN)) && signbit(capped(-0.0f, 1)) && signbit(fast_erf(-0.0f)),
           "NaN and -0");
}

// A tensor of random weights that ends with its block: reading past its end is an error to ASan.
static Tensor *tensor(Type type, size_t rows, size_t length) {
    size_t n = rows * length, size = type == BF16 ? 2 : 4;
    Tensor *w = allocate(1, sizeof *w + n * size, "a test");
    *w = (Tensor){.type = type, .rows = rows, .columns = length, .data = w + 1};
    for (size_t i = 0; i < n; i++)  // bfloat16 is the upper half
        memcpy((char *)(w + 1) + i * size, (char *)&(float){random_float()} + 4 - size, size);
    return w;
}

// Random activations (T, n) with rows of stride(n), 0 behind element n.
static float *activations(size_t T, size_t n) {
    float *x = allocate(T * stride(n), sizeof *x, "a test");
    for (size_t t = 0; t < T; t++)
        for (size_t i = 0; i < n; i++) x[t * stride(n) + i] = random_float();
    return x;
}

// x . w over n < 16 elements or a multiple of 16: element k in lane k % 16, then the tree.
static float dot_part(const float *x, const float *w, size_t n) {
    float lane[16] = {0};
    for (size_t k = 0; k < n; k++) lane[k % 16] = fmaf(x[k], w[k], lane[k % 16]);
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

// The order that run.c promises on any machine: blocks of 1024, then what is left of the 16s, then the end.
static float dot(const float *x, const float *w, size_t n) {
    float sum = 0;
    for (size_t k = 0, count; k < n; k += count) {
        count = n - k >= 1024 ? 1024 : n - k >= 16 ? (n - k) / 16 * 16 : n - k;
        sum = k ? sum + dot_part(x + k, w + k, count) : dot_part(x, w, count);
    }
    return sum;
}

// matmul is dot() bit for bit, float32 or bfloat16, whatever T, and dot() is near long double.
static void test_matmul(size_t T, size_t n, size_t rows, bool with_bias, Type type) {
    Tensor *w = tensor(type, rows, n), *bias = with_bias ? tensor(F32, 1, rows) : NULL;
    float *x = activations(T, n), *out = allocate(T * stride(rows) + 1, sizeof *out, "a test"), *row = random_floats(n);
    out[T * stride(rows)] = 0.5f;
    atomic_store(&drawn, 0);
    #pragma omp parallel if(n > 1000)
    past = 1, holder = !omp_get_thread_num(), matmul(x, T, &(Product){out, w, bias}, 1);
    double worst = 0;
    bool equal = true, clean = out[T * stride(rows)] == 0.5f;
    for (size_t r = 0; r < rows; r++) {
        for (size_t k = 0; k < n; k++) row[k] = weight(w, r * n + k);
        for (size_t t = 0; t < T; t++) {
            const float *xt = x + t * stride(n), b = bias ? weight(bias, r) : 0;
            float got = out[t * stride(rows) + r], want = dot(xt, row, n);
            equal &= got == (bias ? want + b : want);
            if (t + 3 < T) continue;
            long double sum = (long double)b, size = fabsl(sum) + 1e-30L;
            for (size_t k = 0; k < n; k++) {
                long double product = (long double)xt[k] * (long double)row[k];
                sum += product, size += fabsl(product);
            }
            worst = worse(worst, fabsl((long double)got - sum) / size);
        }
    }
    for (size_t i = 0; i < T * stride(rows); i++) clean &= i % stride(rows) < rows || out[i] == 0;
    double limit = ldexp(6 + (double)min_size(n, 1024) / 16, -24);
    EXPECT(worst < limit, "T %zu n %zu rows %zu: off by %g", T, n, rows, worst);
    EXPECT(equal, "T %zu n %zu rows %zu type %d: another order of operations", T, n, rows, (int)type);
    EXPECT(clean, "T %zu n %zu rows %zu: written past its end, or no 0 behind a row's", T, n, rows);
    free(x), free(out), free(row), free(w), free(bias);
}

static void test_matmuls(void) {
    static const size_t n[] = {1, 3, 15, 16, 17, 33, 60, 172, 257}, rows[] = {1, 2, 3, 5, 8, 9, 33, 97};
    for (size_t T = 1, i = 0; T <= 13; T++)
        for (size_t j = 0; j < sizeof n / sizeof *n; j++)
            for (size_t k = 0; k < sizeof rows / sizeof *rows; k++, i++)
                test_matmul(T, n[j], rows[k], i % 2, (i + i / 2 + T) % 2 ? BF16 : F32);
    for (size_t T = 1; T < 28; T += 5) test_matmul(T, 2053 - T % 7, 70, true, T % 2 ? F32 : BF16);  // more than a block
    for (size_t T = 97; T < 120; T += 5) test_matmul(T, 1090 - T, 37, true, T % 2 ? F32 : BF16);  // many tokens
    for (size_t T = 130; T < 280; T += 70) test_matmul(T, 900 + T, 37, true, T % 4 ? F32 : BF16);  // parts of them
    for (size_t i = 0; i < 10; i++)  // of one token blocks, up to more than twice BLOCKS of them
        test_matmul(1, 3071 * (i / 2 + 1), 48 + i / 2 % 2 * 9, false, i % 2 ? BF16 : F32);
    static const size_t high[] = {383, 192, 775, 1404}, few[] = {1, 2, 97};  // several panels, the largest ones too
    for (size_t i = 0; i < 12; i++) test_matmul(few[i % 3], 1041 - i, high[i / 3], i % 2, i % 2 ? BF16 : F32);
}

// Each item is taken once, after all of the loop before are done, also of several loops of one: the first ones by the
// thread whose share they are, before it draws others.
static void test_next_item(void) {
    enum { ROUNDS = 400, ITEMS = 11 };
    static atomic_int done[ROUNDS][ITEMS], wrong;
    atomic_store(&drawn, 0);
    #pragma omp parallel num_threads(3)
    {
        past = 1, holder = !omp_get_thread_num();
        size_t thread = (size_t)omp_get_thread_num(), threads = (size_t)omp_get_num_threads();
        for (size_t round = 0; round < ROUNDS; round++) {
            size_t n = round / 2 % ITEMS, own = (size_t[]){OWN, 0, threads, n / 2, OWN}[round % 5];
            size_t fixed = min_size(own, n), begin = fixed * thread / threads, end = fixed * (thread + 1) / threads;
            bool first = true;
            for (size_t i; next_item(&i, n, own); first = false) {
                for (size_t j = 0; j < ITEMS && round; j++)
                    wrong += done[round - 1][j] != (j < (round - 1) / 2 % ITEMS);
                for (int wait = 0; wait < 20 && !(round % 7); wait++) sched_yield();
                if (n > 1) wrong += i < fixed ? i < begin || i >= end : first && begin < end;
                done[round][i]++;
            }
        }
    }
    for (size_t k = 0; k < ROUNDS * ITEMS; k++)
        wrong += done[k / ITEMS][k % ITEMS] != (k % ITEMS < k / ITEMS / 2 % ITEMS);
    EXPECT(!wrong, "%d items taken by others, not once, or before those of the loop before were done", (int)wrong);
}

// Both norms, weights as they are and plus 1, with a bias, and in place.
static void test_norm(size_t n, double eps, size_t kind, double add) {
    Config c = {.norm_kind = kind, .rms_norm_eps = eps, .norm_weight_add = add};
    float *x = random_floats(n), *weights = random_floats(n), *bias = kind ? random_floats(n) : NULL;
    float *out = allocate(n, sizeof *out, "a test");
    double worst = 0;
    for (int round = 0; round < 4; round++) {
        for (size_t i = 0; i < n; i++) x[i] = random_float() * (round == 1 ? 1e-3f : round == 2 ? 1e15f : 1);
        for (size_t i = 0; i < n && round == 3; i++) x[i] += 100;
        norm(&c, out, x, weights, bias, n);
        long double squares = 0, mean = 0;
        for (size_t i = 0; i < n && kind; i++) mean += (long double)x[i] / (long double)n;
        for (size_t i = 0; i < n; i++) squares += powl((long double)x[i] - mean, 2);
        for (size_t i = 0; i < n; i++) {
            long double want = ((long double)x[i] - mean) / sqrtl(squares / (long double)n + (long double)eps);
            want = want * ((long double)add + (long double)weights[i]) + (bias ? (long double)bias[i] : 0);
            // Near 0 a LayerNorm shows its mean's rounding: 0.5011 ulp, 0.71 in valgrind, whose long double is double.
            if (fabsl(want) > (kind ? 1e-3L : 1e-6L)) worst = worse(worst, ulps(out[i], want));
        }
        norm(&c, x, x, weights, bias, n);
        EXPECT(same_floats(x, out, n), "in place");
    }
    EXPECT(worst <= 0.501, "n %zu eps %g kind %zu add %g: %g ulp", n, eps, kind, add, worst);
    free(x), free(weights), free(bias), free(out);
}

static void test_norms(void) {
    for (size_t n = 2; n < 300; n = n * 5 / 4 + 1)
        for (double eps = 0; eps < 1; eps = eps * 10 + 1e-6)
            for (size_t i = 0; i < 4; i++) test_norm(n, eps, i / 2, (double)(i % 2));
}

// The largest stands at each place of a row, among others that are less or -infinity.
static void test_largest(void) {
    for (size_t n = 1; n <= 70; n++)
        for (size_t i = 0; i < n; i++) {
            float *x = random_floats(n);
            for (size_t j = 0; j < n; j++) x[j] = j == i ? -1.5f : j % 3 ? x[j] - 3 : -INFINITY;
            EXPECT(largest_of(x, n) == -1.5f, "%g, not element %zu of %zu", (double)largest_of(x, n), i, n);
            free(x);
        }
}

// Errors against the largest of |activation(x)| and |x| / 20: in the negative tail 1 + erf(x) cancels.
static void test_gated(void) {
    long double (*const exact[])(long double) = {exact_silu, exact_gelu, exact_gelu_tanh, NULL, exact_sigmoid};
    float gate[1001], up[1001], got[1001];
    for (size_t kind = 0; kind < 5; kind++) {
        double worst = 0;
        for (int i = 0; i < 1001; i++) gate[i] = got[i] = (float)(i - 500) / 5, up[i] = random_float();
        gated(kind, got, up, 1001);
        for (int i = 0; i < 1001; i++) {
            long double x = (long double)gate[i], want = exact[kind] ? exact[kind](x) : x > 0 ? x : 0;
            long double size = fmaxl(fabsl(want), kind == 1 || kind == 2 ? fabsl(x) / 20 : 1e-30L) + 1e-30L;
            worst = worse(worst, fabsl((long double)got[i] - want * (long double)up[i]) / size / ldexpl(1, -23));
        }
        EXPECT(worst < 4, "activation %zu is %g ulp off", kind, worst);
    }
    for (size_t kind = 0; kind < 5; kind++) EXPECT((got[0] = NAN, gated(kind, got, up, 1), isnan(got[0])), "NaN");
}

// The larger error of sine_cosine(x), in 1.5 ulp of double where the result is not tiny, and in 2e-16.
static double sine_error(double x) {
    double got[2], worst = 0;
    sine_cosine(x, &got[0], &got[1]);
    for (int i = 0, exponent; i < 2; i++) {
        long double want = i ? cosl(x) : sinl(x), error = fabsl((long double)got[i] - want);
        frexpl(want, &exponent);
        worst = worse(worst, fmaxl(error / 2e-16L, fabsl(want) > 1e-3L ? error / ldexpl(1.5L, exponent - 53) : 0));
    }
    return worst;
}

static void test_sine_cosine(void) {
    volatile long double one = 1;
    double limit = one + LDBL_EPSILON > one ? 1 : 1e5, worst = 0;  // valgrind's long double is a double
    for (double x = 1e-9; x < 1e6; x += x / 500 + 1e-4) worst = worse(worst, sine_error(x));
    EXPECT(worst <= limit, "up to 1e6: off by %g", worst);
    for (double n = 0; n < 640000; n += 1 + floor(n / 300))
        for (int i = -3; i < 4; i++) worst = worse(worst, sine_error(fabs(n * 0x1.921fb54442d18p0 + i * 1e-9 * n)));
    EXPECT(worst <= limit, "around multiples of pi/2: off by %g", worst);
    for (double x = 1.5e16; x < 2e16; x += 1e15) {  // where n + 1 is n
        double sine, cosine;
        sine_cosine(x, &sine, &cosine);
        EXPECT(fabs(hypot(sine, cosine) - 1) < 1e-9 && sine != cosine, "of %g: %g and %g", x, sine, cosine);
    }
}

// What attention makes of query q at position `at`, for element d, by long double: keys and values (n, kv_dim).
static long double attended(const Config *c, size_t window, const float *q, const float *k, const float *v, size_t at,
                            size_t d) {
    size_t kv_dim = stride(c->n_kv_heads * c->head_dim), first = window && at + 1 > window ? at + 1 - window : 0;
    long double p[512], largest = -INFINITY, sum = 0, out = 0, cap = (long double)c->attention_softcap;
    for (size_t i = first; i <= at; i++) {
        p[i] = 0;
        for (size_t j = 0; j < c->head_dim; j++) p[i] += (long double)q[j] * (long double)k[i * kv_dim + j];
        p[i] *= (long double)c->attention_scale;
        if (cap > 0) p[i] = cap * tanhl(p[i] / cap);
        largest = fmaxl(largest, p[i]);
    }
    for (size_t i = first; i <= at; i++)
        p[i] = expl(p[i] - largest), sum += p[i], out += p[i] * (long double)v[i * kv_dim + d];
    return out / sum;
}

// Puts a row of keys and one of values into layer l's cache, in the place of a position; NULL: NaN.
static void put(Run *r, size_t l, size_t position, const float *k, const float *v) {
    size_t n = r->model->config.n_kv_heads * r->model->config.head_dim;
    for (size_t i = 0; i < n; i++) r->k[i] = k ? k[i] : NAN, r->v[i] = v ? v[i] : NAN;
    r->position = position, fill_cache(r, l, 0, 1);
}

// Attention over n positions in chunks, of the second of two layers: the first of `chunks` against long double, others
// bit for bit the same. Slots of the cache that no token of a chunk sees hold NaN. Of a negative scale the keys point
// away from the queries: every score is far below 0.
static void test_attend(size_t n, size_t window, size_t n_kv_heads, size_t group, size_t head_dim, double scale,
                        double cap) {
    int32_t windows[2] = {0, (int32_t)window}, no_rope[2] = {0};
    Tensor window_table = {.data = windows}, rope_table = {.data = no_rope};
    Layer layers[2] = {0};
    Model m = {.config = {.dim = 8, .hidden_dim = 8, .vocab_size = 8, .n_layers = 2, .n_heads = n_kv_heads * group,
                          .n_kv_heads = n_kv_heads, .head_dim = head_dim, .attention_scale = fabs(scale),
                          .attention_softcap = cap},
               .layers = layers, .layer_window = &window_table, .layer_rope = &rope_table, .rope_freq = &rope_table};
    check_tables(&m);
    size_t q_dim = stride(n_kv_heads * group * head_dim), kv_dim = stride(n_kv_heads * head_dim);
    float *q = activations(n, q_dim - 16), *k = activations(n, kv_dim - 16), *v = activations(n, kv_dim - 16);
    float *want = random_floats(n * q_dim);
    for (size_t i = 0; scale < 0 && i < n * q_dim; i++) q[i] = 0.5f + fabsf(q[i]);
    for (size_t i = 0; scale < 0 && i < n * kv_dim; i++) k[i] = -0.5f - fabsf(k[i]);
    const size_t chunks[] = {n, 64, 7, 1};
    for (size_t c = 0; c < 4; c++) {
        Run r;
        new_run(&r, &m, n, n, chunks[c], 0);
        for (size_t i = 0; i < slots(&r, 1); i++) put(&r, 1, i, NULL, NULL);
        for (size_t at = 0, gone = 0, T; at < n; at += T) {
            T = min_size(r.chunk, n - at);
            for (; window && gone + window <= at; gone++) put(&r, 1, gone, NULL, NULL);
            for (size_t t = at; t < at + T; t++) put(&r, 1, t, k + t * kv_dim, v + t * kv_dim);
            if (c > 1 && at / T % 5 && at + T < n) continue;
            memcpy(r.q, q + at * q_dim, T * q_dim * sizeof *q), r.position = at, atomic_store(&drawn, 0);
            #pragma omp parallel if(c < 2 || n == 80)
            past = 1, holder = !omp_get_thread_num(), attention(&r, 1, T);
            if (c == 0) memcpy(want, r.attended, T * q_dim * sizeof *want);
            EXPECT(same_floats(r.attended, want + at * q_dim, T * q_dim), "n %zu window %zu heads %zu x %zu of %zu: "
                   "chunks of %zu differ at %zu", n, window, n_kv_heads, group, head_dim, chunks[c], at);
        }
        free(r.block);
    }
    double worst = 0;
    for (size_t t = n - 1, i = 0; t < n; t -= 1 + i % 29)  // some of the tokens, and of each a head and an element
        for (size_t j = 0; j < 3; j++, i++) {
            size_t h = i % (n_kv_heads * group), d = i % head_dim, kv = h / group * head_dim;
            long double w = attended(&m.config, window, q + t * q_dim + h * head_dim, k + kv, v + kv, t, d);
            worst = worse(worst, fabsl((long double)want[t * q_dim + h * head_dim + d] - w));
        }
    EXPECT(worst < 3e-6 * fmax(1, fabs(scale)), "n %zu window %zu heads %zu x %zu of %zu scale %g cap %g: off by %g",
           n, window, n_kv_heads, group, head_dim, scale, cap, worst);
    free(q), free(k), free(v), free(want);
}

static void test_attention(void) {
    static const size_t n[] = {1, 16, 63, 65, 129, 200, 300}, window[] = {0, 1, 5, 64, 100},
    dim[] = {2, 6, 10, 16, 18, 66};
    for (size_t group = 1, i = 0; group < 10; group++)
        for (size_t j = 0; j < 2; j++, i++)
            test_attend(n[i % 7], window[i % 5], 1 + i % 3, group, dim[(i + i / 6) % 6], 1 / sqrt((double)dim[i % 6]),
                        0);
    test_attend(80, 40, 1, 49, 6, 0.4, 0);
    test_attend(130, 0, 1, 3, 10, 50, 0);  // scores of some hundreds: all weight on few positions
    test_attend(130, 0, 1, 3, 10, -50, 0);
    test_attend(130, 0, 1, 1, 64, 0, 0);
    test_attend(130, 20, 2, 3, 10, 5, 3);
}

// Three models of random weights in memory, with a head_dim of their own and a window: llama's recipe with biases, and
// two with everything else that a header can ask for: norms after the sublayers, sublayers in parallel.
#define TINY                                                                                                           \
    .n_layers = 2, .dim = 12, .hidden_dim = 20, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .vocab_size = 31,       \
    .seq_len = 100, .rope_dim = 8, .rms_norm_eps = 1e-5, .rope_attention_factor = 1.25, .attention_scale = 0.3
#define ODD                                                                                                            \
    TINY, .activation = 1, .norm_kind = 1, .biases = 31, .n_rope_tables = 2, .rope_attention_factor_local = 0.75,      \
    .norm_weight_add = 1, .embedding_scale = 3, .residual_scale = 0.5, .logit_scale = 0.25, .attention_softcap = 2,    \
    .logit_softcap = 3
static const Config TINY_CONFIGS[] = {
    {TINY, .tied = 1, .norm_place = 5, .biases = 7, .n_rope_tables = 1, .embedding_scale = 1, .residual_scale = 1,
     .logit_scale = 1},
    {ODD, .norm_place = 2 + 8, .qk_norm = 2},
    {ODD, .norm_place = 1 + PARALLEL, .qk_norm = 3}};

static Model tiny_model(size_t kind) {
    static const int32_t windows[2][2] = {{0, 20}, {16, 0}}, ropes[2][2] = {{1, 1}, {2, 0}};
    static const Tensor window_tables[2] = {{.data = windows[0]}, {.data = windows[1]}};
    static const Tensor rope_tables[2] = {{.data = ropes[0]}, {.data = ropes[1]}};
    Model model = {.config = TINY_CONFIGS[kind], .layers = allocate(2, sizeof(Layer), "a test")}, *m = &model;
    const Config *c = &m->config;
    const size_t q_dim = c->n_heads * c->head_dim, kv_dim = c->n_kv_heads * c->head_dim;
    const Type W = F32;
#define MAKE(name, type, present, rows, columns) if (present) m->name = tensor(type, rows, columns);
#define MAKE_OF_LAYER(name, type, present, rows, columns) if (present) m->layers[l].name = tensor(type, rows, columns);
    TENSORS_FIRST(MAKE)
    for (size_t l = 0; l < 2; l++) { TENSORS_OF_LAYER(MAKE_OF_LAYER) }
    TENSORS_LAST(MAKE)
    for (size_t i = 0; i < m->rope_freq->rows * 4; i++)
        ((float *)m->rope_freq->data)[i] = powf(i < 4 ? 100 : 7, -(float)(i % 4) / 4);
    m->layer_window = &window_tables[kind > 0], m->layer_rope = &rope_tables[kind > 0], check_tables(m);
    if (c->tied) m->classifier = m->token_embedding;
    return model;
}

// rope() turns pairs of the first rope_dim elements by the angles of a table, with both ways of pairing; table 0 does
// nothing.
static void test_rope(Model m, size_t pairs, size_t table) {
    enum { T = 5, N = 10, HEADS = 3, ROW = N * HEADS };
    const float *freq = (const float *)m.rope_freq->data + (table == 2 ? 4 : 0);
    const long double factor = table == 2 ? 0.75L : 1.25L;
    m.config.rope_pairs = pairs;
    Run r;
    new_run(&r, &m, 100, 100, T, 1);
    r.position = pairs ? 100000 : 50;
    float *x = random_floats(T * ROW), *before = allocate(T * ROW, sizeof *x, "a test");
    memcpy(before, x, T * ROW * sizeof *x);
    for (size_t t = 0; t < T; t++) embed(&r, t, 0), rope(&r, x + t * ROW, t, HEADS, table);
    double worst = 0;
    for (size_t row = 0; row < T * HEADS; row++)
        for (size_t i = 0; i < N; i++) {
            size_t pair = (pairs ? i / 2 : i) % 4, first = pairs ? 2 * pair : pair;
            size_t second = pairs ? first + 1 : pair + 4;
            long double angle = (long double)(r.position + row / HEADS) * (long double)freq[pair];
            long double a = before[row * N + first], b = before[row * N + second];
            long double c = factor * cosl(angle), s = factor * sinl(angle);
            long double want = !table || i >= 8 ? before[row * N + i] : i == first ? a * c - b * s : b * c + a * s;
            worst = worse(worst, fabsl((long double)x[row * N + i] - want));
        }
    EXPECT(worst < (table ? 4e-7 : 1e-30), "pairs %zu table %zu: off by %g", pairs, table, worst);
    free(x), free(before), free(r.block);
}

// One chunk, several, one token at a time, and the same cache used again after a longer sequence: the same logits.
static void test_forward(Model model) {
    const Model *m = &model;
    int ids[90];
    float want[31];
    for (int i = 0; i < 90; i++) ids[i] = (int)random_below(31);
    static const size_t chunks[] = {90, 64, 7, 2, 1};
    for (size_t i = 0; i < 5; i++) {
        Run r;
        new_run(&r, m, 90, 90, chunks[i], 1);
        const float *arrays[] = {r.x, r.normed, r.branch, r.q, r.attended, r.k, r.v, r.gate, r.up, r.queries, r.total,
                                 r.logits, r.k_cache, r.v_cache};
        for (size_t a = 0; a < sizeof arrays / sizeof *arrays; a++) EXPECT((uintptr_t)arrays[a] % 64 == 0,
                "array %zu is not aligned", a);
        size_t T = 0;
        for (size_t at = 0; at < 90; at += T) forward(&r, ids + at, T = min_size(chunks[i], 90 - at));
        const float *logits = logits_of(&r, 89, 1);
        if (i == 0) memcpy(want, logits, sizeof want);
        EXPECT(r.position == 90 && same_floats(logits, want, 31), "chunks of %zu give other logits", chunks[i]);

        float fresh[31];
        Run other;
        new_run(&other, m, 90, 90, 5, 1);
        forward(&other, ids + 3, 5);
        memcpy(fresh, logits_of(&other, 4, 1), sizeof fresh);
        EXPECT(!same_floats(fresh, want, 31), "other ids give the same logits");
        for (size_t l = 0; l < 2; l++)
            for (size_t j = 0; j < slots(&r, l); j++) put(&r, l, j, NULL, NULL);
        r.position = 0;
        for (size_t at = 0; at < 5; at += T) forward(&r, ids + 3 + at, T = min_size(chunks[i], 5 - at));
        EXPECT(same_floats(logits_of(&r, 4, 1), fresh, 31), "a run used again gives other logits (chunks of %zu)",
               chunks[i]);
        free(r.block), free(other.block);
    }
}

// As many tokens stay in the cache as keepable() lets (`all`: it must let all): the logits are those of an empty one.
static void test_keepable(Model m, size_t same, bool all) {
    int ids[180];
    for (int i = 0; i < 180; i++) ids[i] = (int)random_below(31);
    Run r, fresh;
    new_run(&r, &m, 190, 190, 4, 1), new_run(&fresh, &m, 190, 190, 100, 1);
    while (r.position < 180) forward(&r, ids + r.position, 4);
    r.position = keepable(&r, same);
    EXPECT(r.position == same || (!all && r.position < same), "%zu of %zu kept", r.position, same);
    for (size_t i = same; i < 180; i++) ids[i] = (int)random_below(31);
    while (r.position < same + 1) forward(&r, ids + r.position, 1);
    forward(&fresh, ids, min_size(same + 1, 100));
    if (same + 1 > 100) forward(&fresh, ids + 100, same + 1 - 100);
    const float *want = logits_of(&fresh, same, 1);
    EXPECT(same_floats(logits_of(&r, same, 1), want, 31), "%zu of %zu kept: other logits", keepable(&r, same), same);
    free(r.block), free(fresh.block);
}

// Kept twice: what the first, longer text has put into the slots of a sliding window stays lost.
static void test_keep_again(Model m) {
    int ids[180];
    for (int i = 0; i < 180; i++) ids[i] = (int)random_below(31);
    Run r, fresh;
    new_run(&r, &m, 190, 190, 4, 1), new_run(&fresh, &m, 190, 190, 100, 1);
    while (r.position < 180) forward(&r, ids + r.position, 4);
    r.position = keepable(&r, 140), ids[140]++, ids[140] %= 31;
    while (r.position < 142) forward(&r, ids + r.position, 1);
    r.position = keepable(&r, 95), ids[95]++, ids[95] %= 31;
    while (r.position < 96) forward(&r, ids + r.position, 1);
    forward(&fresh, ids, 96);
    EXPECT(same_floats(logits_of(&r, 95, 1), logits_of(&fresh, 95, 1), 31), "kept again: other logits");
    free(r.block), free(fresh.block);
}

// The generator's state from which uniform() draws the 24 bits: the steps of SplitMix64 undone.
static uint64_t state_before(uint64_t bits) {
    static const struct { uint64_t factor; int shift; } steps[] = {{1, 31}, {0x94d049bb133111ebu, 27},
        {0xbf58476d1ce4e5b9u, 30}};
    uint64_t z = bits << 40;
    for (int i = 0; i < 3; i++) {
        uint64_t inverse = steps[i].factor, x;
        for (int j = 0; j < 6; j++) inverse *= 2 - steps[i].factor * inverse;
        x = z *= inverse;
        for (int j = 0; j < 3; j++) x = z ^ x >> steps[i].shift;
        z = x;
    }
    return z - 0x9e3779b97f4a7c15u;
}

static void test_uniform(void) {
    static const uint64_t bits[] = {0, 1, 0x800000, 0xfffffe, 0xffffff};
    for (size_t i = 0; i < 5; i++) {
        uint64_t s = state_before(bits[i]);
        float u = uniform(&s);
        EXPECT(u == (float)bits[i] / 16777216 && u < 1, "bits %llx give %.9g", (unsigned long long)bits[i], (double)u);
    }
    double sum = 0, squares = 0;
    uint64_t s = 0;
    for (int i = 0; i < 100000; i++) {
        double u = (double)uniform(&s);
        sum += u, squares += u * u;
        if (u < 0 || u >= 1 || u * 16777216 != floor(u * 16777216)) EXPECT(false, "%.17g drawn", u);
    }
    EXPECT(fabs(sum / 100000 - 0.5) < 0.005 && fabs(squares / 100000 - 1.0 / 3) < 0.005, "mean %g", sum / 100000);
}

// The id that sample() picks from three logits when the generator draws these 24 bits.
static int pick(const float logits[3], uint64_t bits, double temperature) {
    Candidate candidates[3];
    float scores[6];
    Sampler s = {.temperature = temperature, .top_p = 1, .penalty = 1, .state = state_before(bits),
                 .candidates = candidates, .scores = scores};
    return sample(&s, logits, 3, NULL, 0);
}

static void test_picks(void) {
    const float even[3] = {1, 1, 1}, middle[3] = {-INFINITY, 2, -INFINITY}, ends[3] = {0, -INFINITY, 0},
    tie[3] = {1, 3, 3};
    EXPECT(pick(even, 0, 1) == 0 && pick(even, 0xffffff, 1) == 2, "the first and last draw of an even distribution");
    EXPECT(pick(even, 0x555554, 1) == 0 && pick(even, 0x555556, 1) == 1, "a third");
    EXPECT(pick(middle, 0, 1) == 1 && pick(middle, 0xffffff, 1) == 1, "ids without weight are never drawn");
    EXPECT(pick(ends, 0, 1) == 0 && pick(ends, 0xffffff, 1) == 2 && pick(ends, 0x7fffff, 1) == 0 && pick(ends, 0x800000,
        1) == 2, "halves");
    EXPECT(pick(tie, 0xffffff, 0) == 1 && pick(tie, 5, 1e-300) <= 2, "greedy takes the lower id of a tie");
}

static int by_order(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->id - y->id;
}

// keep_best against a full sort, weights being sums of powers of two so that sums are exact.
static void test_keep_best(void) {
    for (int round = 0; round < 3000; round++) {
        Candidate c[50], sorted[50];
        size_t n = 1 + random_below(50), different = 1 + random_below(20), want = 0;
        double total = 0, sum = 0;
        for (size_t i = 0; i < n; i++) {
            float logit = (float)random_below(different);
            c[i] = (Candidate){.logit = logit, .weight = ldexpf(1, (int)logit - 10), .id = (int)i};
            total += (double)c[i].weight;
        }
        double goal = round % 3 == 0 ? 0 : round % 3 == 1 ? total : total * (double)uniform(&test_state);
        memcpy(sorted, c, n * sizeof *c);
        qsort(sorted, n, sizeof *c, by_order);
        while (want < n && (want == 0 || sum < goal)) sum += (double)sorted[want++].weight;
        size_t got = keep_best(c, n, goal);
        qsort(c, got, sizeof *c, by_order);
        bool equal = got == want;
        for (size_t i = 0; equal && i < got; i++) equal = c[i].id == sorted[i].id;
        EXPECT(equal, "%zu kept of %zu, not %zu, for %g of %g", got, n, want, goal, total);
    }
    // In these orders the middle, or the last one, would be a bad pivot each time: seconds in all.
    size_t n = 100000;
    Candidate *many = allocate(n, sizeof *many, "candidates");
    for (size_t order = 0; order < 8; order++) {
        size_t goal = order % 2 ? n - 1000 : 1000;
        for (size_t i = 0; i < n; i++) {
            size_t logits[] = {i < n / 2 ? i : n - i, i + 1 == n ? n : n - i - 1, i, n};
            many[i] = (Candidate){.logit = (float)logits[order / 2], .weight = 1, .id = (int)i};
        }
        double start = seconds(CLOCK_MONOTONIC);
        bool right = keep_best(many, n, (double)goal) == goal;
        EXPECT(right && seconds(CLOCK_MONOTONIC) - start < 1, "%zu of order %zu: slow or wrong", goal, order / 2);
        for (size_t i = 0; i < goal; i++) right = right && !better(many[goal - 1], many[i]);
        EXPECT(right, "%zu of order %zu: the last is not the worst of those kept", goal, order / 2);
    }
    free(many);
    static const struct { double p; size_t kept; } cases[] = {{0, 1}, {0.5, 1}, {0.6, 2}, {0.75, 2}, {0.76, 3}, {1, 3}};
    for (size_t i = 0; i < 6; i++) {
        Candidate c[3] = {{.logit = 2, .weight = 0.5f, .id = 0}, {.logit = 1, .weight = 0.25f, .id = 1},
                          {.logit = 1, .weight = 0.25f, .id = 2}};
        size_t kept = keep_best(c, 3, cases[i].p);
        EXPECT(kept == cases[i].kept, "top-p %g of 1/2, 1/4, 1/4 keeps %zu", cases[i].p, kept);
        EXPECT(kept != 2 || c[0].id + c[1].id == 1, "at a tie the lower id goes first");
    }
}

#ifdef __linux__
// A file is mapped whole, and large pages are asked for.
static void test_map_file(const char *path) {
    File f = map_file(path);
    struct stat info;
    EXPECT(!stat(path, &info) && f.size == (size_t)info.st_size && !memcmp(f.data, "\177ELF", 4), "%s", path);
    EXPECT(advice_given == MADV_HUGEPAGE && advised == f.size, "advice %d for %zu bytes", advice_given, advised);
}
#endif

#if defined _OPENMP && defined __linux__
// set_threads() puts each thread on a core of its own; afterwards it may go anywhere.
static void test_threads(void) {
    cpu_set_t all;
    int at[2] = {-1, -1}, bound = 0;
    unsetenv("OMP_NUM_THREADS"), set_threads(0);
    bool cores = omp_get_max_threads() > 1 && !sched_getaffinity(0, sizeof all, &all);
    omp_set_num_threads(2);
    if (!cores) return;
    bound_to = -1, set_threads(2);
    #pragma omp parallel reduction(+ : bound)
    {
        cpu_set_t now;
        bound += sched_getaffinity(0, sizeof now, &now) || !CPU_EQUAL(&now, &all);
        at[omp_get_thread_num()] = bound_to;
    }
    EXPECT(!bound, "%d threads may not go where the process may", bound);
    EXPECT(at[0] >= 0 && at[1] >= 0 && at[0] != at[1], "threads were put on processors %d and %d", at[0], at[1]);
}
#endif

static int compare_files(const char *got_path, const char *want_path, double limit) {
    File got = map_file(got_path), want = map_file(want_path);
    if (got.size != want.size) die("%s has %zu bytes, %s %zu (they must be alike)", got_path, got.size, want_path,
                                   want.size);
    const float *a = (const void *)got.data, *b = (const void *)want.data;
    double largest = 0;
    for (size_t i = 0; i < got.size / sizeof *a; i++)
        largest = worse(largest, fabsl((long double)a[i] - (long double)b[i]));
    printf("%s: largest difference %.3g, allowed %.3g\n", want_path, largest, limit);
    return !(largest <= limit);
}

int main(int argc, char **argv) {
    if (argc == 4) return compare_files(argv[1], argv[2], atof(argv[3]));
#ifdef _OPENMP
    omp_set_dynamic(0), omp_set_num_threads(2);
#ifdef __linux__
    test_threads();
#endif
#endif
#ifdef __linux__
    test_map_file(argv[0]);
#endif
    test_sizes();
    test_errors();
    test_buffer();
    test_exp();
    test_matmuls();
    test_next_item();
    test_norms();
    test_largest();
    test_functions();
    test_gated();
    test_sine_cosine();
    test_attention();
    for (size_t i = 0; i < 6; i++) test_rope(tiny_model(1), i % 2, i / 2);
    for (size_t kind = 0; kind < 3; kind++) test_forward(tiny_model(kind));
    for (size_t same = 0; same < 180; same += same / 8 == 16 ? 1 : 8)  // 130 and 134 are the last that are lost
        for (size_t kind = 0; kind < 3; kind++) test_keepable(tiny_model(kind), same, same > 134);
    for (size_t kind = 0; kind < 3; kind++) test_keep_again(tiny_model(kind));
    test_uniform();
    test_picks();
    test_keep_best();
    printf("unit: %zu passed, %zu failed\n", n_passed, n_failed);
    return n_failed != 0;
}
