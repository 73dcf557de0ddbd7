/* run.c: inference for LLaMA-style decoders, in one file:  ./run model.bin -i "Once upon a time"
 *
 * It reads from the ground up, main() last. Arrays are row-major; a comment like (T, n_heads, head_dim) is a shape in
 * the names of the header's fields, T the number of tokens that one call of forward() takes. Every sum has one fixed
 * order: the same tokens give the same logits to the last bit. Not here: training, GPUs, quantized weights. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if !defined __unix__ && !defined __APPLE__ || __SIZEOF_POINTER__ != 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "run.c needs a POSIX system (on Windows, WSL) on a 64-bit little-endian machine: checkpoints are used in place"
#endif
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef MADV_HUGEPAGE
#define MADV_HUGEPAGE MADV_NORMAL  // large pages where Linux can, else nothing
#endif
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_num_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
static int omp_get_max_threads(void) { return 1; }
#endif

// ---- errors and memory ----------------------------------------------------------------------------------------------
static char *unfinished;  // name of the output file being written, removed if its end is not reached
// Prints one line on stderr (control characters that a value brings along become '?') and ends the program.
__attribute__((format(printf, 2, 3))) _Noreturn static void fail(int status, const char *format, ...) {
    char line[2048];
    va_list values;
    va_start(values, format), vsnprintf(line, sizeof line, format, values), va_end(values);
    for (char *c = line; *c; c++) *c = (unsigned char)*c < 32 || *c == 127 ? '?' : *c;
    fprintf(stderr, "run: %s\n", line);
    if (unfinished) unlink(unfinished);
    exit(status);
}
#define die(...) fail(1, __VA_ARGS__)          // bad data or failed input and output: what is wrong (what to do)
#define usage_error(...) fail(2, __VA_ARGS__)  // a wrong command line
// Size arithmetic that cannot wrap.
static size_t overflow(size_t n) { die("a size overflows 64 bits at a factor or term %zu (the file is damaged)", n); }
static size_t mul(size_t a, size_t b) { return __builtin_mul_overflow(a, b, &a) ? overflow(b) : a; }
static size_t add(size_t a, size_t b) { return __builtin_add_overflow(a, b, &a) ? overflow(b) : a; }
static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static size_t round_up(size_t a, size_t unit) { return add(a, unit - 1) / unit * unit; }

// Zeroed memory for count elements of a size. A page of a large block costs nothing until it is touched.
static void *allocate(size_t count, size_t size, const char *what) {
    void *block = calloc(count + !count, size);
    if (!block) die("no memory for %s: %zu bytes (a smaller -c or -b needs less)", what, mul(count, size));
    return block;
}

typedef struct { unsigned char *data; size_t size, room; } Buffer;
typedef struct { const unsigned char *data; size_t size; const char *path; } File;

// Appends n bytes, growing the buffer by doubling.
static void append(Buffer *b, const void *bytes, size_t n) {
    if (add(b->size, n) > b->room) {
        b->room = add(mul(b->room, 2), add(n, 256)), b->data = realloc(b->data, b->room);
        if (!b->data) die("no memory for a buffer of %zu bytes (use less text)", b->room);
    }
    if (n) memcpy(b->data + b->size, bytes, n), b->size += n;
}

static struct stat in_use[3];  // the last two files that were mapped, and standard input
// Maps a whole regular file, read-only: processes that use the same file share its memory.
static File map_file(const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &info)) die("cannot open %s: %s (check the path)", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) die("%s is not a regular file (name one: it is mapped into memory)", path);
    size_t size = (size_t)info.st_size;
    if (!size) die("%s is empty, 0 bytes (export or copy it again)", path);
    void *data = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) die("cannot map the %zu bytes of %s: %s (free some memory)", size, path, strerror(errno));
    madvise(data, size, MADV_HUGEPAGE);  // what is not in memory yet is read in pages of 2 MiB, one page fault, not 32
    in_use[0] = in_use[1], in_use[1] = info;
    return close(fd), (File){data, size, path};
}

// ---- threads --------------------------------------------------------------------------------------------------------
// The forward pass runs in all threads at once. They share work by `for (size_t i; next_item(&i, n, own);) ... item i`.
// Of the n items each thread has a fixed share of the first `own`, which its caches may still hold; then it draws
// numbers: those of the items that nobody has yet. Who takes one changes no result. Out of items, it draws one more:
// who draws a loop's last is its holder: does loops of one item alone, lets others begin the next.
#define OWN SIZE_MAX  // all items. Threads give the same n and own, change no i, break no loop, read nothing in between
static _Alignas(64) atomic_size_t drawn;   // numbers drawn by all, and 1 a beginning; 0 before a parallel region
static _Thread_local size_t past;          // what drawn is when a loop begins: 1 for the first of a parallel region
static _Thread_local bool inside, holder;  // in a loop; drew the last number, the others wait (at first: main thread)
static int spins = 20000;                  // of a wait, before others may run; 0 with more threads than processors
static bool next_item(size_t *item, size_t n, size_t own) {
    if (n == 1) return *item = 0, inside = holder && !inside;
    size_t threads = (size_t)omp_get_num_threads(), thread = (size_t)omp_get_thread_num(), fixed = min_size(own, n);
    if (!inside && holder) atomic_store_explicit(&drawn, past, memory_order_release);
    else for (int i = 0; !inside && atomic_load(&drawn) < past;) i < spins ? i++ : sched_yield();
    *item = inside ? *item + 1 : fixed * thread / threads;
    if (*item < fixed * (thread + 1) / threads) return inside = true;
    size_t number = atomic_fetch_add(&drawn, 1) - past;
    *item = fixed + number, inside = *item < n, holder = *item == n + threads - 1;
    return past += inside ? 0 : n - fixed + threads + 1, inside;
}

// ---- vectors --------------------------------------------------------------------------------------------------------
// A dot product is summed in 16 lanes, element k in lane k % 16, and the lanes are added in one tree, on any machine. A
// Vec has WIDTH of these, PARTS Vecs all. TILE_T tokens by TILE_R rows are taken at a time: their sums fill registers.
#if defined __AVX512F__
enum { LANES = 16, WIDTH = 16, PARTS = LANES / WIDTH, TILE_T = 6, TILE_R = 4 };
#else
enum { LANES = 16, WIDTH = 8, PARTS = LANES / WIDTH, TILE_T = 3, TILE_R = 4 };
#endif
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL2  // clang unrolls by itself; told to, it makes no vectors
#define ROLLED
#else
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL2 _Pragma("GCC unroll 2")
#define ROLLED _Pragma("GCC unroll 1")  // or gcc takes the elements of a vector apart before it sees the vector
#endif
#define SHUFFLE __builtin_shufflevector
typedef union { float value; uint32_t bits; } Word;  // a float and its bits
typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef float Half __attribute__((vector_size(32)));  // of 16 lanes
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef float LooseVec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));  // anywhere in memory
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint16_t LooseShorts __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
INLINE Vec load(const float *p) { return *(const LooseVec *)p; }
INLINE Vec load_once(const float *p) { return *(const volatile LooseVec *)p; }  // or gcc may load it for each use
INLINE void store(float *p, Vec v) { *(LooseVec *)p = v; }

// a * b + c, each element rounded once.
INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
    ROLLED for (int i = 0; i < WIDTH; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

// The sums of TILE_R = 4 rows of 16 lanes: lane i takes lane i + 8, then i + 4, i + 2, i + 1.
INLINE Quad sum_lanes(Vec lanes[TILE_R][PARTS]) {
    Half h[TILE_R];
    UNROLL for (int r = 0; r < TILE_R; r++)
        h[r] = SHUFFLE(lanes[r][0], lanes[r][PARTS - 1], 0, 1, 2, 3, 4, 5, 6, 7) +
               SHUFFLE(lanes[r][0], lanes[r][PARTS - 1], 8, 9, 10, 11, 12, 13, 14, 15);
    Half a = SHUFFLE(h[0], h[2], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(h[0], h[2], 4, 5, 6, 7, 12, 13, 14, 15);
    Half b = SHUFFLE(h[1], h[3], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(h[1], h[3], 4, 5, 6, 7, 12, 13, 14, 15);
    Half c = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(c, c, 0, 2, 4, 6) + SHUFFLE(c, c, 1, 3, 5, 7);
}

// c[0] x^(n-1) + ... + c[n-1]
INLINE float polynomial(const float *c, int n, float x) {
    float p = c[0];
    UNROLL for (int i = 1; i < n; i++) p = __builtin_fmaf(p, x, c[i]);
    return p;
}

// e^x to about 1 ulp, without a branch so that loops over it become vectors: x = n ln 2 + r with |r| <= ln 2 / 2, the
// Taylor polynomial of e^r, and n added to the exponent. Below -87 (e^-87 is 1.6e-38) 0, above 88 e^88, of NaN NaN.
INLINE float fast_exp(float x) {
    static const float taylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
    float clamped = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float shifted = __builtin_fmaf(clamped, 1.44269504f, 0x1.8p23f);  // its low bits are now n = round(x / ln 2)
    float n = shifted - 0x1.8p23f;
    float r = __builtin_fmaf(n, -0x1.7f7d1cp-20f, __builtin_fmaf(n, -0x1.62e4p-1f, clamped));  // ln 2 in two parts
    float p = __builtin_fmaf(r * r, polynomial(taylor, 6, r), r) + 1.0f;
    return x < -87.0f ? 0.0f : p * (Word){.bits = ((Word){.value = shifted}.bits + 127) << 23}.value;
}

// ---- the checkpoint -------------------------------------------------------------------------------------------------
// One flat little-endian file, used in place. These tables are its specification; loading and `-m check` follow them.
// Header: 64 slots of 8 bytes. Slot 0 is the magic "run.c\r\n\x1a"; then one field a slot in the order of HEADER, as
// uint64 (COUNT), int64 (INT) or float64 (REAL), and the range supported (0 to 0: not yet); the slots left are 0.
#define HEADER(COUNT, INT, REAL)                                                                                       \
    COUNT(version, 1, 1) COUNT(weight_type, 0, 1) /* 0 float32, 1 bfloat16 */ COUNT(dim, 1, INT_MAX)                   \
    COUNT(hidden_dim, 1, INT_MAX) COUNT(n_layers, 1, 65536) COUNT(n_heads, 1, INT_MAX)                                 \
    COUNT(n_kv_heads, 1, INT_MAX) /* each serves n_heads / n_kv_heads query heads (GQA) */ COUNT(head_dim, 2, INT_MAX) \
    COUNT(vocab_size, 1, INT_MAX) COUNT(seq_len, 1, INT_MAX) COUNT(tied, 0, 1) /* 1: classifier = token_embedding */   \
    COUNT(activation, 0, 4) /* 0 silu, gelu, gelu_tanh, relu, 4 sigmoid */ COUNT(norm_kind, 0, 1) /* 1: LayerNorm */   \
    COUNT(norm_place, 0, 31)    /* 1 before attention + 2 after + 4 before FFN + 8 after + 16 both in parallel */      \
    COUNT(qk_norm, 0, 3)        /* 0 none, 1 per head, 2 over the projection, 3 per head with a weight for each */     \
    COUNT(biases, 0, 31)        /* 1 q/k/v + 2 attention output + 4 FFN + 8 norms + 16 classifier */                   \
    COUNT(rope_dim, 2, INT_MAX) /* are rotated */ COUNT(rope_pairs, 0, 1) /* 0: i, i + rope_dim / 2; 1: 2i, 2i + 1 */  \
    COUNT(n_rope_tables, 1, 2) INT(bos_id, -1, INT_MAX) /* -1: none */ COUNT(n_eos, 0, 16) /* end-of-text ids */       \
    COUNT(tokenizer_hash, 0, UINT64_MAX) /* fingerprint, 0: unknown */ COUNT(config_size, 0, INT_MAX) /* bytes */      \
    COUNT(n_experts, 0, 0) COUNT(n_experts_used, 0, 0) COUNT(n_shared_experts, 0, 0) COUNT(expert_dim, 0, 0)           \
    COUNT(n_dense_layers, 0, 0) COUNT(router, 0, 0) /* mixture of experts */ COUNT(q_lora_rank, 0, 0)                  \
    COUNT(kv_lora_rank, 0, 0) COUNT(nope_head_dim, 0, 0) COUNT(v_head_dim, 0, 0) /* latent attention (MLA) */          \
    REAL(rms_norm_eps, 0, 1) REAL(norm_weight_add, 0, 1) /* 1: norms multiply by 1 + weight */                         \
    REAL(rope_theta, 0, FLT_MAX) REAL(rope_theta_local, 0, FLT_MAX) /* bases of rope_freq's two tables, for people */  \
    REAL(rope_attention_factor, 1e-6, 1e6) REAL(rope_attention_factor_local, 1e-6, 1e6) /* of cosine and sine */       \
    REAL(attention_scale, 1e-9, 1e9) /* of q . k, usually head_dim ** -0.5 */ REAL(embedding_scale, 1e-9, 1e9)         \
    REAL(residual_scale, 1e-9, 1e9) REAL(logit_scale, 1e-9, 1e9) /* of what a layer adds, of logits */                 \
    REAL(attention_softcap, 0, 1e9) REAL(logit_softcap, 0, 1e9) /* c: c tanh(x / c), 0: x */ REAL(router_scale, 0, 0)

// Tensors follow, row-major, each at the next multiple of 64 bytes from the start of the file, in this order. W is
// float32 or bfloat16 by weight_type; q_dim is n_heads * head_dim, kv_dim n_kv_heads * head_dim. Last is the source's
// config.json, which run.c does not read.      TENSOR(name, type, present if, rows, columns)
#define TENSORS_FIRST(TENSOR)                                                                                          \
    TENSOR(eos_ids, I32, c->n_eos, 1, c->n_eos) TENSOR(layer_window, I32, 1, 1, c->n_layers) /* tokens seen, 0: all */ \
    TENSOR(layer_rope, I32, 1, 1, c->n_layers) /* the layer's table of rope_freq from 1, 0: no rotation */             \
    TENSOR(rope_freq, F32, 1, c->n_rope_tables, c->rope_dim / 2) /* radians per position */                            \
    TENSOR(token_embedding, W, 1, c->vocab_size, c->dim)
