// Unit tests of run.c's kernels against long double, without any file: tests/unit
// Compares two files of float32 as well:                             tests/unit GOT WANT LARGEST_DIFFERENCE
#define RUN_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"
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
static void allocation_overflows(void) { unused = allocate(SIZE_MAX / 2, 4, "a test"); }
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
static float call_tanh(float x) { return fast_tanh(x); }
static float call_erf(float x) { return fast_erf(x); }

static void test_functions(void) {
    double error = function_error(call_tanh, tanhl, 1e-9f, 100);
    EXPECT(error < 2, "tanh is %g ulp off", error);
    error = function_error(call_erf, erfl, 1e-9f, 100);
    EXPECT(error < 2, "erf is %g ulp off", error);
    EXPECT(fast_tanh(INFINITY) == 1 && fast_tanh(-1000) == -1 && fast_erf(INFINITY) == 1 && fast_erf(-5) == -1, "ends");
    EXPECT(isnan(fast_tanh(NAN)) && isnan(fast_erf(NAN)) && signbit(fast_tanh(-0.0f)) && signbit(fast_erf(-0.0f)),
           "NaN and -0");
}

// matmul against long double on odd sizes; each row of T is bit for bit what it is alone.
static void test_matmul(size_t T, size_t n, size_t rows, bool with_bias) {
    float *x = random_floats(T * n), *w = random_floats(rows * n), *bias = with_bias ? random_floats(rows) : NULL;
    float *out = random_floats(T * rows + 1), *alone = random_floats(rows), guard = out[T * rows];
    matmul(out, x, w, bias, T, n, rows);
    double worst = 0;
    bool equal = true;
    for (size_t t = 0; t < T; t++) {
        for (size_t r = 0; r < rows; r++) {
            long double want = bias ? (long double)bias[r] : 0, size = fabsl(want) + 1e-30L;
            for (size_t k = 0; k < n; k++) {
                long double product = (long double)x[t * n + k] * (long double)w[r * n + k];
                want += product;
                size += fabsl(product);
            }
            worst = worse(worst, fabsl((long double)out[t * rows + r] - want) / size);
        }
        matmul(alone, x + t * n, w, bias, 1, n, rows);
        equal &= same_floats(alone, out + t * rows, rows);
    }
    EXPECT(worst < ldexp(6 + (double)n / 16, -24), "T %zu n %zu rows %zu: off by %g", T, n, rows, worst);
    EXPECT(equal, "T %zu n %zu rows %zu: differs from T = 1", T, n, rows);
    EXPECT(same_floats(&guard, &out[T * rows], 1), "T %zu n %zu rows %zu: written past its end", T, n, rows);
    free(x), free(w), free(bias), free(out), free(alone);
}

static void test_matmuls(void) {
    static const size_t T[] = {1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 19}, n[] = {1, 3, 15, 16, 17, 31, 33, 60, 172, 257},
    rows[] = {1, 2, 3, 4, 5, 7, 9, 33, 97};
    for (size_t i = 0; i < sizeof T / sizeof *T; i++)
        for (size_t j = 0; j < sizeof n / sizeof *n; j++)
            for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) test_matmul(T[i], n[j], rows[k], (i + j + k) % 2);
    test_matmul(9, 500, 301, true);  // large enough for threads
}

// Both norms, weights as they are and plus 1, with a bias, several sets of weights, and in place.
static void test_norm(size_t n, double eps, size_t kind, double add) {
    Config c = {.norm_kind = kind, .rms_norm_eps = eps, .norm_weight_add = add};
    float *x = random_floats(4 * n), *weight = random_floats(2 * n), *bias = random_floats(n);
    float *out = random_floats(4 * n);
    for (size_t i = 0; i < n; i++) x[n + i] *= 1e-3f, x[2 * n + i] *= 1e15f, x[3 * n + i] += 100;
    norm(&c, out, x, weight, kind ? bias : NULL, 4, n, 2);
    double worst = 0;
    for (size_t t = 0; t < 4; t++) {
        long double squares = 0, mean = 0;
        for (size_t i = 0; i < n && kind; i++) mean += (long double)x[t * n + i] / (long double)n;
        for (size_t i = 0; i < n; i++) squares += powl((long double)x[t * n + i] - mean, 2);
        for (size_t i = 0; i < n; i++) {
            long double want = ((long double)x[t * n + i] - mean) / sqrtl(squares / (long double)n + (long double)eps);
            want *= (long double)add + (long double)weight[t % 2 * n + i];
            if (kind) want += (long double)bias[i];
            if (fabsl(want) > 1e-6L) worst = worse(worst, ulps(out[t * n + i], want));
        }
    }
    EXPECT(worst <= 0.501, "n %zu eps %g kind %zu add %g: %g ulp", n, eps, kind, add, worst);
    norm(&c, x, x, weight, kind ? bias : NULL, 4, n, 2);
    EXPECT(same_floats(x, out, 4 * n), "in place");
    free(x), free(weight), free(bias), free(out);
}

static void test_norms(void) {
    for (size_t n = 2; n < 300; n = n * 5 / 4 + 1)
        for (double eps = 0; eps < 1; eps = eps * 10 + 1e-6)
            for (size_t i = 0; i < 4; i++) test_norm(n, eps, i / 2, (double)(i % 2));
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

// attend() against long double for n positions; what lies behind them is NaN and must not be read.
// Of a negative scale the keys point away from the queries: every score is far below 0.
static void test_attend(size_t n, size_t group, size_t head_dim, float scale, float cap) {
    size_t room = n + KV_BLOCK;
    float *q = random_floats(group * head_dim), *k = random_floats(room * head_dim),
    *v = random_floats(room * head_dim);
    float *out = random_floats(group * head_dim), *scores = random_floats(group * KV_BLOCK);
    Softmax *softmax = allocate(group, sizeof *softmax, "a test");
    if (scale < 0) {
        scale = -scale;
        for (size_t i = 0; i < group * head_dim; i++) q[i] = 0.5f + fabsf(q[i]);
        for (size_t i = 0; i < n * head_dim; i++) k[i] = -0.5f - fabsf(k[i]);
    }
    for (size_t i = n * head_dim; i < room * head_dim; i++) k[i] = v[i] = NAN;
    attend(out, softmax, scores, q, k, v, n, group, head_dim, scale, cap);
    double worst = 0;
    for (size_t h = 0; h < group; h++) {
        long double *p = allocate(n, sizeof *p, "a test"), largest = -INFINITY, sum = 0;
        for (size_t i = 0; i < n; i++) {
            const float *qh = q + h * head_dim, *ki = k + i * head_dim;
            for (size_t d = 0; d < head_dim; d++) p[i] += (long double)qh[d] * (long double)ki[d];
            p[i] *= (long double)scale;
            if (cap > 0) p[i] = (long double)cap * tanhl(p[i] / (long double)cap);
            largest = fmaxl(largest, p[i]);
        }
        for (size_t i = 0; i < n; i++) sum += p[i] = expl(p[i] - largest);
        for (size_t d = 0; d < head_dim; d++) {
            long double want = 0;
            for (size_t i = 0; i < n; i++) want += p[i] / sum * (long double)v[i * head_dim + d];
            worst = worse(worst, fabsl((long double)out[h * head_dim + d] - want));
        }
        free(p);
    }
    EXPECT(worst < 3e-6 * fmax(1, (double)scale), "n %zu group %zu head_dim %zu scale %g: off by %g", n, group,
           head_dim, (double)scale, worst);
    free(q), free(k), free(v), free(out), free(scores), free(softmax);
}

static void test_attention(void) {
    static const size_t n[] = {1, 2, 3, 16, 63, 64, 65, 127, 128, 129, 192, 200}, group[] = {1, 2, 3, 4, 7},
    dim[] = {2, 6, 10, 16, 18, 64};
    for (size_t i = 0; i < sizeof n / sizeof *n; i++)
        for (size_t j = 0; j < sizeof group / sizeof *group; j++)
            for (size_t k = 0; k < sizeof dim / sizeof *dim; k++) test_attend(n[i], group[j], dim[k],
                    (float)(1 / sqrt((double)dim[k])), 0);
    test_attend(130, 3, 10, 50, 0);  // scores of some hundreds: all weight on few positions
    test_attend(130, 3, 10, -50, 0);
    test_attend(130, 1, 64, 0, 0);
    test_attend(130, 3, 10, 5, 3);
}

// A model of random weights in memory, llama's recipe, with biases and a head_dim of its own.
static Model tiny_model(void) {
    Model m = {.config = {.dim = 12, .hidden_dim = 20, .n_layers = 2, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10,
                          .vocab_size = 31, .seq_len = 100,
        .tied = 1, .norm_place = 5, .biases = 7, .rope_dim = 8, .n_rope_tables = 1, .rms_norm_eps = 1e-5,
        .rope_attention_factor = 1.25, .attention_scale = 0.3, .embedding_scale = 1,
        .residual_scale = 1, .logit_scale = 1}};
    float *freq = random_floats(4);
    for (size_t i = 0; i < 4; i++) freq[i] = powf(100, -(float)i / 4);
    m.rope_freq = freq;
    m.token_embedding = m.classifier = random_floats(31 * 12);
    m.final_norm = random_floats(12);
    m.layers = allocate(2, sizeof *m.layers, "a test");
    for (size_t l = 0; l < 2; l++)
        m.layers[l] = (Layer){.rope = 1, .attention_norm = random_floats(12), .wq = random_floats(60 * 12),
                              .wk = random_floats(20 * 12), .wv = random_floats(20 * 12),
            .bq = random_floats(60), .bk = random_floats(20), .bv = random_floats(20), .wo = random_floats(12 * 60),
            .bo = random_floats(12),
            .ffn_norm = random_floats(12), .w1 = random_floats(20 * 12), .w3 = random_floats(20 * 12),
            .w2 = random_floats(12 * 20),
            .b1 = random_floats(20), .b3 = random_floats(20), .b2 = random_floats(12)};
    return m;
}

// The same with everything else that a header can ask for, in parallel or with norms after.
static Model odd_model(bool parallel) {
    Model m = tiny_model();
    Config *c = &m.config;
    c->norm_kind = c->tied = 1, c->norm_place = parallel ? 1 + PARALLEL : 2 + 8, c->qk_norm = parallel ? 3 : 2;
    c->biases = 31, c->n_rope_tables = 2, c->rope_attention_factor_local = 0.75, c->norm_weight_add = 1;
    c->embedding_scale = 3, c->residual_scale = 0.5, c->logit_scale = 0.25, c->activation = 1;
    c->attention_softcap = 2, c->logit_softcap = 3;
    m.rope_freq = random_floats(8), m.final_norm_bias = random_floats(12), m.classifier_bias = random_floats(31);
    for (size_t l = 0; l < 2; l++) {
        Layer *w = &m.layers[l];
        w->window = l ? 0 : 16, w->rope = l ? 0 : 2, w->q_norm = random_floats(60), w->k_norm = random_floats(20);
        if (parallel) w->ffn_norm = NULL, w->attention_norm_bias = random_floats(12);
        else w->ffn_norm = w->attention_norm = NULL;
        if (!parallel) w->attention_post_norm = random_floats(12), w->attention_post_norm_bias = random_floats(12);
        if (!parallel) w->ffn_post_norm = random_floats(12), w->ffn_post_norm_bias = random_floats(12);
    }
    return m;
}

// rope() turns pairs of the first rope_dim elements, both ways of pairing; position 0 is the identity.
static void test_rope(Model m) {
    for (size_t pairs = 0; pairs < 2; pairs++) {
        m.config.rope_pairs = pairs;
        Run r;
        new_run(&r, &m, 100, 5, 1);
        r.position = 50;
        float *x = random_floats(5 * 3 * 10), *before = random_floats(5 * 3 * 10);
        memcpy(before, x, 150 * sizeof *x);
        rope_angles(&r, 5);
        rope(&r, x, 5, 3, 0);
        EXPECT(same_floats(x, before, 150), "no table, but turned");
        rope(&r, x, 5, 3, 1);
        double worst = 0;
        for (size_t row = 0; row < 15; row++)
            for (size_t i = 0; i < 10; i++) {
                size_t pair = (pairs ? i / 2 : i) % 4, first = pairs ? 2 * pair : pair,
                second = pairs ? first + 1 : pair + 4;
                long double angle = (long double)(50 + row / 3) * (long double)m.rope_freq[pair],
                a = before[row * 10 + first], b = before[row * 10 + second];
                long double c = 1.25L * cosl(angle), s = 1.25L * sinl(angle),
                want = i == first ? a * c - b * s : b * c + a * s;
                if (i >= 8) want = before[row * 10 + i];
                worst = worse(worst, fabsl((long double)x[row * 10 + i] - want));
            }
        EXPECT(worst < 4e-7, "pairs %zu: off by %g", pairs, worst);
        free(x), free(before), free(r.block);
    }
    Run far;
    new_run(&far, &m, 100, 1, 1);
    far.position = 100000;
    rope_angles(&far, 1);
    for (size_t i = 0; i < 4; i++) {
        double angle = 100000.0 * (double)m.rope_freq[i];
        EXPECT(far.cosine[i] == (float)(cos(angle) * 1.25) && far.sine[i] == (float)(sin(angle) * 1.25),
               "the angle at position 100000 is no double product");
    }
    free(far.block);
}

// One chunk, several, one token at a time, and the same cache used again after a longer sequence: the same logits.
static void test_forward(const Model *m) {
    int ids[90];
    float want[31];
    for (int i = 0; i < 90; i++) ids[i] = (int)random_below(31);
    static const size_t chunks[] = {90, 64, 7, 2, 1};
    for (size_t i = 0; i < 5; i++) {
        Run r;
        new_run(&r, m, 90, chunks[i], 1);
        const float *arrays[] = {r.x, r.normed, r.q, r.k, r.v, r.attended, r.scores, r.branch, r.gate, r.up, r.logits,
                                 r.k_cache, r.v_cache};
        for (size_t a = 0; a < sizeof arrays / sizeof *arrays; a++) EXPECT((uintptr_t)arrays[a] % 64 == 0,
                "array %zu is not aligned", a);
        size_t T = 0;
        for (size_t at = 0; at < 90; at += T) forward(&r, ids + at, T = min_size(chunks[i], 90 - at));
        const float *logits = logits_of(&r, T - 1, 1);
        if (i == 0) memcpy(want, logits, sizeof want);
        EXPECT(r.position == 90 && same_floats(logits, want, 31), "chunks of %zu give other logits", chunks[i]);

        float fresh[31];
        Run other;
        new_run(&other, m, 90, 5, 1);
        forward(&other, ids + 3, 5);
        memcpy(fresh, logits_of(&other, 4, 1), sizeof fresh);
        for (size_t j = 0; j < 2 * 2 * 90 * 10; j++) r.k_cache[j] = r.v_cache[j] = NAN;
        r.position = 0;
        for (size_t at = 0; at < 5; at += T) forward(&r, ids + 3 + at, T = min_size(chunks[i], 5 - at));
        EXPECT(same_floats(logits_of(&r, T - 1, 1), fresh, 31), "a run used again gives other logits (chunks of %zu)",
               chunks[i]);
        free(r.block), free(other.block);
    }
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
    Sampler s = {.temperature = temperature, .top_p = 1, .penalty = 1, .state = state_before(bits)};
    new_sampler(&s, 3);
    int id = sample(&s, logits, NULL, 0);
    free(s.candidates), free(s.weights);
    return id;
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
        memcpy(sorted, c, sizeof c);
        qsort(sorted, n, sizeof *c, by_order);
        while (want < n && (want == 0 || sum < goal)) sum += (double)sorted[want++].weight;
        size_t got = keep_best(c, n, goal);
        qsort(c, got, sizeof *c, by_order);
        bool equal = got == want;
        for (size_t i = 0; equal && i < got; i++) equal = c[i].id == sorted[i].id;
        EXPECT(equal, "%zu kept of %zu, not %zu, for %g of %g", got, n, want, goal, total);
    }
    static const struct { double p; size_t kept; } cases[] = {{0, 1}, {0.5, 1}, {0.6, 2}, {0.75, 2}, {0.76, 3}, {1, 3}};
    for (size_t i = 0; i < 6; i++) {
        Candidate c[3] = {{.logit = 2, .weight = 0.5f, .id = 0}, {.logit = 1, .weight = 0.25f, .id = 1},
                          {.logit = 1, .weight = 0.25f, .id = 2}};
        size_t kept = keep_best(c, 3, cases[i].p);
        EXPECT(kept == cases[i].kept, "top-p %g of 1/2, 1/4, 1/4 keeps %zu", cases[i].p, kept);
        EXPECT(kept != 2 || c[0].id + c[1].id == 1, "at a tie the lower id goes first");
    }
}

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
    test_sizes();
    test_errors();
    test_buffer();
    test_exp();
    test_matmuls();
    test_functions();
    test_norms();
    test_gated();
    test_attention();
    Model m = tiny_model();
    test_rope(m);
    test_forward(&m);
    for (int parallel = 0; parallel < 2; parallel++) m = odd_model(parallel), test_forward(&m);
    test_uniform();
    test_picks();
    test_keep_best();
    printf("unit: %zu passed, %zu failed\n", n_passed, n_failed);
    return n_failed != 0;
}