#define NORM(TENSOR, name, present) /* and its bias */                                                                 \
    TENSOR(name, F32, present, 1, c->dim) TENSOR(name##_bias, F32, (present) && (c->biases & 8), 1, c->dim)
#define TENSORS_OF_LAYER(TENSOR) /* all of these for each layer */                                                     \
    NORM(TENSOR, attention_norm, c->norm_place & 1) TENSOR(wq, W, 1, q_dim, c->dim)                                    \
    TENSOR(wk, W, 1, kv_dim, c->dim) TENSOR(wv, W, 1, kv_dim, c->dim) TENSOR(bq, F32, c->biases & 1, 1, q_dim)         \
    TENSOR(bk, F32, c->biases & 1, 1, kv_dim) TENSOR(bv, F32, c->biases & 1, 1, kv_dim)                                \
    TENSOR(q_norm, F32, c->qk_norm, c->qk_norm == 1 ? 1 : c->n_heads, c->head_dim)                                     \
    TENSOR(k_norm, F32, c->qk_norm, c->qk_norm == 1 ? 1 : c->n_kv_heads, c->head_dim)                                  \
    TENSOR(wo, W, 1, c->dim, q_dim) TENSOR(bo, F32, c->biases & 2, 1, c->dim)                                          \
    NORM(TENSOR, attention_post_norm, c->norm_place & 2) NORM(TENSOR, ffn_norm, c->norm_place & 4)                     \
    TENSOR(w1, W, 1, c->hidden_dim, c->dim) /* gate */ TENSOR(w3, W, 1, c->hidden_dim, c->dim) /* up */                \
    TENSOR(w2, W, 1, c->dim, c->hidden_dim) /* down */ TENSOR(b1, F32, c->biases & 4, 1, c->hidden_dim)                \
    TENSOR(b3, F32, c->biases & 4, 1, c->hidden_dim) TENSOR(b2, F32, c->biases & 4, 1, c->dim)                         \
    NORM(TENSOR, ffn_post_norm, c->norm_place & 8)
#define TENSORS_LAST(TENSOR)                                                                                           \
    NORM(TENSOR, final_norm, 1) TENSOR(classifier, W, !c->tied, c->vocab_size, c->dim)                                 \
    TENSOR(classifier_bias, F32, c->biases & 16, 1, c->vocab_size)

enum { HEADER_SIZE = 64 * 8, ALIGNMENT = 64, OF_NO_LAYER = -1, PARALLEL = 16 };
typedef enum { F32, I32, BF16 } Type;
INLINE size_t size_of(Type type) { return type == BF16 ? 2 : 4; }
#define COUNT_MEMBER(name, low, high) size_t name;
#define INT_MEMBER(name, low, high) int64_t name;
#define REAL_MEMBER(name, low, high) double name;
typedef struct { char magic[8]; HEADER(COUNT_MEMBER, INT_MEMBER, REAL_MEMBER) } Config;  // the header as in the file
#define FIELD(name, low, high) \
    {#name, _Generic((Config){.magic = ""}.name, size_t: 'c', int64_t: 'i', double: 'r'), low, (double)high},
static const struct { const char *name; char kind; double low, high; } FIELDS[] = {HEADER(FIELD, FIELD, FIELD)};
enum { N_FIELDS = sizeof FIELDS / sizeof *FIELDS };
_Static_assert(sizeof(Config) == 8 * (1 + N_FIELDS) && sizeof(Config) <= HEADER_SIZE, "one slot a field");
typedef struct { const char *name; int layer; Type type; size_t rows, columns; const void *data; } Tensor;
static const void *data_of(const Tensor *t) { return t ? t->data : NULL; }
#define MEMBER(name, type, present, rows, columns) const Tensor *name;  // NULL: not present
typedef struct { size_t window, rope; TENSORS_OF_LAYER(MEMBER) } Layer;  // window SIZE_MAX / 2: all
typedef struct {
    Config config; File file;
    size_t taken, n_tensors;  // so far: bytes of the file that belong to something, tensors found
    Tensor *tensors;          // (n_tensors), in the order of the file
    Layer *layers;            // (n_layers)
    TENSORS_FIRST(MEMBER) TENSORS_LAST(MEMBER)
} Model;

// The value of field i, which is in slot i + 1, and the same as text.
static double field(const Config *c, int i, char text[32]) {
    union { size_t count; int64_t integer; double real; } slot;
    memcpy(&slot, (const char *)c + 8 * (i + 1), 8);
    if (FIELDS[i].kind == 'c') return snprintf(text, 32, "%zu", slot.count), (double)slot.count;
    if (FIELDS[i].kind == 'i') return snprintf(text, 32, "%lld", (long long)slot.integer), (double)slot.integer;
    return snprintf(text, 32, "%.9g", slot.real), slot.real;
}

// Dies unless every field is in its range and they agree with each other; then makes room for layers and tensors.
static void check_config(Model *m) {
    const Config *c = &m->config;
    const char *path = m->file.path; char text[32];
    for (int i = 0; i < N_FIELDS; i++) {
        double value = field(c, i, text);
        if (!(value >= FIELDS[i].low && value <= FIELDS[i].high))
            die("%s: %s is %s, supported is %.10g to %.10g (export it again with this version's export.py)", path,
                FIELDS[i].name, text, FIELDS[i].low, FIELDS[i].high);
    }
    if (c->n_heads % c->n_kv_heads)
        die("%s: n_heads %zu is no multiple of n_kv_heads %zu (the file is damaged)", path, c->n_heads, c->n_kv_heads);
    if (c->rope_dim % 2 || c->rope_dim > c->head_dim)
        die("%s: rope_dim %zu is odd or above head_dim %zu (the file is damaged)", path, c->rope_dim, c->head_dim);
    if (c->norm_place & PARALLEL && (c->norm_place & 5) != 1)
        die("%s: norm_place %zu: in parallel, one norm comes before both (update run.c)", path, c->norm_place);
    long long bos = c->bos_id, n = (long long)c->vocab_size;
    if (bos >= n) die("%s: bos_id %lld is not in the vocabulary of %lld (the file is damaged)", path, bos, n);
    m->layers = allocate(c->n_layers, sizeof(Layer), "the layers");
    m->tensors = allocate(c->n_layers * (sizeof(Layer) / sizeof(Tensor *)) + 16, sizeof(Tensor), "the list of tensors");
}

// Finds the next tensor, at the next multiple of `align` bytes, and notes it in the model's list.
static const Tensor *take(Model *m, const char *name, int layer, Type type, size_t rows, size_t columns, size_t align) {
    size_t start = round_up(m->taken, align);
    m->taken = add(start, mul(mul(rows, columns), size_of(type)));
    if (m->taken > m->file.size)
        die("%s: %s ends at byte %zu of %zu (copy or export it again)", m->file.path, name, m->taken, m->file.size);
    m->tensors[m->n_tensors] = (Tensor){name, layer, type, rows, columns, m->file.data + start};
    return &m->tensors[m->n_tensors++];
}

// Dies unless the integer tables hold what is supported; the layers get theirs. A llama2.c file has no such tables.
static void check_tables(const Model *m) {
    const int32_t *eos = data_of(m->eos_ids), *w = data_of(m->layer_window), *rope = data_of(m->layer_rope);
    for (size_t l = 0; l < m->config.n_layers; l++) {
        if (w && (w[l] < 0 || rope[l] < 0 || (size_t)rope[l] > m->config.n_rope_tables))
            die("%s: layer %zu has window %d and table %d (export it again)", m->file.path, l, w[l], rope[l]);
        m->layers[l].window = w && w[l] ? (size_t)w[l] : SIZE_MAX / 2, m->layers[l].rope = w ? (size_t)rope[l] : 1;
    }
    const float *f = m->rope_freq->data;
    for (size_t i = 0; i < m->config.n_rope_tables * (m->config.rope_dim / 2); i++)
        if (!(f[i] >= 0 && f[i] < INFINITY)) die("%s: rope_freq is %g (export it again)", m->file.path, (double)f[i]);
    for (size_t i = 0, n = m->config.vocab_size; i < m->config.n_eos; i++)
        if ((size_t)eos[i] >= n) die("%s: end id %d is no id of %zu (export it again)", m->file.path, eos[i], n);
}

// Takes all tensors, in the order of the tables, or, for all layers, the one whose name `only` begins with.
static void take_tensors(Model *m, const char *only, size_t align) {
    const Config *c = &m->config;
    const size_t q_dim = c->n_heads * c->head_dim, kv_dim = c->n_kv_heads * c->head_dim;
    const Type W = c->weight_type ? BF16 : F32;
#define WANTED(name, present) ((present) && (!only || !strncmp(only, #name " ", sizeof #name)))
#define TAKE(name, type, present, rows, columns) \
    if (WANTED(name, present)) m->name = take(m, #name, OF_NO_LAYER, type, rows, columns, align);
#define TAKE_OF_LAYER(name, type, present, rows, columns) \
    if (WANTED(name, present)) m->layers[l].name = take(m, #name, (int)l, type, rows, columns, align);
    TENSORS_FIRST(TAKE)
    for (size_t l = 0; l < c->n_layers; l++) { TENSORS_OF_LAYER(TAKE_OF_LAYER) }
    TENSORS_LAST(TAKE)
}

// llama2.c's float32 files: version 0 begins with seven int32, version 1 with a magic and a header of 256 bytes. A kind
// of tensor is stored for all layers in a row; adjacent elements are rotated together; eps is 1e-5, theta 10000, BOS 1.
static void load_llama2c(Model *m) {
    static const int32_t end_ids[2] = {1, 2};
    uint32_t start[10] = {0};
    memcpy(start, m->file.data, min_size(sizeof start, m->file.size));
    bool version = start[0] == 0x616b3432;  // "ak42": 1; else 0
    uint32_t *h = start + (version ? 2 : 0);  // dim, hidden_dim, ... in the order of the initializer
    if (version && start[1] != 1)
        die("%s is llama2.c's version %u, supported are 0 and 1, float32 (export it as one)", m->file.path, start[1]);
    const char *at = version ? "attention_norm ffn_norm final_norm token_embedding wq wk wv wo w1 w2 w3 classifier "
                             : "token_embedding attention_norm wq wk wv wo ffn_norm w1 w2 w3 final_norm - classifier ";
    Config *c = &m->config;
    bool tied = version ? start[9] & 255 : h[5] <= INT_MAX;  // version 0: a negative vocab_size means untied
    if (!version && !tied) h[5] = -h[5];
    for (int i = 0; i < 7; i++)
        if (!h[i] || h[i] > INT_MAX || (i == 6 && h[0] % h[3]))
            die("%s is no checkpoint (export.py SOURCE model.bin makes one of a model)", m->file.path);
    size_t head_dim = h[0] / h[3];
    *c = (Config){.version = 1, .dim = h[0], .hidden_dim = h[1], .n_layers = h[2], .n_heads = h[3], .n_kv_heads = h[4],
        .head_dim = head_dim, .vocab_size = h[5], .seq_len = h[6], .tied = tied, .norm_place = 5, .rope_dim = head_dim,
        .rope_pairs = 1, .n_rope_tables = 1, .bos_id = 1, .n_eos = 2, .rms_norm_eps = 1e-5, .rope_theta = 1e4,
        .rope_attention_factor = 1, .rope_attention_factor_local = 1, .attention_scale = 1 / sqrt((double)head_dim),
        .embedding_scale = 1, .residual_scale = 1, .logit_scale = 1};
    check_config(m), m->taken = version ? 256 : 7 * sizeof *h;
    for (; *at; at = strchr(at, ' ') + 1)
        if (*at != '-') take_tensors(m, at, 4);
        else m->taken = add(m->taken, mul(mul(c->seq_len, head_dim), 4));  // sine and cosine tables, not needed
    float *freq = allocate(head_dim / 2, sizeof *freq, "the rotary frequencies");
    for (size_t i = 0; i < head_dim / 2; i++) {  // theta ** -(2 i / head_dim), by roots: pow() differs between machines
        double root = 1 / c->rope_theta, power = 1, left = (double)(2 * i) / (double)head_dim;
        for (; left > 0; left -= left >= 1) root = sqrt(root), left *= 2, power *= left >= 1 ? root : 1;
        freq[i] = (float)power;
    }
    static Tensor frequencies = {.name = "rope_freq"}, ends = {.name = "eos_ids", .data = end_ids};
    frequencies.data = freq, m->rope_freq = &frequencies, m->eos_ids = &ends;
}

// Maps a checkpoint and checks it: every size against the file's before anything is used.
static void load_model(Model *m, const char *path) {
    *m = (Model){.file = map_file(path)};
    const File f = m->file;
    if (f.size < 8 || memcmp(f.data, "run.c\r\n\x1a", 8)) load_llama2c(m);
    else {
        if (f.size < HEADER_SIZE) die("%s has %zu bytes, a header has %d (copy it again)", path, f.size, HEADER_SIZE);
        memcpy(&m->config, f.data, sizeof m->config), check_config(m);
        for (size_t i = sizeof m->config; i < HEADER_SIZE; i++)
            if (f.data[i]) die("%s: byte %zu of the header is %d, not 0 (update run.c)", path, i, f.data[i]);
        m->taken = HEADER_SIZE, take_tensors(m, NULL, ALIGNMENT);
        if (m->config.config_size) m->taken = add(round_up(m->taken, ALIGNMENT), m->config.config_size);
    }
    if (m->taken != f.size) die("%s has %zu bytes, its header implies %zu (copy it again)", path, f.size, m->taken);
    check_tables(m);
    if (!m->classifier) m->classifier = m->token_embedding;
}

// ---- kernels --------------------------------------------------------------------------------------------------------
// Arrays of activations (T, n) have rows of this many floats. What is behind element n stays 0, so that vectors need no
// special end; LANES more, since rows a multiple of 4096 bytes apart would fight for the same lines of the cache.
static size_t stride(size_t n) { return add(round_up(n, LANES), LANES); }

// WIDTH weights from element i on; bfloat16 is the upper half of a float32.
INLINE Vec load_weights(const void *w, size_t i, Type type) {
    if (type == F32) return load((const float *)w + i);
    const LooseShorts *halves = (const void *)((const uint16_t *)w + i);
    return (Vec)(__builtin_convertvector(*halves, Bits) << 16);
}

// Element i of a tensor of float32 or bfloat16.
static float weight(const Tensor *t, size_t i) {
    if (t->type == F32) return ((const float *)t->data)[i];
    return (Word){.bits = (uint32_t)((const uint16_t *)t->data)[i] << 16}.value;
}

// Weights are multiplied in panels (up to PANEL rows for several tokens), K_BLOCK elements at a time: sums are added.
enum { PANEL = 96, K_BLOCK = 1024, BLOCKS = 6, LONG = 16, X_BLOCK = 10752 / TILE_T };
_Static_assert(TILE_T > 2 && TILE_T <= 6 && BLOCKS >= 6 && BLOCKS * TILE_R <= PANEL, "sums in tile(); what is packed");

// out[t][r] = x[t] . w[r], or (more) += that, of T tokens (a constant) and TILE_R rows over n elements: a multiple of
// 16, up to K_BLOCK (of one token BLOCKS of these, if it fetches). A vector of x serves all rows, one of w all tokens.
// Element k of row r is w[r * row + k / 16 * step + k % 16]. Fetched meanwhile: NOTHING; the rows of the next TILE; a
// STREAM where one token takes row after row (step 16): processors fetch that by themselves, but bfloat16 8 KiB ahead.
enum Fetch { NOTHING, TILE, STREAM };
INLINE void tile(float *out, size_t out_row, bool more, const float *x, size_t x_row, const void *w, size_t row,
                 size_t step, Type type, size_t n, enum Fetch fetch, size_t T) {
    Vec acc[BLOCKS][TILE_R][PARTS];  // the sums of each token, or of each block of a single one
    step = fetch == STREAM ? LANES : step;
    const size_t side = fetch == STREAM ? 1 : TILE_R, blocks = T == 1 && fetch ? (n - 1) / K_BLOCK + 1 : 1;
    for (size_t r0 = 0; r0 < TILE_R; r0 += side)
        for (size_t i = 0; i < blocks * PARTS; i++) {
            size_t b = i / PARTS, p = i % PARTS, from = b * K_BLOCK, count = min_size(n - from, K_BLOCK);
            const char *at = (const char *)w + (r0 * row + from / LANES * step) * size_of(type);
            Vec sum[6][TILE_R], xv[6];
            UNROLL for (size_t t = 0; t < T; t++) UNROLL for (size_t r = 0; r < side; r++) sum[t][r] = (Vec){0};
            UNROLL2 for (size_t k = 0; k < count / LANES; k++) {
                UNROLL for (size_t t = 0; t < T; t++) xv[t] = load_once(x + t * x_row + from + k * LANES + p * WIDTH);
                UNROLL for (size_t r = 0; r < side; r++) {
                    Vec wv = load_weights(at, r * row + k * step + p * WIDTH, type);
                    UNROLL for (size_t t = 0; t < T; t++) sum[t][r] = multiply_add(xv[t], wv, sum[t][r]);
                }
                for (size_t r = 0; r < side && fetch == TILE; r++)
                    __builtin_prefetch(at + ((TILE_R + r) * row + k * step) * size_of(type), 0, 2);
                if (fetch == STREAM && type == BF16) __builtin_prefetch(at + k * step * size_of(type) + 8192, 0, 0);
            }
            UNROLL for (size_t t = 0; t < T; t++)
                UNROLL for (size_t r = 0; r < side; r++) acc[t + b][r0 + r][p] = sum[t][r];
        }
    for (size_t t = 0; t < T + blocks - 1; t++) {
        Quad sums = sum_lanes(acc[t]), *to = (Quad *)(out + t % T * out_row);
        *to = more || t >= T ? (Quad)(sums + *to) : sums;
    }
}

// The same for any T up to 6; one token takes `rows` rows, more take TILE_R. For bfloat16 NOTHING fetches as TILE does.
__attribute__((noinline)) static void tiles(float *out, size_t out_row, bool more, const float *x, size_t x_row,
                                            const void *w, size_t row, size_t step, Type type, size_t n,
                                            enum Fetch fetch, size_t rows, size_t T) {
#define ALL(type, fetch, T)                                                                                            \
    for (size_t r = 0; r < (T == 1 ? rows : TILE_R); r += TILE_R)                                                      \
        tile(out + r, out_row, more, x, x_row, (const char *)w + r * row * size_of(type), row, step, type, n, fetch, T)
#define CASE(T)                                                                                                        \
    case T: if (type == BF16) ALL(BF16, TILE, T); else if (fetch) ALL(F32, TILE, T); else ALL(F32, NOTHING, T); break;
    if (fetch == STREAM && type == BF16) ALL(BF16, STREAM, 1); else if (fetch == STREAM) ALL(F32, STREAM, 1);
    else switch (T) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

// How many panels w has, about as many for each thread; one's rows, *first to *last - 1: to PANEL, for one token 2 MiB.
static size_t panels(const Tensor *w, size_t T, size_t panel, size_t *first, size_t *last) {
    size_t most = T == 1 ? (2 << 20) / (w->columns * size_of(w->type)) + TILE_R : PANEL;
    size_t count = round_up((w->rows - 1) / most + 1, (size_t)omp_get_num_threads());
    size_t rows = (w->rows - 1) / count / TILE_R * TILE_R + TILE_R;
    *first = panel * rows, *last = min_size(*first + rows, w->rows);
    return (w->rows - 1) / rows + 1;
}

// Copies count elements from k on of TILE_R rows, widened: 16 of each in turn, 0 beyond the ends of w.
static void pack(float *packed, const Tensor *w, size_t first, size_t k, size_t count) {
    for (size_t i = k; i < k + count; i += LANES)
        for (size_t r = first; r < first + TILE_R; r++, packed += LANES) {
            size_t at = r * w->columns + i, left = r < w->rows ? min_size(LANES, k + count - i) : 0;
            for (size_t j = 0; j < LANES && left == LANES; j += WIDTH)
                store(packed + j, load_weights(w->data, at + j, w->type));
            for (size_t j = 0; j < LANES && left < LANES; j++) packed[j] = j < left ? weight(w, at + j) : 0;
        }
}

// Products of one x (T, columns): out (T, rows) = x w^T, plus bias (rows) if not NULL. Threads share the panels, or,
// from 64 for each on, the tokens, as their caches hold their own (3/4 of the panels; the rest helps who is slow). The
// first of these (TILE_T * X_BLOCK floats, or two tiles) go through a panel while its rows come from memory, each later
// tile finds them in the cache. Copied: rows and columns where w ends in a tile, bfloat16 that LONG tiles would widen.
typedef struct { float *out; const Tensor *w, *bias; } Product;
static void matmul(const float *x, size_t T, const Product *products, size_t n_products) {
    static _Thread_local float *packed;  // a PANEL of rows at most; the stack may be as small as this
    if (!packed && !(packed = aligned_alloc(64, 4 * PANEL * K_BLOCK))) die("no memory for 384 KiB (a smaller -j)");
    size_t threads = (size_t)omp_get_num_threads(), parts = T / 64 < threads || !spins ? 1 : threads;  // of the tokens
    size_t n = products->w->columns, n_tiles = round_up((T - 1) / TILE_T + 1, parts), total = 0;
    for (size_t i = 0, first, last; i < n_products; i++) total += panels(products[i].w, T, 0, &first, &last);
    size_t own = parts > 1 ? total * 3 / 4 : threads;  // panels of each part that are its thread's
    bool large = products->w->type == BF16 || products->w->rows * n * n_products >= 1 << 18;  // else cached, perhaps
    enum Fetch fetch = T > 1 || n > 4 * K_BLOCK ? TILE : large ? STREAM : NOTHING;
    for (size_t item, panel, here, first, last; next_item(&item, total * parts, own * parts);) {
        bool fixed = item < own * parts;  // not drawn
        size_t part = fixed ? item / own : item % parts, from = n_tiles / parts * part, end = from + n_tiles / parts;
        const Product *p = products;
        panel = fixed ? item % own : item / parts;
        for (; panel >= (here = panels(p->w, T, panel, &first, &last)); p++) panel -= here;
        const Tensor *w = p->w;
        for (size_t k = 0, count, left = n; left; k += count, left = n - k) {
            count = left < LANES ? left : min_size((T == 1 && fetch ? BLOCKS : 1) * K_BLOCK, left / LANES * LANES);
            size_t width = round_up(count, LANES), some = n_tiles < 3 ? n_tiles : min_size(end - from, X_BLOCK / width);
            for (size_t i0 = from, i1 = i0 + some; i0 < end; i0 = i1++)  // tiles [i0, i1)
                for (size_t r = first, rows; r < last; r += rows) {
                    bool copy = count < LANES || last - r < TILE_R || (w->type == BF16 && end - from >= LONG);
                    float *to = packed + (n_tiles > 1 ? (r - first) * width : 0);
                    if (copy && i0 == from) pack(to, w, r, k, count);
                    const void *at = copy ? (const char *)to : (const char *)w->data + (r * n + k) * size_of(w->type);
                    rows = T > 1 || copy ? TILE_R : (last - r) / TILE_R * TILE_R;
                    for (size_t i = i0, t = T * i / n_tiles; i < i1; t = T * ++i / n_tiles)
                        tiles(p->out + t * stride(w->rows) + r, stride(w->rows), k > 0, x + t * stride(n) + k,
                              stride(n), at, copy ? LANES : n, copy ? TILE_R * LANES : LANES, copy ? F32 : w->type,
                              width, i0 > from ? NOTHING : copy ? TILE : fetch, rows, T * (i + 1) / n_tiles - t);
                }
        }
        for (size_t t = T * from / n_tiles; p->bias && t < T * end / n_tiles; t++)
            for (size_t r = first; r < last; r++) p->out[t * stride(w->rows) + r] += weight(p->bias, r);
    }
}

// The sum over a row of x - mean, or of its square, in double and in 16 lanes.
INLINE double sum_row(const float *x, size_t n, double mean, bool square) {
    double lane[LANES] = {0}, d;
    size_t end = n / LANES * LANES;
    for (size_t i = 0; i < end; i += LANES)
        for (int j = 0; j < LANES; j++) d = (double)x[i + (size_t)j] - mean, lane[j] += square ? d * d : d;
    for (size_t i = end; i < n; i++) d = (double)x[i] - mean, lane[i - end] += square ? d * d : d;
    UNROLL for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

// The largest of a row of n, none of them NaN.
INLINE float largest_of(const float *x, size_t n) {
    float lane[LANES];
    for (size_t j = 0; j < LANES; j++) lane[j] = x[j < n ? j : 0];
    for (size_t i = LANES; i < n; i += LANES) {
        const float *more = x + min_size(i, n - LANES);  // the last 16, some of them once more
        ROLLED for (size_t j = 0; j < LANES; j++) lane[j] = more[j] > lane[j] ? more[j] : lane[j];
    }
    UNROLL for (size_t half = LANES / 2; half > 0; half /= 2)
        ROLLED for (size_t j = 0; j < half; j++) lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
    return lane[0];
}

// Normalizes a row of n in double; out may be x. RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight;
// LayerNorm (Ba et al. 2016): the same of x - mean(x), plus bias if not NULL. To weight norm_weight_add is added.
static void norm(const Config *c, float *out, const float *x, const float *weight, const float *bias, size_t n) {
    double mean = c->norm_kind ? sum_row(x, n, 0, false) / (double)n : 0, more = c->norm_weight_add;
    double scale = 1 / sqrt(sum_row(x, n, mean, true) / (double)n + c->rms_norm_eps);
    for (size_t i = 0; i < n; i++)
        out[i] = (float)(((double)x[i] - mean) * scale * (more + (double)weight[i]) + (bias ? (double)bias[i] : 0));
}

// cap tanh(x / cap), x within -cap .. cap (Gemma 2); cap 0: x. tanh to 2 ulp: x + x^3 P(x^2) below 0.8 (P is good to
// 4e-9), above 1 - 2 / (e^2x + 1). Coefficients here and for erf: minimax fits to mpmath's values (Lawson's algorithm).
INLINE float capped(float x, float cap) {
    static const float c[] = {0.00158476f, -0.00740956f, 0.02130299f, -0.05385233f, 0.13332221f, -0.33333297f};
    if (!(cap > 0)) return x;
    float a = __builtin_fabsf(x / cap), z = a * a;
    float near = __builtin_fmaf(polynomial(c, 6, z) * z, a, a), far = 1 - 2 / (fast_exp(2 * a) + 1);
    return cap * __builtin_copysignf(a < 0.8f ? near : far, x);
}

// erf(x) to 2 ulp: x + x P(x^2) below 1 (to 1e-9), above 1 - e^Q(x), Q close to ln erfc(x) (to 1e-9 of erf; 1 from 4).
INLINE float fast_erf(float x) {
    static const float p[] = {7.85388411e-5f, -8.01020109e-4f, 5.18832863e-3f, -2.68538125e-2f, 1.12835852e-1f,
                              -3.76126258e-1f, 1.28379167e-1f};
    static const float q[] = {1.85574009e-4f, -2.93960730e-3f, 2.18053183e-2f, -1.03037369e-1f, -6.38225677e-1f,
                              -1.12704004f, -3.53719502e-4f};
    float a = __builtin_fabsf(x), b = a > 4 ? 4 : a;
    float near = __builtin_fmaf(polynomial(p, 7, x * x), a, a), far = 1 - fast_exp(polynomial(q, 7, b));
    return __builtin_copysignf(a < 1 ? near : far, x);
}

// Gated linear units (Shazeer 2020): gate = activation(gate) * up, over n elements; to a few ulp (gelu and gelu_tanh of
// the larger of the result and x / 20; (1 + tanh(u)) / 2 is 1 / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)).
static void gated(size_t activation, float *gate, const float *up, size_t n) {
#define GATED(kind, f) case kind: for (size_t i = 0; i < n; i++) { float x = gate[i]; gate[i] = (f) * up[i]; } break;
    switch (activation) {
        GATED(0, x / (1 + fast_exp(-x)))                                                      // silu
        GATED(1, 0.5f * x * (1 + fast_erf(x * 0.707106781f)))                                 // gelu
        GATED(2, x / (1 + fast_exp(-1.59576912f * __builtin_fmaf(0.044715f * x * x, x, x))))  // gelu_tanh
        GATED(3, x < 0 ? 0 : x)                                                               // relu
        GATED(4, 1 / (1 + fast_exp(-x)))                                                      // sigmoid
    }
}

// ---- attention ------------------------------------------------------------------------------------------------------
enum { KV_BLOCK = 64, Q_ROWS = 48, LOGIT_ROWS = 16, KV_AHEAD = 3072 };  // positions, queries, logit rows; floats ahead
typedef struct { float largest; double sum; } Softmax;  // of some positions: largest score; sum of e^(score - largest)

// The arrays that a chunk of T <= chunk tokens passes through: ARRAY(type, name, rows, columns). Rows of activations
// have stride() floats, heads in the cache and in attention `head`: head_dim rounded up to 16.
#define ARRAYS(ARRAY)                                                                                                  \
    ARRAY(float, x, T, dim) /* the residual stream */ ARRAY(float, normed, T, dim) /* a sublayer's input */            \
    ARRAY(float, branch, T, dim) /* and output */ ARRAY(float, q, T, q_dim) ARRAY(float, k, T, kv_dim)                 \
    ARRAY(float, v, T, kv_dim) ARRAY(float, attended, T, q_dim) ARRAY(float, gate, T, hidden_dim)                      \
    ARRAY(float, up, T, hidden_dim) ARRAY(float, cosine, T, angles) ARRAY(float, sine, T, angles)                      \
    ARRAY(float, queries, rows, head) /* q_rows of each thread */ ARRAY(float, weights, rows, KV_BLOCK)                \
    ARRAY(float, part, rows, head) ARRAY(Softmax, part_sum, rows, 1) /* what a block of positions gives these */       \
    ARRAY(float, total, c->n_heads * parts, head) /* (n_kv_heads, tokens or blocks, group, head) */                    \
    ARRAY(Softmax, sum, c->n_heads, parts) ARRAY(float, logits, r->logit_rows, stride(c->vocab_size))                  \
    ARRAY(size_t, first_slot, 1, c->n_layers) /* of a layer in the cache: see cache_at() */                            \
    ARRAY(float, k_cache, 1, cache_size(r)) ARRAY(float, v_cache, 1, cache_size(r))
#define ARRAY_MEMBER(type, name, rows, columns) type *name;
// What a run needs besides the model.
typedef struct {
    const Model *model; size_t context, chunk, logit_rows;
    size_t position, start;    // tokens in the cache; of these, those before the last chunk
    size_t written;            // the most it held since it was empty
    size_t q_rows;             // of a tile of queries that share a key/value head
    float *hidden;             // (n_layers + 1, context, dim), rows of dim, or NULL
    void *block;               // that holds all of these:
    ARRAYS(ARRAY_MEMBER)
} Run;

// Slots of layer l's cache, position p in p % slots: the context, or what a chunk sees by its window; whole blocks.
static size_t slots(const Run *r, size_t l) {
    return round_up(min_size(r->model->layers[l].window + r->chunk - 1, r->context), KV_BLOCK);
}

// The cache holds a layer's blocks one after the other. A block holds, for each key/value head, values (KV_BLOCK,
// head_stride) or keys (head_stride, KV_BLOCK): scores of neighbours lie side by side.
static size_t head_stride(const Run *r) { return round_up(r->model->config.head_dim, LANES); }
static size_t cache_size(const Run *r) {
    size_t all = 0;
    for (size_t l = 0; l < r->model->config.n_layers; l++) all = add(all, slots(r, l));
    return mul(all, mul(r->model->config.n_kv_heads, head_stride(r)));
}

// Where a position's block is in layer l's keys and values, for key/value head h.
static size_t cache_at(const Run *r, size_t l, size_t h, size_t position) {
    size_t block = (r->first_slot[l] + position % slots(r, l)) / KV_BLOCK;
    return (block * r->model->config.n_kv_heads + h) * KV_BLOCK * head_stride(r);
}

// How many of the first `same` tokens may stay in the cache: all, or none if later ones took what a window needs.
static size_t keepable(const Run *r, size_t same) {
    for (size_t l = 0; l < r->model->config.n_layers; l++) {
        size_t window = r->model->layers[l].window, n = slots(r, l);
        if (r->written > n && r->written - same + window > n + 1) return 0;
    }
    return same;
}

// Sets the arrays to successive parts of a block, if there is one, each aligned to 64 bytes; returns the bytes of all.
static size_t lay_out(Run *r, char *block) {
    const Config *c = &r->model->config;
    size_t group = c->n_heads / c->n_kv_heads, T = r->chunk, blocks = r->context / KV_BLOCK + 1, end = 0;
    r->q_rows = group > Q_ROWS ? group : Q_ROWS;
    size_t head = head_stride(r), rows = mul((size_t)omp_get_max_threads(), r->q_rows), parts = T > blocks ? T : blocks;
    size_t dim = stride(c->dim), hidden_dim = stride(c->hidden_dim), q_dim = stride(mul(c->n_heads, c->head_dim));
    size_t kv_dim = stride(mul(c->n_kv_heads, c->head_dim)), angles = mul(c->n_rope_tables, c->rope_dim / 2);
#define LAY(type, name, rows, columns)                                                                                 \
    if (block) r->name = (void *)(block + end);                                                                        \
    end = round_up(add(end, mul(mul(rows, columns), sizeof(type))), 64);
    ARRAYS(LAY)
    return end;
}

// A run with an empty cache for `context` positions, n of which will be used at least, to be freed by its block.
static void new_run(Run *r, const Model *m, size_t context, size_t n, size_t chunk, size_t logit_rows) {
    *r = (Run){.model = m, .context = context, .chunk = min_size(chunk, context), .logit_rows = logit_rows};
    r->block = allocate(add(lay_out(r, NULL), 63), 1, "the cache and a chunk of tokens");
    lay_out(r, (char *)round_up((size_t)r->block, 64));
    size_t size = 2 * sizeof(float) * cache_size(r), at = round_up((size_t)r->k_cache, 4096);  // from 4 MiB a layer:
    if (size / context * n >> 22 >= m->config.n_layers) madvise((void *)at, size - 4096, MADV_HUGEPAGE);  // large pages
    for (size_t l = 1; l < m->config.n_layers; l++) r->first_slot[l] = r->first_slot[l - 1] + slots(r, l - 1);
}

// Sine and cosine, x >= 0, the same anywhere: Taylor polynomials of r = x - n pi / 2, |r| <= pi / 4; quadrant n % 4.
static void sine_cosine(double x, double *sine, double *cosine) {
    double n = floor(x * 0x1.45f306dc9c883p-1 + 0.5), s = 0, c = 0;
    double r = fma(n, -0x1.1a62633145c07p-54, fma(n, -0x1.921fb54442d18p0, x)), square = r * r;
    for (int i = 16; i > 0; i -= 2) c = (1 + c) * -square / (i * (i - 1)), s = (1 + s) * -square / (i * (i + 1));
    const double turned[] = {r + r * s, 1 + c, -(r + r * s), -(1 + c)};  // a quadrant's cosine is the next one's sine
    *sine = turned[(int)fmod(n, 4)], *cosine = turned[((int)fmod(n, 4) + 1) % 4];
}

// Rotary position embedding (Su et al. 2021) of token t's heads by a table counted from 1 (0: none): each pair (a, b)
// of the first rope_dim elements of a head is turned by its angle.
static void rope(const Run *r, float *heads, size_t t, size_t n_heads, size_t table) {
    const Config *c = &r->model->config;
    size_t half = c->rope_dim / 2, step = c->rope_pairs ? 2 : 1, apart = c->rope_pairs ? 1 : half;
    if (!table) return;
    size_t at = (t * c->n_rope_tables + table - 1) * half;
    const float *cosine = r->cosine + at, *sine = r->sine + at;
    for (size_t h = 0; h < n_heads; h++, heads += c->head_dim)
        for (size_t i = 0; i < half; i++) {
            float *a = heads + i * step, *b = a + apart, turned = *a * cosine[i] - *b * sine[i];
            *b = *b * cosine[i] + *a * sine[i], *a = turned;
        }
}

// The norm of a token's queries or keys: each head, with its own or the same weights, or all heads as one row.
static void norm_heads(const Config *c, float *heads, const Tensor *weight, size_t n_heads) {
    size_t all = n_heads * c->head_dim, n = c->qk_norm == 2 ? all : c->head_dim;
    const float *w = data_of(weight);
    for (size_t i = 0; w && i < all; i += n) norm(c, heads + i, heads + i, c->qk_norm == 1 ? w : w + i, NULL, n);
}

// Normalizes and turns q and k, caches k and v, of those of T tokens in stretch i of 16, whose keys share cache lines.
static void fill_cache(Run *r, size_t l, size_t i, size_t T) {
    const Config *c = &r->model->config;
    const Layer *w = &r->model->layers[l];
    size_t n = c->head_dim, q_row = stride(c->n_heads * n), kv_row = stride(c->n_kv_heads * n);
    size_t start = (r->position / LANES + i) * LANES, end = min_size(start + LANES, r->position + T);
    for (size_t position = start > r->position ? start : r->position; position < end; position++) {
        size_t t = position - r->position, block = cache_at(r, l, 0, position), at = position % KV_BLOCK;
        float *q = r->q + t * q_row, *k = r->k + t * kv_row, *v = r->v + t * kv_row;
        norm_heads(c, q, w->q_norm, c->n_heads), norm_heads(c, k, w->k_norm, c->n_kv_heads);
        rope(r, q, t, c->n_heads, w->rope), rope(r, k, t, c->n_kv_heads, w->rope);
        for (size_t h = 0; h < c->n_kv_heads; h++, k += n, v += n, block += KV_BLOCK * head_stride(r)) {
            memcpy(r->v_cache + block + at * head_stride(r), v, n * sizeof *v);
            for (size_t d = 0; d < n; d++) r->k_cache[block + d * KV_BLOCK + at] = k[d];
        }
    }
}

// out[q] = the sum over i < count of p[q][i] * v[i], for Q rows (a constant) of p; rows of out and v have n floats.
INLINE void weigh_tile(float *out, const float *p, size_t p_stride, const float *v, size_t n, size_t count, size_t Q) {
    for (size_t d = 0, left; d < n; d += 4 * WIDTH) {
        Vec sum[6][4], vv[4];
        UNROLL for (size_t q = 0; q < Q; q++) UNROLL for (size_t j = 0; j < 4; j++) sum[q][j] = (Vec){0};
        left = (n - d) / WIDTH - 1;  // beyond the end the last vector is taken again
        for (size_t i = 0; i < count; i++) {
            UNROLL for (size_t j = 0; j < 4; j++) vv[j] = load(v + i * n + d + min_size(j, left) * WIDTH);
            UNROLL for (size_t j = 0; j < 4; j++) __builtin_prefetch(v + i * n + d + j * WIDTH + KV_AHEAD, 0, 2);
            UNROLL for (size_t q = 0; q < Q; q++)
                UNROLL for (size_t j = 0; j < 4; j++)
                    sum[q][j] = multiply_add((Vec){0} + p[q * p_stride + i], vv[j], sum[q][j]);
        }
        UNROLL for (size_t q = 0; q < Q; q++)
            UNROLL for (size_t j = 0; j < 4; j++) store(out + q * n + d + min_size(j, left) * WIDTH, sum[q][j]);
    }
}

// The same for any number of rows.
static void weigh(float *out, const float *p, size_t p_stride, const float *v, size_t n, size_t count, size_t rows) {
#define WEIGH(Q) case Q: weigh_tile(out, p, p_stride, v, n, count, Q); break;
    for (size_t q = 0, Q; q < rows; q += Q, out += Q * n, p += Q * p_stride)
        switch (Q = min_size(rows - q, TILE_T)) { WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) WEIGH(5) WEIGH(6) }
}

// The softmax of scores [low, high) of p (rows, KV_BLOCK), scaled and capped: weights e^(score - largest), others 0.
// All rows take a step before the next step begins: while one's largest score is not known, others are worked on.
static void softmax(const Config *c, float *p, Softmax *sum, size_t rows, size_t low, size_t high) {
    float scale = (float)c->attention_scale, cap = (float)c->attention_softcap, *x = p;
    for (size_t q = 0; q < rows; q++, x += KV_BLOCK) {
        for (size_t i = 0; i < KV_BLOCK; i++) x[i] = i >= low && i < high ? x[i] * scale : -INFINITY;
        for (size_t i = low; i < high && cap > 0; i++) x[i] = capped(x[i], cap);
        float largest = sum[q].largest = largest_of(x, KV_BLOCK);
        for (size_t i = 0; i < KV_BLOCK; i++) x[i] -= largest;
    }
    for (size_t i = 0; i < rows * KV_BLOCK; i++) p[i] = fast_exp(p[i]);
    for (size_t q = 0; q < rows; q++) sum[q].sum = sum_row(p + q * KV_BLOCK, KV_BLOCK, 0, false);
}

// The first position that token t of the chunk sees.
static size_t oldest(const Run *r, size_t l, size_t t) {
    return r->position + t + 1 - min_size(r->position + t + 1, r->model->layers[l].window);
}

// Adds what a block of positions gave a query, part (n), to the total of those before (online softmax, Milakov and
// Gimelshein 2018): both fade to the larger of their largest scores.
static void merge(float *total, Softmax *s, const float *part, Softmax p, size_t n) {
    float largest = p.largest > s->largest ? p.largest : s->largest;
    float fade = fast_exp(s->largest - largest), gain = fast_exp(p.largest - largest);
    for (size_t i = 0; i < n; i++) total[i] = __builtin_fmaf(total[i], fade, part[i] * gain);
    *s = (Softmax){largest, s->sum * (double)fade + p.sum * (double)gain};
}

// One block of positions, for the queries of T tokens from t0 on that share key/value head h of layer l: the weighted v
// of those that each token sees, merged into the totals (n_kv_heads, parts, heads that share one) from row `to` on.
static void attend(Run *r, size_t l, size_t h, size_t start, size_t t0, size_t T, size_t to) {
    const Config *c = &r->model->config;
    size_t group = c->n_heads / c->n_kv_heads, n = head_stride(r), at = cache_at(r, l, h, start), step;
    size_t row = (size_t)omp_get_thread_num() * r->q_rows;
    float *weights = r->weights + row * KV_BLOCK, *part = r->part + row * n; Softmax *sum = r->part_sum + row;
    for (size_t i = 0; i < KV_AHEAD; i += LANES) __builtin_prefetch(r->v_cache + at + i, 0, 2);  // values, for soon
    weigh(weights, r->queries + row * n, c->head_dim, r->k_cache + at, KV_BLOCK, c->head_dim, T * group);  // scores
    for (size_t q = 0; q < T * group; q += step) {
        size_t end = r->position + t0 + q / group + 1, old = oldest(r, l, t0 + q / group);
        size_t high = min_size(end - min_size(end, start), KV_BLOCK), low = min_size(old - min_size(old, start), high);
        bool whole = high == KV_BLOCK && oldest(r, l, t0 + T - 1) <= start;  // this and later queries see all of it
        step = whole ? T * group - q : group;
        if (low == high) continue;  // they see none of the block
        softmax(c, weights + q * KV_BLOCK, sum + q, step, low, high);
        weigh(part + q * n, weights + q * KV_BLOCK + low, KV_BLOCK, r->v_cache + at + low * n, n, high - low, step);
        for (size_t i = q; i < q + step; i++) merge(r->total + (to + i) * n, &r->sum[to + i], part + i * n, sum[i], n);
    }
}

// Attention of T tokens at the run's position over layer l's cache: attended = softmax(scale * q . k) v for each head.
// Threads share kv heads and tiles of tokens or, for one token, blocks of the cache, which are then merged in order.
static void attention(Run *r, size_t l, size_t T) {
    const Config *c = &r->model->config;
    size_t group = c->n_heads / c->n_kv_heads, n = head_stride(r), threads = (size_t)omp_get_num_threads();
    float *q = r->queries + (size_t)omp_get_thread_num() * r->q_rows * n;  // (tokens of a tile, group, head_dim)
    size_t d = c->head_dim, q_row = stride(c->n_heads * d), len = group * d;
    size_t tile = min_size(r->q_rows / group, 1 + T * c->n_kv_heads / threads / 4);
    size_t blocks = T == 1 ? r->position / KV_BLOCK + 1 - oldest(r, l, 0) / KV_BLOCK : 1;  // that are shared out
    for (size_t i, all = (T + tile - 1) / tile * blocks * c->n_kv_heads; next_item(&i, all, T > 1 ? threads : OWN);) {
        size_t h = i % c->n_kv_heads, share = i / c->n_kv_heads, t0 = share / blocks * tile;
        size_t n_tokens = min_size(tile, T - t0), to = (h * T * blocks + t0 + share % blocks) * group;
        size_t block = oldest(r, l, t0) / KV_BLOCK + share % blocks;
        size_t last = T == 1 ? block : (r->position + t0 + n_tokens - 1) / KV_BLOCK;
        for (size_t t = 0; t < n_tokens; t++) memcpy(q + t * len, r->q + (t0 + t) * q_row + h * len, len * sizeof *q);
        memset(r->total + to * n, 0, n_tokens * group * n * sizeof *q);
        for (size_t j = to; j < to + n_tokens * group; j++) r->sum[j] = (Softmax){-INFINITY, 0};
        for (; block <= last; block++) attend(r, l, h, block * KV_BLOCK, t0, n_tokens, to);
    }
    for (size_t row; next_item(&row, c->n_heads * T, OWN);) {
        size_t t = row / c->n_heads, h = row % c->n_heads, i = (h / group * T * blocks + t) * group + h % group;
        float *out = r->attended + t * q_row + h * d, *total = r->total + i * n;
        for (size_t j = i + group; j < i + blocks * group; j += group)
            merge(total, &r->sum[i], r->total + j * n, r->sum[j], n);
        for (size_t j = 0; j < d; j++) out[j] = (float)((double)total[j] / r->sum[i].sum);
    }
}

// ---- the forward pass -----------------------------------------------------------------------------------------------
// Row t of x (T, dim): the token's embedding times embedding_scale; by each table cosine and sine of its angles.
static void embed(Run *r, size_t t, int token) {
    const Config *c = &r->model->config;
    const float *frequency = r->model->rope_freq->data, scale = (float)c->embedding_scale;
    float *x = r->x + t * stride(c->dim);
    for (size_t i = 0; i < c->dim; i++) x[i] = weight(r->model->token_embedding, (size_t)token * c->dim + i) * scale;
    for (size_t i = 0, half = c->rope_dim / 2, n = c->n_rope_tables * half; i < n; i++) {
        double factor = i < half ? c->rope_attention_factor : c->rope_attention_factor_local, sine, cosine;
        sine_cosine((double)(r->position + t) * (double)frequency[i], &sine, &cosine);
        r->cosine[t * n + i] = (float)(cosine * factor), r->sine[t * n + i] = (float)(sine * factor);
    }
}

// The input of a sublayer for token t: x through the norm before it, where there is one.
static void norm_before(Run *r, size_t t, const Tensor *weight, const Tensor *bias) {
    size_t at = t * stride(r->model->config.dim);
    if (weight) norm(&r->model->config, r->normed + at, r->x + at, weight->data, data_of(bias), r->model->config.dim);
}

// Token t's x += residual_scale * branch, through the norm after the sublayer where there is one.
static void add_branch(Run *r, size_t t, const Tensor *weight, const Tensor *bias) {
    const Config *c = &r->model->config;
    float *x = r->x + t * stride(c->dim), *b = r->branch + t * stride(c->dim), scale = (float)c->residual_scale;
    if (weight) norm(c, b, b, weight->data, data_of(bias), c->dim);
    for (size_t i = 0; i < c->dim; i++) x[i] = __builtin_fmaf(b[i], scale, x[i]);
}

// Goes on to layer l with token t: its x is hidden state l, the last one after the final norm; kept if asked for.
static void begin_layer(Run *r, size_t t, size_t l) {
    const Model *m = r->model;
    const Layer *w = l < m->config.n_layers ? &m->layers[l] : NULL;
    size_t dim = m->config.dim;
    norm_before(r, t, w ? w->attention_norm : m->final_norm, w ? w->attention_norm_bias : m->final_norm_bias);
    const float *x = (w ? r->x : r->normed) + t * stride(dim);
    if (r->hidden) memcpy(r->hidden + (l * r->context + r->position + t) * dim, x, dim * sizeof *x);
}

// Takes T tokens (at most a chunk) at the run's position through all layers: keys and values go to the cache, what
// comes out, after the final norm, stays in r->normed (T, dim). Prefill takes chunks, decoding one token. A layer:
//   x += Wo attention(rope(Wq n), rope(Wk n), Wv n), n = norm(x);  then x += W2 (act(W1 n) * (W3 n)), n = norm(x).
// The header says where norms stand, what each layer's attention sees and rotates, and by what numbers things scale.
static void forward(Run *r, const int *tokens, size_t T) {
    const Model *m = r->model;
    const Config *c = &m->config;
    atomic_store(&drawn, 0);
    #pragma omp parallel
    {
        past = 1, holder = !omp_get_thread_num();  // see next_item()
        for (size_t t; next_item(&t, T, OWN);) embed(r, t, tokens[t]), begin_layer(r, t, 0);
        for (size_t l = 0; l < c->n_layers; l++) {
            const Layer *w = &m->layers[l];
            const float *n = w->attention_norm ? r->normed : r->x;
            matmul(n, T, (Product[]){{r->q, w->wq, w->bq}, {r->k, w->wk, w->bk}, {r->v, w->wv, w->bv}}, 3);
            for (size_t i; next_item(&i, (r->position % LANES + T - 1) / LANES + 1, OWN);) fill_cache(r, l, i, T);
            attention(r, l, T);
            matmul(r->attended, T, &(Product){r->branch, w->wo, w->bo}, 1);
            for (size_t t; next_item(&t, T, OWN); norm_before(r, t, w->ffn_norm, w->ffn_norm_bias))
                add_branch(r, t, w->attention_post_norm, w->attention_post_norm_bias);
            if (!(c->norm_place & PARALLEL)) n = w->ffn_norm ? r->normed : r->x;
            matmul(n, T, (Product[]){{r->gate, w->w1, w->b1}, {r->up, w->w3, w->b3}}, 2);
            for (size_t t, row = stride(c->hidden_dim); next_item(&t, T, OWN);)
                gated(c->activation, r->gate + t * row, r->up + t * row, c->hidden_dim);
            matmul(r->gate, T, &(Product){r->branch, w->w2, w->b2}, 1);
            for (size_t t; next_item(&t, T, OWN); begin_layer(r, t, l + 1))
                add_branch(r, t, w->ffn_post_norm, w->ffn_post_norm_bias);
        }
    }
    r->written = r->position && r->written > r->position + T ? r->written : r->position + T;
    r->start = r->position, r->position += T;
}

// Logits (n, vocab_size) of n positions from `at` on, of those that forward() took last; dies at NaN and +infinity.
static const float *logits_of(Run *r, size_t at, size_t n) {
    const Config *c = &r->model->config;
    const Product p = {r->logits, r->model->classifier, r->model->classifier_bias};
    atomic_store(&drawn, 0);
    #pragma omp parallel
    past = 1, holder = !omp_get_thread_num(), matmul(r->normed + (at - r->start) * stride(c->dim), n, &p, 1);
    float *x = r->logits, cap = (float)c->logit_softcap;
    for (size_t i = 0, n_ids = c->vocab_size, bad = 0, id; i < n; i++, x += stride(n_ids)) {
        for (id = 0; id < n_ids && (c->logit_scale != 1 || cap > 0); id++)
            x[id] = capped((float)((double)x[id] * c->logit_scale), cap);
        for (id = 0; id < n_ids; id++) bad += x[id] < INFINITY ? 0 : 1;
        for (id = 0; bad && x[id] < INFINITY;) id++;
        if (bad) die("logit %zu at position %zu is %g (see -m check)", id, at + i, (double)x[id]);
    }
    return r->logits;
}

// ---- the tokenizer --------------------------------------------------------------------------------------------------
// Bytes to ids and back. Nothing here knows Unicode or a model: tokenizer.bin holds tables and small programs that
// export.py makes from the model's tokenizer.json. The file, version 3: the first fields of Tokenizer, its sections.
#define NONE UINT32_MAX  // in place of an id
#define AS(type, buffer) ((type *)(void *)(buffer).data)
enum { IDS, EDGES, MAP, RANGES, CODE, STEPS, POST, TURNS, ENDS, DATA, N_SECTIONS };
enum { OP_REPEAT, OP_GO, OP_SUB, OP_MATCH, N_OPS, LOOK_AHEAD = 0, LOOK_BEHIND, ATOMIC };  // the last three: b of OP_SUB
enum { STEP_ADDED, STEP_SPLIT, STEP_NORMALIZE, STEP_MERGE, N_STEPS };
enum { CUT = 1, REPLACE = 16, AT_START = 64, AT_TEXT = 128, SORT = 1, COMPOSE, AS_BYTES = 1, FUSE };  // bits of steps
enum { SPECIAL = 1, LSTRIP = 2, RSTRIP = 4, SINGLE_WORD = 8, CONTROL = 16, ALONE = 32, RESTART = 64 };  // an id's

// Rows. In a range of EDGES or MAP keys ascend. EDGES: tries over code points, value an id or NONE; a left id's pairs,
// key the right one, value the merged one. MAP: texts, a value a row; what keys become; what two keys compose to.
typedef struct { uint32_t begin, end; } Range;
typedef struct { uint32_t begin, end, flags; Range pairs; } Id;  // of DATA; ALONE: in no pair; RESTART: decode anew
typedef struct { uint32_t key, value; union { Range next; uint32_t rank; }; } Edge;  // the lowest rank merges first
typedef struct { uint32_t first, bits[2], ccc; } Classes;        // up to the next row's first; combining class
typedef struct { uint32_t kind, go, class, a, b; } Op;           // of the programs of patterns, see match()
typedef struct { uint32_t kind, pc, class, bits; Range map, edges; } Step;    // done to every text, in turn
typedef struct { uint32_t begin, end, end_if_empty, pc, class, bits; } Part;  // of the chat format, see render()
// Columns of uint32, for the loader's checks: i id, n id or NONE, u code point, k class, p row of CODE, o kind of op,
// s kind of step; d, e, m where a range of DATA, EDGES, MAP ends that begins in the column before; . any.
static const char *const columns[N_SECTIONS] = {
    [IDS] = ".d..e", [EDGES] = ".n.e", [MAP] = ".u.m", [RANGES] = "u...", [CODE] = "opk..", [STEPS] = "spk..m.e",
    [POST] = "i", [TURNS] = ".mmpk.", [ENDS] = "i", [DATA] = ""};

typedef struct {
    unsigned char magic[8];                  // "run.t\r\n\x1a"
    uint64_t hash;                           // fingerprint of the vocabulary, 0: unknown
    uint32_t version, n_before, strip, unk;  // strip: how many spaces decoding drops in front; NONE: the first token's
    uint32_t word_class, space_class;        // \w and \s of added tokens
    Range compose;                           // of MAP: first code points of pairs, each with its second ones
    uint32_t bytes[256];                     // ids or NONE: what a character without a symbol becomes, byte by byte
    uint32_t n[N_SECTIONS];                  // rows; of IDS that is the number of ids
    const char *path;                        // from here on not in the file
    union { const void *at[N_SECTIONS]; struct {  // post: ids around a text, n_before in front; ends: of a reply
        const Id *ids; const Edge *edges, *map; const Classes *ranges; const Op *code; const Step *steps;
        const uint32_t *post; const Part *turns; const uint32_t *ends; const unsigned char *data;
    }; };
    uint16_t range[0x110100];                // row of RANGES of each code point
    uint32_t symbol[0x110100];               // 1 + id of the symbol that it is when merging begins, 0: none
} Tokenizer;

// A code point, or 0x110000 + a byte that begins no character; content: of a chat, where CONTROL tokens are plain text.
typedef struct { uint32_t c : 31, content : 1; } Char;
typedef struct { const Char *s; size_t size; } Stretch;  // of a text, or what became of it
typedef struct { uint32_t pc; size_t least, i; } Choice;  // go on at pc from i, then from i - 1, ..., least
typedef struct { uint32_t id, span, merged; } Symbol;  // made of `span` symbols; what it makes with the next
typedef struct {
    const Tokenizer *t; const Char *text;
    uint64_t budget;  // steps of patterns and characters that may still be spent: 10,000,000 and 2,000 a character
    int depth; Buffer choices, symbols, ranks, ids;
} Encoder;

// How many bytes a character has that begins with this byte, 0: none does; how many spell a Char's c.
static size_t utf8_length(int c) { return c < 0x80 ? 1 : c < 0xC2 || c > 0xF4 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4; }
static size_t utf8_size(uint32_t c) { return c < 0x80 || c >= 0x110000 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }
static Stretch all_of(Buffer b) { return (Stretch){AS(Char, b), b.size / sizeof(Char)}; }

// Appends the characters of a text in UTF-8. Dies at a byte that begins none and has no token.
static void append_utf8(const Tokenizer *t, Buffer *b, Buffer text, bool content) {
    for (size_t i = 0, k; i < text.size; i += k) {
        const unsigned char *s = text.data + i;
        size_t length = utf8_length(*s), room = text.size - i;
        uint32_t c = length > 1 ? *s & (0x7Fu >> length) : *s;
        for (k = 1; k < length && k < room && (s[k] & 0xC0) == 0x80; k++) c = c << 6 | (s[k] & 0x3F);
        if (k != length || (c >= 0xD800 && c <= 0xDFFF) || utf8_size(c) != length) c = 0x110000u + *s, k = 1;
        if (c >= 0x110000 && t->bytes[*s] == NONE)
            die("byte %zu of the text, %02X, is not UTF-8 and no token of %s (mend it)", i, *s, t->path);
        append(b, &(Char){c & 0x1FFFFF, content}, sizeof(Char));
    }
}

// The row with this key in a range of EDGES or MAP, or NULL.
static const Edge *find(const Edge *row, Range range, uint32_t key) {
    size_t n = range.begin < range.end ? range.end - range.begin : 0;
    row += range.begin;
    for (size_t half; n > 1; n -= half) half = n / 2, row += row[half].key <= key ? half : 0;
    return n && row->key == key ? row : NULL;
}

// A character's combining class. Whether x has an i-th character (none before the first), of class k.
static uint32_t ccc(const Encoder *e, Char x) { return e->t->ranges[e->t->range[x.c]].ccc; }
static bool of_class(const Encoder *e, const Stretch *x, size_t i, uint32_t k) {
    return i < x->size && e->t->ranges[e->t->range[x->s[i].c]].bits[k / 32] >> k % 32 & 1;
}

// Dies when a text has cost more than its budget: no pattern can take for ever.
static void spend(Encoder *e, size_t n) {
    if (e->budget < n) die("tokenizer %s takes too long on this text (split the text)", e->t->path);
    e->budget -= n;
}

// Appends the code points of a range of MAP.
static void append_mapped(Encoder *e, Buffer *b, Range range, bool content) {
    for (size_t k = range.begin; k < range.end; k++, spend(e, 1))
        append(b, &(Char){e->t->map[k].value & 0x1FFFFF, content}, sizeof(Char));
}

// Patterns: runs the program at pc from character i on, backtracking. Where the match ends, or SIZE_MAX.
static size_t match(Encoder *e, const Stretch *x, uint32_t pc, size_t i) {
    size_t base = e->choices.size;
    if (e->depth++ == 32) die("tokenizer %s has a pattern nested too deeply (export it again)", e->t->path);
    for (bool good = true;; good = true) {
        const Op *op = e->t->code + pc++;
        size_t count = 0, a = op->a, b = op->b;
        if (op->kind == OP_MATCH) break;
        if (op->kind == OP_REPEAT) {  // a to b characters of the class: as many as there are, then fewer
            while (count < b && of_class(e, x, i + count, op->class)) count++;
            if (count > a) append(&e->choices, &(Choice){pc, i + a, i + count - 1}, sizeof(Choice));
            i += count, good = count >= a;
        } else if (op->kind == OP_GO) {  // on with the next row, then there; a: the other way; a and b: there only
            if (!b) append(&e->choices, &(Choice){a ? pc : op->go, i, i}, sizeof(Choice));
            if (a) pc = op->go;
        } else {  // OP_SUB: what follows, by itself, then on there; a: if it does not
            size_t stop = match(e, x, pc, i - (b == LOOK_BEHIND));
            pc = op->go, good = (stop == SIZE_MAX) == a;
            if (b == ATOMIC) i = stop;
        }
        spend(e, e->choices.size - base > 4 * sizeof(Choice) * (x->size + 64) ? SIZE_MAX : count + 1);
        if (good) continue;
        if (e->choices.size == base) { i = SIZE_MAX; break; }
        Choice *next = AS(Choice, e->choices) + e->choices.size / sizeof *next - 1;
        pc = next->pc, i = next->i;
        if (next->i-- == next->least) e->choices.size -= sizeof *next;
    }
    return e->choices.size = base, e->depth--, i;
}

static void run_step(Encoder *e, const Step *step, Stretch x);  // takes x through this step and those after it
// STEP_ADDED: tokens of the trie in EDGES become ids, leftmost-longest.
static void split_added(Encoder *e, const Step *step, const Stretch *x) {
    for (size_t i = 0, end = 1, done = 0; i <= x->size; i = end++) {
        const Edge *edge, *token = NULL;
        Range go = step->edges;
        for (size_t j = i, content = 0; j < x->size && (edge = find(e->t->edges, go, x->s[j].c)); go = edge->next) {
            content |= x->s[j++].content, spend(e, 1);
            if (edge->value != NONE && !(content && e->t->ids[edge->value].flags & CONTROL)) token = edge, end = j;
        }
        if (!token && i < x->size) continue;
        uint32_t flags = token ? e->t->ids[token->value].flags : 0, word = e->t->word_class, space = e->t->space_class;
        if (flags & SINGLE_WORD && (of_class(e, x, i - 1, word) || of_class(e, x, end, word))) continue;
        size_t start = flags & LSTRIP && i < done ? done : i;
        while (flags & LSTRIP && start > done && of_class(e, x, start - 1, space)) start--;
        if (done < start) run_step(e, step + 1, (Stretch){x->s + done, start - done});
        for (done = end; flags & RSTRIP && of_class(e, x, done, space);) done++;
        if (token && start < done) append(&e->ids, &token->value, 4);  // not in spaces that the one before took
    }
}

// STEP_SPLIT: matches of the program (kind 1; an empty one does not touch the one before) and what lies between (kind
// 0). A new piece begins where CUT << 2 x (kind before) + kind is set; a kind with REPLACE << kind becomes the text in
// MAP. AT_START: a match can only be at the start, AT_TEXT: of the whole text.
static void split(Encoder *e, const Step *step, const Stretch *x) {
    Buffer piece = {0};
    size_t part[3] = {0}, tries = step->bits & AT_START ? 1 : step->bits & AT_TEXT ? x->s == e->text : x->size + 1;
    for (size_t kind, content, last = 2, stop = 0, more = 1; more;) {
        size_t i = part[0] = part[2];
        while (i < tries && ((stop = match(e, x, step->pc, i)) == SIZE_MAX || (stop == part[0] && last < 2))) i++;
        more = i < tries, part[1] = more ? i : x->size, part[2] = more ? stop : x->size;
        for (kind = part[0] == part[1]; kind < 1 + more; last = kind++) {
            if (last < 2 && step->bits >> (2 * last + kind) & CUT) run_step(e, step + 1, all_of(piece)), piece.size = 0;
            for (i = part[kind], content = 0; i < part[kind + 1]; i++) content |= x->s[i].content;
            if (step->bits >> kind & REPLACE) append_mapped(e, &piece, step->map, content);
            else append(&piece, x->s + part[kind], (part[kind + 1] - part[kind]) * sizeof *x->s);
        }
    }
    run_step(e, step + 1, all_of(piece)), free(piece.data);
}

// STEP_NORMALIZE: keys in MAP become their texts; SORT: then marks are sorted by their classes; COMPOSE: each joins
// the last starter unless one of its class or above stands between. Nothing, without a character of the class.
static void normalize(Encoder *e, const Step *step, const Stretch *x) {
    const Edge *row;
    Buffer out = {0};
    size_t i = 0, n = 0, starter = SIZE_MAX;
    while (i < x->size && !of_class(e, x, i, step->class)) i++;
    for (i = i < x->size ? 0 : i; i < x->size; i++)
        if ((row = find(e->t->map, step->map, x->s[i].c))) append_mapped(e, &out, row->next, x->s[i].content);
        else append(&out, x->s + i, sizeof *x->s);
    Char *m = AS(Char, out), swapped;
    for (i = 0; i < out.size / sizeof *m && step->bits & SORT; i++, spend(e, 1))
        for (size_t k = i; k && ccc(e, m[k]) && ccc(e, m[k - 1]) > ccc(e, m[k]); k--, spend(e, 1))
            swapped = m[k], m[k] = m[k - 1], m[k - 1] = swapped;
    for (i = 0; i < out.size / sizeof *m; i++) {
        bool open = step->bits & COMPOSE && starter < n && (starter == n - 1 || ccc(e, m[n - 1]) < ccc(e, m[i]));
        if (open && (row = find(e->t->map, e->t->compose, m[starter].c)) && (row = find(e->t->map, row->next, m[i].c)))
            m[starter] = (Char){row->value & 0x1FFFFF, m[starter].content | m[i].content};
        else starter = ccc(e, m[i]) ? starter : n, m[n++] = m[i];
    }
    run_step(e, step + 1, n ? (Stretch){m, n} : *x), free(out.data);
}

// Puts what symbol i of n makes with the next one into a tree of minima, at n + i: its rank and, in the lower bits, i;
// UINT64_MAX: nothing. At k is the lesser of what is at 2 k and at 2 k + 1, so that the least of all is at 1.
INLINE void rate_pair(Encoder *e, size_t n, size_t i) {
    Symbol *s = AS(Symbol, e->symbols) + i;
    uint64_t *tree = AS(uint64_t, e->ranks), least = UINT64_MAX;
    const Edge *pair = NULL;
    if (s->id != NONE && i + s->span < n) pair = find(e->t->edges, e->t->ids[s->id].pairs, s[s->span].id);
    if (pair && pair->value != NONE) least = (uint64_t)pair->rank << 32 | i, s->merged = pair->value;
    for (size_t k = n + i; tree[k] = least, k > 1; k /= 2)
        if (tree[k / 2] == (least = tree[k] < tree[k ^ 1] ? tree[k] : tree[k ^ 1])) break;
}

// BPE in O(n log n): the neighbours of lowest rank merge first, the leftmost of these. Spans are kept at both ends.
static void merge_symbols(Encoder *e) {
    size_t n = e->symbols.size / sizeof(Symbol);
    Symbol *m = AS(Symbol, e->symbols);
    while (e->ranks.size < 16 * n) append(&e->ranks, &(uint64_t){UINT64_MAX}, 8);  // as all are again in the end
    for (size_t i = 0; i < n; i++) rate_pair(e, n, i);
    for (const uint64_t *tree = AS(uint64_t, e->ranks); n && tree[1] != UINT64_MAX;) {
        uint32_t i = (uint32_t)tree[1], next = i + m[i].span, span = m[i].span + m[next].span;
        m[i].id = m[i].merged, m[next].id = NONE, m[i].span = m[i + span - 1].span = span;
        rate_pair(e, n, next), rate_pair(e, n, i);
        if (i) rate_pair(e, n, i - m[i - 1].span);
    }
    for (size_t i = 0; i < n; i += m[i].span) append(&e->ids, &m[i].id, sizeof m[i].id);
    e->symbols.size = 0;
}

// STEP_MERGE: a piece that the trie in EDGES has as a whole is one id, others begin as their characters' symbols, or
// byte tokens, or unk, or nothing, and merge up to each that is ALONE. FUSE: unks in a row are one.
static void bpe(Encoder *e, const Step *step, const Stretch *x) {
    const Edge *edge = NULL;
    bool bytes = step->bits & AS_BYTES, fuse = step->bits & FUSE, unknown = false;  // the symbol before is unk
    for (size_t i = 0; i < x->size && (edge = find(e->t->edges, i ? edge->next : step->edges, x->s[i].c));) i++;
    if (edge && edge->value != NONE) { append(&e->ids, &edge->value, sizeof edge->value); return; }
    for (size_t i = 0, n, k; i < x->size; i++) {
        uint32_t c = x->s[i].c, symbol = e->t->symbol[c], ids[4] = {symbol - 1};
        for (n = k = symbol ? 0 : utf8_size(c); k--; c >>= 6)  // without a symbol, n bytes that spell it
            ids[k] = e->t->bytes[(unsigned char)(k ? 0x80 | (c & 0x3F) : n > 1 ? 0xF0u << (4 - n) | c : c)];
        for (k = 0; k < n && !bytes; k++) if (ids[k] == NONE) n = 0, ids[0] = NONE;
        for (k = 0; k == 0 || k < n; k++) {
            uint32_t id = ids[k];
            if (id == NONE && (e->t->unk == NONE || (unknown && fuse))) continue;
            bool overtakes = unknown && n && !bytes;  // as byte tokens do with an unk in `tokenizers`
            if (overtakes) AS(Symbol, e->symbols)[e->symbols.size / sizeof(Symbol) - 1].id = id;
            if ((unknown = overtakes || id == NONE)) id = e->t->unk;
            if (!unknown && e->t->ids[id].flags & ALONE) merge_symbols(e), append(&e->ids, &id, sizeof id);
            else append(&e->symbols, &(Symbol){id, 1, 0}, sizeof(Symbol));
        }
    }
    merge_symbols(e);
}

static void run_step(Encoder *e, const Step *step, Stretch x) {
    static void (*const kinds[])(Encoder *, const Step *, const Stretch *) = {split_added, split, normalize, bpe};
    spend(e, x.size < NONE / 8 ? x.size : SIZE_MAX);
    if (x.size) kinds[step->kind](e, step, &x);
}

// The ids, to be freed, of a text of Char, which is freed; if it is alone, with those that belong around a text.
static int *encode(const Tokenizer *t, Buffer text, bool alone, size_t *n) {
    Encoder e = {.t = t, .text = AS(Char, text), .budget = 10000000 + 2000 * (text.size / sizeof(Char))};
    if (alone) append(&e.ids, t->post, t->n_before * sizeof(uint32_t));
    run_step(&e, t->steps, all_of(text));
    if (alone) append(&e.ids, t->post + t->n_before, (t->n[POST] - t->n_before) * sizeof(uint32_t));
    free(text.data), free(e.choices.data), free(e.symbols.data), free(e.ranks.data);
    return *n = e.ids.size / sizeof(int), AS(int, e.ids);
}

// Begins as {0}. held: the first bytes of a character whose others are yet to come; stripped: spaces; NONE: no more.
typedef struct { unsigned char held[4]; uint32_t n_held, stripped; } Decoder;
static void decode_end(Decoder *d, Buffer *out) { append(out, d->held, d->n_held), d->n_held = 0; }

// Appends what an id adds to the text; of a character that is not complete, nothing yet.
static void decode(const Tokenizer *t, Decoder *d, int id, bool show_special, Buffer *out) {
    if (id < 0 || (size_t)id >= t->n[IDS]) return;
    const Id *row = &t->ids[id];
    for (uint32_t i = row->begin; i < row->end && (show_special || !(row->flags & SPECIAL)); i++) {
        bool drop = t->data[i] == ' ' && d->stripped < t->strip;
        d->stripped = (t->strip == NONE ? i + 1 == row->end : !drop) ? NONE : d->stripped + drop;
        if (drop) continue;
        if ((t->data[i] & 0xC0) != 0x80) decode_end(d, out);
        d->held[d->n_held++] = t->data[i];
        if (d->n_held >= utf8_length(d->held[0])) decode_end(d, out);
    }
    if (row->flags & RESTART) decode_end(d, out), *d = (Decoder){0};
}

// Dies unless what a tokenizer's file holds is good.
static void require(const Tokenizer *t, bool good, const char *what) {
    if (!good) die("tokenizer %s has a bad %s (it is damaged or of another version: export it again)", t->path, what);
}

// Checks the numbers in n rows of these columns, and that ranges of EDGES follow each other and have keys that ascend.
static void check_rows(const Tokenizer *t, const char *kinds, const uint32_t *at, size_t n) {
    const size_t limits[128] = {
        ['.'] = SIZE_MAX, ['i'] = t->n[IDS], ['n'] = t->n[IDS] + 1ul, ['u'] = 0x110100, ['k'] = 64, ['p'] = t->n[CODE],
        ['o'] = N_OPS, ['s'] = N_STEPS, ['d'] = t->n[DATA] + 1ul, ['e'] = t->n[EDGES] + 1ul, ['m'] = t->n[MAP] + 1ul};
    for (size_t c = 0, width = strlen(kinds); c < width; c++)
        for (size_t i = c, done = 0, limit = limits[(int)kinds[c]]; i < n * width; i += width) {
            require(t, at[i] + (kinds[c] == 'n') < limit, "number in a section");  // NONE + 1 is 0
            for (size_t k = at[i - (kinds[c] == 'e')], begin = k; k < at[i]; done = ++k)
                require(t, k >= done && (k == begin || t->edges[k - 1].key < t->edges[k].key), "order of keys");
        }
}

typedef struct { unsigned char *s; uint32_t n, id, rank; } Piece;  // of llama2.c's file; rank falls as the score rises
static int compare_pieces(const void *a, const void *b) {
    const Piece *x = a, *y = b;
    int order = memcmp(x->s, y->s, min_size(x->n, y->n));
    return order ? order : (x->n > y->n) - (x->n < y->n);
}
static int compare_keys(const void *a, const void *b) { const uint32_t *x = a, *y = b; return (*x > *y) - (*x < *y); }

// Reads llama2.c's tokenizer.bin: int32 longest, then for each id float32 score, no NaN, int32 length, bytes. 0 is unk,
// 1 BOS, 2 EOS, then 256 bytes follow. A space precedes a text; two pieces that make a third merge, best score first.
static void load_llama2c_tokenizer(Tokenizer *t, File f) {
    static const struct { Classes none; Op match; Edge space; Step steps[2]; uint32_t bos; } rows = {
        .match.kind = OP_MATCH, .space.value = ' ', .bos = 1,  // steps: a space in front, then BPE
        .steps = {{.kind = STEP_SPLIT, .bits = AT_START | REPLACE << 1, .map = {0, 1}}, {.kind = STEP_MERGE}}};
    Buffer data = {0}, ids = {0}, edges = {0}, pieces = {0}, chars = {0};
    uint32_t size = (uint32_t)f.size, longest = NONE, n, score;  // bits of a float; those of -0 and 0 make one rank
    memcpy(&longest, f.data, min_size(f.size, 4));
    require(t, f.size < NONE / 2 && longest <= 512, "size or longest piece, if it is a tokenizer");
    append(&data, f.data, f.size), append(&edges, &rows.space, sizeof(Edge));  // one more row, so that there is one
    for (uint32_t b = 0; b < 256; b++) append(&data, &b, 1), t->bytes[b] = b + 3;
    for (uint32_t at = 4, id = 0; at < size; at += n, t->n[IDS] = ++id) {
        memcpy(&score, data.data + at, 4), memcpy(&n, data.data + at + 4, 4), at += 8;
        require(t, n <= longest && at + n <= size && score << 1 <= 0xFFu << 24, "piece, if it is a tokenizer");
        append(&pieces, &(Piece){data.data + at, n, id, score >> 31 ? score - 1 : score ^ INT32_MAX}, sizeof(Piece));
        uint32_t byte = id - 3, from = byte < 256 ? size + byte : at, end = byte < 256 ? from + 1 : at + n;
        append(&ids, &(Id){from, end, ALONE | (id == 1) * RESTART | (id == 1 || id == 2) * SPECIAL, {0}}, sizeof(Id));
    }
    require(t, t->n[IDS] >= 259, "number of pieces, if it is a tokenizer");
    Piece *first = AS(Piece, pieces), *last = first;
    qsort(first, t->n[IDS], sizeof *first, compare_pieces);
    for (Piece *p = first; p < first + t->n[IDS]; p++)  // of equal ones the lowest id
        if (compare_pieces(last, p)) *++last = *p; else if (p->id < last->id) *last = *p;
    for (const Piece *p = first, *right; p <= last; p++) {
        Id *left = AS(Id, ids) + p->id;
        chars.size = 0, append_utf8(t, &chars, (Buffer){p->s, p->n, 0}, false);
        if (chars.size == sizeof(Char)) t->symbol[AS(Char, chars)->c] = p->id + 1;
        left->pairs.begin = left->pairs.end = (uint32_t)(edges.size / sizeof(Edge));
        for (const Piece *q = p + 1; p->n && q <= last && q->n > p->n && !memcmp(q->s, p->s, p->n); q++) {
            Piece rest = {.s = q->s + p->n, .n = q->n - p->n};
            if (!(right = bsearch(&rest, first, (size_t)(last - first) + 1, sizeof rest, compare_pieces))) continue;
            append(&edges, &(Edge){right->id, q->id, {{q->rank, 0}}}, sizeof(Edge)), left->pairs.end++;
            left->flags &= ~0u ^ ALONE, AS(Id, ids)[right->id].flags &= ~0u ^ ALONE;
        }
        qsort(AS(Edge, edges) + left->pairs.begin, left->pairs.end - left->pairs.begin, sizeof(Edge), compare_keys);
    }
    t->ids = AS(Id, ids), t->edges = AS(Edge, edges), t->map = &rows.space, t->ranges = &rows.none;
    t->code = &rows.match, t->steps = rows.steps, t->post = &rows.bos, t->data = data.data;
    t->strip = t->n_before = t->n[POST] = 1, free(pieces.data), free(chars.data);
}

// Points `at`, of a tokenizer that is all 0, into the file and checks every number in it.
static void read_tokenizer(Tokenizer *t, const char *path) {
    File f = map_file(t->path = path);
    size_t at = offsetof(Tokenizer, path);
    if (f.size < at || memcmp(f.data, "run.t\r\n\x1a", 8)) { load_llama2c_tokenizer(t, f); return; }
    memcpy(t, f.data, at), require(t, t->version == 3, "version");
    for (int k = 0; k < N_SECTIONS; at += t->n[k] * (k == DATA ? 1 : 4 * strlen(columns[k])), k++)
        t->at[k] = f.data + at;
    require(t, at == f.size && t->n[IDS] - 1 < INT_MAX && t->n_before <= t->n[POST], "size");
    for (int k = 0; k < N_SECTIONS; k++) check_rows(t, columns[k], t->at[k], t->n[k]);
    check_rows(t, "nkk.m", &t->unk, 1), check_rows(t, "n", t->bytes, 256);
    require(t, t->n[RANGES] - 1 < 65536 && !t->ranges->first, "character class");
    require(t, t->n[CODE] && t->code[t->n[CODE] - 1].kind == OP_MATCH, "pattern");
    require(t, t->n[STEPS] - 1 < 64 && t->steps[t->n[STEPS] - 1].kind == STEP_MERGE, "last step");
    for (size_t i = 0, c = 0; c < 0x110100; t->range[c++] = (uint16_t)i)
        if (i + 1 < t->n[RANGES] && c == t->ranges[i + 1].first) i++;
    const Step *merge = t->steps + t->n[STEPS] - 1;
    for (size_t k = merge->edges.begin; k < merge->edges.end && !(merge->bits & AS_BYTES); k++)
        if (t->edges[k].key < 0x110100) t->symbol[t->edges[k].key] = t->edges[k].value + 1;
}

// ---- the chat format ------------------------------------------------------------------------------------------------
// The model's template, taken apart. TURNS has 8 blocks of 4 rows; a turn takes number 4 (if there is a system prompt)
// + 2 (if it is a later turn) + 1 (if its reply is awaited). Rows 0 to 2 are for system prompt, message and reply: the
// text in front; what the content loses, by a program at its start, by a class at its end. Row 3 cuts a reply that its
// program matches; if awaited, it names messages to be refused.
enum { SHOWN = 1, EMPTY_IS_NONE = 2 };  // the content follows; an empty system prompt is none

// The ids of n messages, users' and replies in turn, up to where the next reply begins.
static int *render(const Tokenizer *t, const char *system, const Buffer *messages, size_t n, size_t *n_ids) {
    Encoder e = {.t = t, .budget = 10000000};
    Buffer text = {0}, chars = {0}, given = {(unsigned char *)system, system ? strlen(system) : 0, 0};
    for (size_t i = 0; i / 3 * 2 < n; i++, chars.size = 0) {
        size_t k = i / 3 * 2, part = i % 3, block = (system ? 4ul : 0) + (k > 0 ? 2ul : 0) + (k + 1 == n);
        const Part *row = t->turns + 4 * block + part, *cut = part == 2 ? row + 1 : row;
        const Buffer said = part == 0 ? given : k + part <= n ? messages[k + part - 1] : (Buffer){0};
        if (row->bits & SHOWN || i == 0) append_utf8(t, &chars, said, true);
        Stretch x = all_of(chars);  // then without what the template leaves out
        e.budget += 2000 * (uint64_t)x.size;
        size_t start = match(&e, &x, cut->pc, 0);
        if (start == SIZE_MAX) start = match(&e, &x, row->pc, 0), cut = row;
        while (x.size > start && of_class(&e, &x, x.size - 1, cut->class)) x.size--;
        if (start && start <= x.size) x.s += start, x.size -= start;
        if (i == 0 && system && row->bits & EMPTY_IS_NONE && !x.size) system = NULL, row -= 4 * 4;
        if (!(row->bits & SHOWN)) x.size = 0;
        if (part == 1 && k + 1 == n && match(&e, &x, row[2].pc, 0) != SIZE_MAX)
            die("\"%.*s...\" is no user's message (begin otherwise)", (int)min_size(said.size, 15), said.data);
        append_mapped(&e, &text, (Range){row->begin, x.size ? row->end : row->end_if_empty}, false);
        append(&text, x.s, x.size * sizeof *x.s);
    }
    int *ids = encode(t, text, false, n_ids);
    if (!*n_ids) die("the conversation has no tokens (say something)");
    return free(chars.data), free(e.choices.data), ids;
}

// ---- the sampler ----------------------------------------------------------------------------------------------------
typedef struct { float logit, weight; int id; } Candidate;  // weight: proportional to the probability
typedef struct {
    double temperature, top_k, top_p, min_p, penalty;  // temperature 0: greedy, top_k 0: off
    uint64_t state;                                    // of the generator; begins as the seed
    Candidate *candidates; float *scores;              // (vocab_size); (2, vocab_size), logits; weights, 0: removed
} Sampler;

// The next number in [0, 1), uniform in steps of 2^-24, from SplitMix64 (Steele, Lea and Flood 2014). Any seed will do.
static float uniform(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (float)((z ^ z >> 31) >> 40) * 0x1p-24f;
}

static bool better(Candidate a, Candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }
static void swap(Candidate *a, Candidate *b) { Candidate c = *a; *a = *b, *b = c; }

// Moves the best of n candidates to the front, their worst last: the fewest whose weights add up to goal, at least one.
// Returns how many. A quickselect: only the side of a pivot on which the goal is reached is looked at again.
static size_t keep_best(Candidate *c, size_t n, double goal) {
    size_t low = 0, high = n;  // those before low are kept, their weight is taken off goal
    for (goal = fmax(goal, DBL_MIN); low < high && goal > 0;) {
        size_t split = low; double sum = 0;  // of the weights from low to split
        for (size_t i = 0; i < 8; i++) {     // a pivot: the best of 8 from here and there, as few are kept as a rule
            Candidate *at = &c[low + ((high + i) * 0x9e3779b97f4a7c15u >> 32) % (high - low)];
            if (i == 0 || better(*at, c[high - 1])) swap(at, &c[high - 1]);
        }
        for (size_t i = low; i + 1 < high; i++)
            if (better(c[i], c[high - 1])) sum += (double)c[i].weight, swap(&c[i], &c[split++]);
        swap(&c[split], &c[high - 1]);
        if (sum >= goal) high = split; else goal -= sum + (double)c[split].weight, low = split + 1;
    }
    return low;
}

// Picks the id that follows n ids from its logits (vocab_size). A tie goes to the lower id.
static int sample(Sampler *s, const float *logits, size_t vocab_size, const int *ids, size_t n) {
    Candidate *c = s->candidates, last = {-INFINITY, 0, INT_MAX};  // the worst that is kept
    float *x = memcpy(s->scores, logits, vocab_size * sizeof *x), *w = x + vocab_size;
    // The repetition penalty (Keskar et al. 2019), once for each id: positive logits are divided, others multiplied.
    float penalty = (float)fmin(fmax(s->penalty, FLT_MIN), FLT_MAX), best;
    for (const int *id = ids; id < ids + n; id++)
        x[*id] = fminf(logits[*id] > 0 ? logits[*id] / penalty : logits[*id] * penalty, FLT_MAX);
    if ((best = largest_of(x, vocab_size)) < -FLT_MAX) die("all logits at position %zu are -inf (see -m check)", n - 1);
    size_t picked = 0, kept = vocab_size;
    while (x[picked] != best) picked++;
    if (s->temperature == 0) return (int)picked;
    for (size_t i = 0; i < vocab_size; i++) w[i] = fast_exp((float)(((double)x[i] - (double)best) / s->temperature));
    double total = sum_row(w, vocab_size, 0, false), passed = 0;
    for (size_t i = 0; i < vocab_size; i++) c[i] = (Candidate){x[i], s->top_k > 0 ? 1 : w[i], (int)i};  // top-k counts
    if (s->top_k > 0) kept = keep_best(c, kept, s->top_k), last = c[kept - 1], total = 0;
    for (size_t i = 0; i < kept && s->top_k > 0; i++) total += (double)(c[i].weight = w[c[i].id]);
    if (s->top_p < 1) kept = keep_best(c, kept, s->top_p * total), last = c[kept - 1];  // Holtzman et al. 2019
    for (size_t i = 0; i < vocab_size; i++)  // min-p is a share of the largest weight, which is 1
        w[i] = better(last, (Candidate){x[i], w[i], (int)i}) || (double)w[i] < s->min_p ? 0 : w[i];
    // One number is drawn, and the ids are walked in order until their weights pass that share of what is left.
    double stop = (double)uniform(&s->state) * sum_row(w, vocab_size, 0, false);
    for (size_t i = 0; i < vocab_size && passed <= stop; i++)
        if (w[i] > 0) passed += (double)w[i], picked = i;
    return (int)picked;
}

// ---- input and output -----------------------------------------------------------------------------------------------
static volatile sig_atomic_t stoppable;  // 1: chat writes a reply, which SIGINT ends; 2: it has
// A signal ends the program without a trace of unfinished output.
static void on_signal(int number) {
    static const char shrunk[] = "run: the model's file has become shorter (copy it again)\n";
    if (number == SIGINT && stoppable == 1) { stoppable = 2; return; }
    if (unfinished) unlink(unfinished);
    _exit(number == SIGBUS && write(STDERR_FILENO, shrunk, sizeof shrunk - 1) ? 1 : 128 + number);
}

static const char *input = "standard input", *output = "standard output";  // what stdin and stdout are
// Writes to stdout at once, and what printf() has left.
static void print(const void *data, size_t size) {
    if (fwrite(data, 1, size, stdout) == size && !fflush(stdout) && !ferror(stdout)) return;
    if (errno == EPIPE) on_signal(SIGPIPE);  // the reader has seen enough
    die("cannot write to %s: %s (free some space, or write elsewhere)", output, strerror(errno));
}
static void print_from(const Buffer *b, size_t start) { if (b->size > start) print(b->data + start, b->size - start); }

// Makes stdout a device or FIFO, or a temporary file that replaces that at `path`, a link's target, when it is whole.
static void open_output(const char *path) {
    struct stat old;
    if (!(output = realpath(path, NULL))) output = path;
    bool exists = !stat(output, &old), in_place = exists && !S_ISREG(old.st_mode);
    fstat(STDIN_FILENO, &in_use[2]);
    for (int i = 0; exists && !in_place && i < 3; i++)
        if (old.st_dev == in_use[i].st_dev && old.st_ino == in_use[i].st_ino)
            die("-o names %s, which is read (name another file)", output);
    if (!in_place && asprintf(&unfinished, "%s.%ld.part", output, (long)getpid()) < 0) unfinished = NULL;
    int fd = in_place ? open(output, O_WRONLY) : open(unfinished, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0666);
    if (fd < 0) unfinished = NULL;
    if (fd < 0 || dup2(fd, STDOUT_FILENO) < 0) die("cannot write %s: %s (check the path)", output, strerror(errno));
    if (exists && !in_place) fchmod(fd, old.st_mode & 0777);
    close(fd);
}

// Appends what stdin has up to a character, EOF: to its end. Returns the one that has been met.
static int read_until(int end, Buffer *b) {
    int c;
    while ((c = getchar()) != EOF && c != end) append(b, &(char){(char)c}, 1);
    if (c == EOF && ferror(stdin)) die("cannot read %s: %s (check the path)", input, strerror(errno));
    return c;
}

typedef struct {
    const char *model, *mode_name, *text, *file, *ids, *tokenizer, *output, *system;
    enum { GENERATE, CHAT, TOKENIZE, DETOKENIZE, LOGITS, HIDDEN, PERPLEXITY, CHECK, N_MODES } mode;
    double n_new, context, chunk, threads;
    bool print_ids; Sampler sampler;  // its settings
} Options;
typedef struct { int *ids; size_t n; Buffer text; } Prompt;  // (n); the text as given, empty with -I

// Loads -z, or STEM.tokenizer.bin beside STEM.bin, or tokenizer.bin beside the model, or here. It must fit the model.
static void load_tokenizer(Tokenizer *t, const Options *o, const Model *m) {
    char *name;
    const char *path = o->tokenizer, *base = o->model ? o->model : "a model", *slash = strrchr(base, '/');
    int stem = (int)strlen(base) - 4, cut[] = {stem, slash ? (int)(slash + 1 - base) : 0, 0};
    for (int i = stem > 0 && !strcmp(base + stem, ".bin") ? 0 : 1; !path && i < 3; i++)
        if (asprintf(&name, "%.*s%stokenizer.bin", cut[i], base, i ? "" : ".") >= 0 && !access(name, F_OK)) path = name;
    if (!path) die("there is no tokenizer.bin beside %s or here (export.py --tokenizer makes one, -z names one)", base);
    read_tokenizer(t, path);
    size_t hash = m->config.tokenizer_hash, rows = m->config.vocab_size;
    if (o->model && ((hash && t->hash && t->hash != hash) || t->n[IDS] > rows))
        die("%s (%zu ids, fingerprint %zu) does not fit %s (%zu rows, fingerprint %zu) (name its own with -z)",
            path, (size_t)t->n[IDS], (size_t)t->hash, base, rows, hash);
    if (t->n[IDS] < rows && !(hash && t->hash))
        fprintf(stderr, "run: note: %s has %u ids, %s %zu rows (-z names another)\n", path, t->n[IDS], base, rows);
}

// Appends the next turn to the talk: -i, then lines of stdin, one that ends in \ with the next. False at their end.
static bool next_turn(const Options *o, Buffer *talk) {
    bool terminal = isatty(fileno(stdin)), marks = terminal && isatty(STDOUT_FILENO), given = o->text && !talk->size;
    Buffer turn = {0}; int met = 0;
    if (given) append(&turn, o->text, strlen(o->text));
    else do {
        if (marks) print("> ", 2);
        while ((met = read_until('\n', &turn)) == '\n' && turn.size && turn.data[turn.size - 1] == '\\')
            turn.data[turn.size - 1] = '\n';
    } while (terminal && met == '\n' && !turn.size);
    if (met != EOF || turn.size) return append(talk, &turn, sizeof turn), true;
    if (marks) print("\n", 1);
    return false;
}

// The prompt of -i, -f or -I ("1 2 3"), where one is needed and it is empty BOS; of -m chat --ids the conversation.
static Prompt read_prompt(const Options *o, const Tokenizer *t, const Model *m) {
    size_t vocab_size = o->model ? m->config.vocab_size : t->n[IDS], turns = 0;
    Prompt p = {.ids = allocate(o->ids ? strlen(o->ids) : 0, sizeof *p.ids, "the prompt")};
    Buffer chars = {0}, talk = {0};
    if (o->mode == CHAT) {
        if (!o->print_ids) return p;
        while (next_turn(o, &talk)) turns++;
        if (turns % 2 == 0) die("the conversation has %zu messages, an even number (the last must be a user's)", turns);
        return p.ids = render(t, o->system, AS(Buffer, talk), turns, &p.n), p;
    }
    if (o->file) read_until(EOF, &p.text);
    if (o->text) append(&p.text, o->text, strlen(o->text));
    if (o->file || o->text) append_utf8(t, &chars, p.text, false), p.ids = encode(t, chars, true, &p.n);
    for (const char *at = o->ids ? o->ids : ""; *(at += strspn(at, " \t\n"));) {
        size_t digits = strspn(at, "0123456789"), word = strcspn(at, " \t\n"), id = strtoull(at, NULL, 10);
        if (digits < word) usage_error("-I has \"%.80s\", no token id (give ids as \"1 2 3\")", at);
        if (id >= vocab_size) die("-I has \"%.80s\", not in the vocabulary (ids are 0 to %zu)", at, vocab_size - 1);
        p.ids[p.n++] = (int)id, at += word;
    }
    if (p.n || o->mode == TOKENIZE || o->mode == DETOKENIZE || o->mode == PERPLEXITY) return p;
    if (m->config.bos_id < 0) die("the prompt is empty and %s has no BOS id (give some text)", m->file.path);
    return p.ids = allocate(1, sizeof *p.ids, "the prompt"), p.ids[p.n++] = (int)m->config.bos_id, p;
}

// ---- the modes ------------------------------------------------------------------------------------------------------
static double seconds(clockid_t clock) {
    struct timespec now;
    return clock_gettime(clock, &now), (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
static double per_second(size_t tokens, double time) { return tokens && time > 0 ? (double)tokens / time : 0; }

// The number that a line of a file holds in a scanf format, else `otherwise`.
static size_t number_in(const char *path, const char *format, size_t otherwise) {
    char line[256];
    size_t number = otherwise;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, format, &number) != 1) continue;
    return f ? fclose(f) : 0, number;
}

// The context: -c, else `fallback`; dies if that is above seq_len or a prompt of n tokens does not fit.
static size_t context_for(const Options *o, const Model *m, size_t fallback, size_t n) {
    size_t seq_len = m->config.seq_len, context = o->context > 0 ? (size_t)o->context : fallback;
    if (context > seq_len) die("a context of %zu is above the model's seq_len %zu (use less)", context, seq_len);
    if (n > context) die("the prompt has %zu tokens, the context %zu (use less; seq_len is %zu)", n, context, seq_len);
    return context;
}

// The context for a prompt of n tokens and all that may follow, as far as -c, seq_len and memory allow.
static size_t plan(const Options *o, const Model *m, size_t n) {
    bool all = o->mode == CHAT || o->n_new < 0;
    size_t wanted = all ? m->config.seq_len : (size_t)o->n_new, full = context_for(o, m, m->config.seq_len, n);
    size_t limit = number_in("/sys/fs/cgroup/memory.max", "%zu", SIZE_MAX);  // the container's
    size_t used = number_in("/sys/fs/cgroup/memory.current", "%zu", 0);
    used -= min_size(used, number_in("/sys/fs/cgroup/memory.stat", "inactive_file %zu", 0));  // given up at need
    size_t spare = number_in("/proc/meminfo", "MemAvailable: %zu", SIZE_MAX >> 10) << 10;  // the system's
    Run r = {.model = m, .context = full, .chunk = min_size((size_t)o->chunk, full)};
    double room = (double)min_size(spare, limit - min_size(limit, used)) / (2 * sizeof(float) * (double)cache_size(&r));
    size_t fits = room < 1 ? (size_t)(room * (double)full) : full;
    if (o->context <= 0 && fits < min_size(full, n + wanted)) {
        fprintf(stderr, "run: note: memory holds a context of %zu tokens, not %zu (-c sets it)\n", fits, full);
        full = context_for(o, m, fits, n);
    }
    if (wanted > full - n && !all) fprintf(stderr, "run: note: context %zu: room for %zu new tokens\n", full, full - n);
    return min_size(full, n + wanted);
}

// Takes the next chunk of n tokens from the run's position on.
static void next_chunk(Run *r, const int *ids, size_t n) {
    bool show = n > 4 * r->chunk && isatty(STDERR_FILENO);
    if (show) fprintf(stderr, "\rprompt: %zu of %zu tokens", r->position, n);
    forward(r, ids + r->position, min_size(r->chunk, n - r->position));
    if (show && r->position == n) fprintf(stderr, "\r%*s\r", 60, "");
}

// Appends what n ids add to the text (special tokens only if shown); without a tokenizer the ids.
static void append_tokens(Buffer *b, const Tokenizer *t, Decoder *d, const int *ids, size_t n, bool show_special) {
    char number[16];
    for (size_t i = 0; i < n; i++)
        if (t) decode(t, d, ids[i], show_special, b);
        else append(b, number, (size_t)snprintf(number, sizeof number, b->size ? " %d" : "%d", ids[i]));
}

typedef struct {  // of generate and chat
    const Options *o; const Tokenizer *t;  // t is NULL: ids are printed
    Run run; Sampler sampler; Decoder decoder;
    Buffer ids, out, ends;    // what the cache holds, and perhaps one more; what has been written; ids that end it
    size_t fed, made, timed;  // tokens of prompts, new ones, and of these all but the first of each reply
    double feeding, making;   // seconds for `fed` and for `timed`
} Session;

// Feeds those of n ids that the cache lacks, then samples and prints more. True if the text ended or the user ended it.
static bool write_on(Session *x, const int *ids, size_t n) {
    Run *r = &x->run;
    size_t room = r->context - n, wanted = x->o->n_new < 0 ? room : min_size(room, (size_t)x->o->n_new);
    size_t cached = r->position, made = 0, shown = x->out.size;
    bool ended = false;
    x->ids.size = 0, append(&x->ids, ids, n * sizeof *ids);
    double start = seconds(CLOCK_MONOTONIC), first = start;
    while (r->position < n && stoppable != 2) next_chunk(r, ids, n);
    x->fed += r->position - cached;
    for (int id; made < wanted && !(ended = stoppable == 2); shown = x->out.size) {
        if (made) forward(r, &id, 1);
        const float *logits = logits_of(r, r->position - 1, 1);
        id = sample(&x->sampler, logits, r->model->config.vocab_size, AS(int, x->ids), r->position);
        if (made++ == 0) first = seconds(CLOCK_MONOTONIC);
        for (size_t i = 0; i < x->ends.size / sizeof id; i++) ended = ended || AS(int, x->ends)[i] == id;
        if (ended) break;
        append(&x->ids, &id, sizeof id);
        append_tokens(&x->out, x->t, &x->decoder, &id, 1, false), print_from(&x->out, shown);
    }
    double end = seconds(CLOCK_MONOTONIC), fed = made ? first : end;
    x->feeding += fed - start, x->making += end - fed, x->made += made, x->timed += made ? made - 1 : 0;
    decode_end(&x->decoder, &x->out), print_from(&x->out, shown);
    if (stoppable || !x->t || isatty(STDOUT_FILENO)) print("\n", 1);
    return ended;
}

// -m generate; -m chat: each turn feeds what the conversation's ids have beyond those in the cache. Then the status.
static void run_session(Session *x, const Options *o, const Model *m, const Tokenizer *t, const Prompt *p) {
    size_t vocab_size = m->config.vocab_size, context = plan(o, m, p->n);
    bool chats = o->mode == CHAT, full = false;
    Buffer talk = {0};  // of Buffers: users' turns and replies
    *x = (Session){.o = o, .t = o->print_ids ? NULL : t, .sampler = o->sampler};
    append(&x->ends, data_of(m->eos_ids), m->config.n_eos * sizeof(int));
    if (chats) append(&x->ends, t->ends, t->n[ENDS] * sizeof(int));
    new_run(&x->run, m, context, p->n, (size_t)o->chunk, 1);
    x->sampler.candidates = allocate(vocab_size, sizeof *x->sampler.candidates, "the sampler");
    x->sampler.scores = allocate(vocab_size, 2 * sizeof *x->sampler.scores, "the sampler");
    append_tokens(&x->out, x->t, &x->decoder, p->ids, p->n, false);
    if (x->t && p->text.size) decode_end(&x->decoder, &x->out), print_from(&p->text, 0);  // text as it was given
    else print_from(&x->out, 0);
    if (!chats) write_on(x, p->ids, p->n);
    while (chats && !full && next_turn(o, &talk)) {
        size_t n, n_said = talk.size / sizeof talk, same = 0;
        int *ids = render(t, o->system, AS(Buffer, talk), n_said, &n), *held = AS(int, x->ids);
        if ((full = n > context && n_said > 1)) break;
        context_for(o, m, context, n);  // dies if the first turn does not fit
        while (same < x->run.position && same + 1 < n && held[same] == ids[same]) same++;
        x->run.position = keepable(&x->run, same), x->decoder = (Decoder){0}, x->out = (Buffer){0}, stoppable = 1;
        bool ended = write_on(x, ids, n);
        full = !ended && x->ids.size == context * sizeof *ids;
        if (!ended && !full) fprintf(stderr, "run: note: the reply was cut at %.0f tokens (-n -1: all)\n", o->n_new);
        append(&talk, &x->out, sizeof x->out), stoppable = 0, free(ids);
    }
    if (full) fprintf(stderr, "run: the context of %zu tokens is full (start anew, or give a larger -c)\n", context);
    fprintf(stderr, "prompt: %zu tokens, %.1f tok/s; generated: %zu tokens, %.1f tok/s; seed %zu\n", x->fed,
            per_second(x->fed, x->feeding), x->made, per_second(x->timed, x->making), (size_t)o->sampler.state);
}

// -m logits; -m hidden (n_layers + 1, T, dim); -m perplexity: in windows of the context, each from an empty cache.
static void evaluate(const Options *o, const Model *m, const Prompt *p) {
    bool hidden = o->mode == HIDDEN, scores = o->mode == PERPLEXITY;
    const Config *c = &m->config;
    size_t vocab_size = c->vocab_size, states = hidden ? mul(mul(c->n_layers + 1, p->n), c->dim) : 0;
    size_t context = context_for(o, m, min_size(c->seq_len, scores ? 2048 : p->n), scores ? 0 : p->n);
    if (scores && (p->n < 2 || context < 2))
        die("a text of %zu ids in a context of %zu leaves nothing to score (both must be 2 or more)", p->n, context);
    Run r; new_run(&r, m, min_size(context, p->n), p->n, (size_t)o->chunk, hidden ? 0 : LOGIT_ROWS);
    if (hidden) r.hidden = allocate(states, sizeof(float), "the hidden states");
    if (o->output && strcmp(o->output, "-")) open_output(o->output);
    double start = seconds(CLOCK_MONOTONIC), nll = 0, scored = 0;
    for (size_t first = 0, n; first < p->n; first += n, scored += (double)(n - 1))
        for (n = min_size(context, p->n - first), r.position = 0; r.position < n;) {
            size_t at = r.position; const float *x = NULL;
            for (next_chunk(&r, p->ids + first, n); at < r.position && !hidden; at++, x += stride(vocab_size)) {
                if ((at - r.start) % LOGIT_ROWS == 0) x = logits_of(&r, at, min_size(LOGIT_ROWS, r.position - at));
                if (!scores) print(x, vocab_size * sizeof *x);
                if (!scores || at + 1 == n) continue;
                double largest = (double)largest_of(x, vocab_size), sum = 0;
                for (size_t i = 0; i < vocab_size; i++) sum += exp((double)x[i] - largest);
                if (!(sum > 0)) die("all logits at position %zu are -inf (see -m check)", first + at);
                nll += log(sum) + (largest - (double)x[p->ids[first + at + 1]]);  // -ln p of the id that follows
            }
        }
    if (scores) printf("perplexity %.9g nll %.9g tokens %.0f\n", exp(nll / scored), nll / scored, scored), print("", 0);
    if (hidden) print(r.hidden, states * sizeof(float));
    if (fclose(stdout) || (unfinished && rename(unfinished, output)))
        die("cannot write %s: %s (free some space, or write elsewhere)", output, strerror(errno));
    fprintf(stderr, "prompt: %zu tokens, %.1f tok/s\n", p->n, per_second(p->n, seconds(CLOCK_MONOTONIC) - start));
}

// -m check: the header, the tensors, the tokenizer of -z, and the memory that a run would take.
static void check(const Options *o, const Model *m, const Tokenizer *t) {
    static const char *const types[] = {"float32", "int32", "bfloat16"};
    size_t bad = 0, context = context_for(o, m, m->config.seq_len, 0), chunk = min_size((size_t)o->chunk, context);
    Run r = {.model = m, .context = context, .chunk = chunk, .logit_rows = 1};
    size_t run = lay_out(&r, NULL), cache = mul(2 * sizeof(float), cache_size(&r)), file = m->file.size;
    char text[64];
    printf("%s: %zu bytes\n\nheader\n", m->file.path, file);
    for (int i = 0; i < N_FIELDS; i++) field(&m->config, i, text), printf("  %-28s %s\n", FIELDS[i].name, text);
    printf("\ntensors\n");
    for (const Tensor *w = m->tensors; w < m->tensors + m->n_tensors; w++) {
        size_t n = w->rows * w->columns, finite = 0;
        double low = INFINITY, high = -INFINITY, squares = 0;
        for (size_t i = 0; i < n; i++) {
            double value = w->type == I32 ? (double)((const int32_t *)w->data)[i] : (double)weight(w, i);
            if (!isfinite(value)) { bad++; continue; }
            low = value < low ? value : low, high = value > high ? value : high, squares += value * value, finite++;
        }
        snprintf(text, sizeof text, w->layer == OF_NO_LAYER ? "%s" : "%s[%d]", w->name, w->layer);
        printf("  %-24s %7zu x %-7zu %-8s min %-12.5g max %-12.5g rms %-12.5g non-finite %zu\n", text, w->rows,
               w->columns, types[w->type], low, high, sqrt(squares / (double)finite), n - finite);
    }
    if (t->n[IDS]) printf("\ntokenizer %s: %u ids, fingerprint %zu\n", t->path, t->n[IDS], (size_t)t->hash);
    printf("\nmemory at a context of %zu, in chunks of %zu\n", context, chunk);
    printf("  weights %zu bytes, cache %zu, the rest %zu, together %zu\n", file, cache, run - cache, add(file, run));
    print("", 0);
    if (bad) die("%s has %zu values that are not finite (export it again)", m->file.path, bad);
}

// ---- the command line -----------------------------------------------------------------------------------------------
static const char USAGE[] = "usage: run MODEL [options]                         -h, --help   --version\n"
    "  -m MODE   generate (default) | chat | tokenize | detokenize | logits | hidden | perplexity | check\n"
    "  -i TEXT   prompt (chat: the first turn)          -t F  temperature, 0 = greedy (1.0)\n"
    "  -f FILE   prompt from a file, - = stdin          -p F  top-p (0.9; 1 = off)\n"
    "  -I IDS    prompt as token ids, \"1 2 3\"           -k N  top-k, 0 = off (0)\n"
    "  -n N      tokens to generate (256; -1: no limit) -s N  seed (from the clock; printed)\n"
    "  -b N      prefill chunk (256)                    -c N  context length\n"
    "  -z FILE   tokenizer                              -j N  threads\n"
    "  -y TEXT   system prompt for chat                 --min-p F (0)   --repeat-penalty F (1)\n"
    "  -o FILE   where binary output goes, - = stdout   --ids  print token ids instead of text\n";

// kind: 's' text, 'i' whole number, 'f' number, 'u' uint64; without a value 'b' yes or no, 'a' answer; 'M' the model.
static void parse_options(Options *o, int argc, char **argv) {
    Sampler *s = &o->sampler;
    *o = (Options){.mode_name = "generate", .n_new = 256, .chunk = 256};
    *s = (Sampler){.temperature = 1, .top_p = 0.9, .penalty = 1, .state = (uint64_t)(seconds(CLOCK_REALTIME) * 1e6)};
    const struct Flag { const char *name; char kind; void *value; double low, high; } flags[] = {
        {"-m", 's', &o->mode_name, 0, 0}, {"-i", 's', &o->text, 0, 0}, {"-f", 's', &o->file, 0, 0},
        {"-I", 's', &o->ids, 0, 0}, {"-z", 's', &o->tokenizer, 0, 0}, {"-o", 's', &o->output, 0, 0},
        {"-y", 's', &o->system, 0, 0}, {"-n", 'i', &o->n_new, -1, INT_MAX}, {"-b", 'i', &o->chunk, 1, INT_MAX},
        {"-c", 'i', &o->context, 1, INT_MAX}, {"-j", 'i', &o->threads, 1, 1024}, {"-k", 'i', &s->top_k, 0, INT_MAX},
        {"-t", 'f', &s->temperature, 0, DBL_MAX}, {"-p", 'f', &s->top_p, 0, 1}, {"-s", 'u', &s->state, 0, 0x1p64},
        {"--min-p", 'f', &s->min_p, 0, 1}, {"--repeat-penalty", 'f', &s->penalty, DBL_MIN, DBL_MAX},
        {"--ids", 'b', &o->print_ids, 0, 0}, {"-h", 'a', (void *)USAGE, 0, 0}, {"--help", 'a', (void *)USAGE, 0, 0},
        {"--version", 'a', "run.c 1.0\n", 0, 0}, {NULL, 'M', &o->model, 0, 0}};
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *equals = !strncmp(word, "--", 2) ? strchr(word, '=') : NULL;
        size_t length = equals ? (size_t)(equals - word) : strlen(word);
        const struct Flag *f = flags;
        while (f->name && (strncmp(f->name, word, length) || f->name[length])) f++;
        if (!f->name && word[0] == '-' && word[1]) usage_error("unknown option %s (see run --help)", word);
        if (!f->name && o->model) usage_error("%s and %s: two models (a prompt goes after -i)", o->model, word);
        if (f->kind < 'f' && equals) usage_error("%s takes no value, not %s (run --help)", f->name, equals + 1);
        const char *text = f->kind < 'f' ? word : equals ? equals + 1 : argv[++i];
        if (!text) usage_error("%s needs a value (see run --help)", f->name);
        if (f->kind == 'b') *(bool *)f->value = true;
        else if (f->kind == 'a') print(f->value, strlen(f->value)), exit(0);
        else if (f->kind == 's' || f->kind == 'M') *(const char **)f->value = text;
        else {  // a number as a whole, in the flag's range
            char *end; double number = strtod(text, &end);
            errno = 0;
            if (f->kind == 'u') *(uint64_t *)f->value = strtoull(text, NULL, 10); else *(double *)f->value = number;
            if (!*text || *end || text[strspn(text, f->kind == 'u' ? "0123456789" : "+-.0123456789eE")] || errno ||
                !(number >= f->low && number <= f->high) || (f->kind == 'i' && number != floor(number)))
                usage_error("%s takes a %snumber from %.10g to %.10g, not \"%s\" (see run --help)", f->name,
                            f->kind == 'f' ? "" : "whole ", f->low, f->high, text);
        }
    }
}

// Sets the mode; ends the program if the options do not go together.
static void check_options(Options *o) {
    const char *names[] = {"generate", "chat", "tokenize", "detokenize", "logits", "hidden", "perplexity", "check"};
    while (strcmp(o->mode_name, names[o->mode]))
        if (++o->mode == N_MODES) usage_error("unknown mode %s (see run --help)", o->mode_name);
    bool binary = o->mode == LOGITS || o->mode == HIDDEN, to_stdout = !o->output || !strcmp(o->output, "-");
    bool chats = o->mode == CHAT, translates = o->mode == TOKENIZE || o->mode == DETOKENIZE || (chats && o->print_ids);
    if (chats && o->ids) usage_error("-I is given with -m chat (leave it out)");
    if (!chats && !!o->text + !!o->file + !!o->ids > 1) usage_error("-i, -f, -I: more than one is given (leave one)");
    if (o->system && !chats) usage_error("-y is for -m chat, not %s (put it into the prompt)", o->mode_name);
    if (!o->model && !translates) usage_error("no model is named (run MODEL [options]; see run --help)");
    if (o->mode == TOKENIZE && !o->text && !o->file) usage_error("-m tokenize has no text (give -i or -f)");
    if (o->mode == DETOKENIZE && !o->ids) usage_error("-m detokenize has no ids (give -I)");
    if (o->output && !binary) usage_error("-o is for -m logits and hidden, not %s (redirect its output)", o->mode_name);
    if (binary && to_stdout && isatty(STDOUT_FILENO)) usage_error("-m %s is binary (give -o)", o->mode_name);
}

// -j, else OMP_NUM_THREADS, else a thread for each core that this process may use, within its share of time.
static void set_threads(size_t n) {
#ifdef _OPENMP
    omp_set_dynamic(0);
    if (n) omp_set_num_threads((int)n);
#ifdef __linux__
    cpu_set_t cpus, one = {{0}};  // where a thread may run; one processor
    size_t cores[CPU_SETSIZE], n_cores = 0, here = 0;  // the first processors of cores; those before the current one
    char path[96];
    for (size_t i = sched_getaffinity(0, sizeof cpus, &cpus) ? CPU_SETSIZE : 0, first; i < CPU_SETSIZE; i++) {
        if (!CPU_ISSET(i, &cpus)) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/topology/thread_siblings_list", i);
        first = number_in(path, "%zu", i);
        if (first >= i || !CPU_ISSET(first, &cpus)) here += i < (size_t)sched_getcpu(), cores[n_cores++] = i;
    }
    size_t quota = number_in("/sys/fs/cgroup/cpu.max", "%zu", 0), share = n_cores;
    size_t period = number_in("/sys/fs/cgroup/cpu.max", "%*u %zu", 0);
    if (quota && period) share = min_size(share, (quota + period - 1) / period);
    if (!n && share && !getenv("OMP_NUM_THREADS")) omp_set_num_threads((int)share);
    // Linux may start threads on one core and part them much later: each goes to one of its own, then is free to move.
    #pragma omp parallel private(cpus) firstprivate(one)
    if ((size_t)omp_get_thread_num() < n_cores && !sched_getaffinity(0, sizeof cpus, &cpus)) {
        CPU_SET(cores[(here + (size_t)omp_get_thread_num()) % n_cores], &one);
        sched_setaffinity(0, sizeof one, &one), sched_setaffinity(0, sizeof cpus, &cpus);
    }
#endif
    if (omp_get_max_threads() > omp_get_num_procs()) spins = 0;
#else
    if (n > 1) fprintf(stderr, "run: note: -j %zu has no effect, this is built without OpenMP\n", n);
#endif
}

#ifndef RUN_NO_MAIN
int main(int argc, char **argv) {
    static Model m; static Tokenizer t; static Session x; static Options o;
    for (int fd = 0; fd < 3; fd++)  // a closed one stays unusable, and no file of ours takes its place
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_RDONLY : O_WRONLY) < 0) exit(1);
    parse_options(&o, argc, argv), check_options(&o);
    if (o.file && strcmp(o.file, "-") && !freopen(input = o.file, "r", stdin))
        die("cannot open %s: %s (check the path)", input, strerror(errno));
    for (const int *s = (int[]){SIGINT, SIGTERM, SIGHUP, SIGBUS, 0}; *s; s++) signal(*s, on_signal);
    signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit is an error
    bool has_text = o.text || o.file || o.mode == CHAT || o.mode == DETOKENIZE || (o.mode == GENERATE && !o.print_ids);
    if (o.model) load_model(&m, o.model);
    if (has_text || (o.mode == CHECK && o.tokenizer)) load_tokenizer(&t, &o, &m);
    if (o.mode == CHECK) return set_threads((size_t)o.threads), check(&o, &m, &t), 0;
    if (o.mode == CHAT && t.n[TURNS] < 16) die("%s has no chat format (use -m generate with a whole prompt)", t.path);
    if (o.system && t.n[TURNS] < 32) die("the chat template in %s takes no system prompt (leave out -y)", t.path);
    Prompt p = read_prompt(&o, &t, &m);
    if (o.mode != TOKENIZE && o.mode != DETOKENIZE) set_threads((size_t)o.threads);
    if (o.mode == LOGITS || o.mode == HIDDEN || o.mode == PERPLEXITY) evaluate(&o, &m, &p);
    else if (o.mode == GENERATE || (o.mode == CHAT && !o.print_ids)) run_session(&x, &o, &m, &t, &p);
    else {  // ids, or what they decode to
        append_tokens(&x.out, o.mode == DETOKENIZE ? &t : NULL, &x.decoder, p.ids, p.n, true);
        o.mode == DETOKENIZE ? decode_end(&x.decoder, &x.out) : append(&x.out, "\n", 1), print_from(&x.out, 0);
    }
}
#endif
