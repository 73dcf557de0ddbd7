/* run.c: inference for LLaMA-style decoders, in one file:  ./run model.bin -i "Once upon a time"
 *
 * It reads from the ground up: errors and memory, vectors of 16 lanes, the checkpoint (its tables are the format's
 * specification), kernels, attention, the forward pass, the tokenizer, the chat format, the sampler, input and output,
 * the modes, the command line. Arrays are row-major; a comment like (T, n_heads, head_dim) is a shape in the names of
 * the header's fields, T being the number of tokens that one call of forward() takes. Every sum has one fixed order,
 * whatever the number of threads or the size of T: the same tokens give the same logits to the last bit. Not here:
 * training, GPUs, quantized weights. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
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
#ifdef _OPENMP
#include <omp.h>
#endif

// ---- errors and memory ----------------------------------------------------------------------------------------------
static char unfinished[PATH_MAX];  // name of the output file being written, removed if its end is not reached

// Prints one line on stderr (control characters that a value brings along become '?') and ends the program.
__attribute__((format(printf, 2, 3))) _Noreturn static void fail(int status, const char *format, ...) {
    char line[2048];
    va_list values;
    va_start(values, format), vsnprintf(line, sizeof line, format, values), va_end(values);
    for (char *c = line; *c; c++) *c = (unsigned char)*c < 32 || *c == 127 ? '?' : *c;
    fprintf(stderr, "run: %s\n", line);
    if (unfinished[0]) unlink(unfinished);
    exit(status);
}
#define die(...) fail(1, __VA_ARGS__)          // bad data or failed input and output: what is wrong (what to do)
#define usage_error(...) fail(2, __VA_ARGS__)  // a wrong command line

// Size arithmetic that cannot wrap.
static size_t mul(size_t a, size_t b) {
    if (__builtin_mul_overflow(a, b, &a)) die("a size overflows 64 bits: %zu times more (the file is damaged)", b);
    return a;
}
static size_t add(size_t a, size_t b) {
    if (__builtin_add_overflow(a, b, &a)) die("a size overflows 64 bits: %zu bytes more (the file is damaged)", b);
    return a;
}
static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static size_t round_up(size_t a, size_t unit) { return add(a, unit - 1) / unit * unit; }

// Zeroed memory for count elements of a size. A page of a large block costs nothing until it is touched.
static void *allocate(size_t count, size_t size, const char *what) {
    size_t bytes = mul(count, size);
    void *block = calloc(bytes ? bytes : 1, 1);
    if (!block) die("no memory for %s: %zu bytes (a smaller -c or -b needs less)", what, bytes);
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
    return close(fd), (File){data, size, path};
}

// ---- vectors --------------------------------------------------------------------------------------------------------
// A dot product is summed in 16 lanes, element k in lane k % 16, and the lanes are added in one tree: this fixes the
// result on any machine. A register has WIDTH lanes; all of them hold the sums of TILE_T tokens by TILE_R rows.
#if defined __AVX512F__
enum { LANES = 16, WIDTH = 16, PARTS = LANES / WIDTH, TILE_T = 6, TILE_R = 4 };
#else
enum { LANES = 16, WIDTH = 8, PARTS = LANES / WIDTH, TILE_T = 3, TILE_R = 2 };
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef float LooseVec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));  // anywhere in memory

INLINE Vec load(const float *p) { return *(const LooseVec *)p; }

// a * b + c, each element rounded once.
INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
    for (int i = 0; i < WIDTH; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

// The sum of 16 lanes: lane i takes lane i + 8, then i + 4, i + 2, i + 1.
INLINE float sum_lanes(const void *lanes) {
    float s[LANES];
    memcpy(s, lanes, sizeof s);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

// e^x to about 1 ulp, without a branch so that loops over it become vectors: x = n ln 2 + r with |r| <= ln 2 / 2, the
// Taylor polynomial of e^r, and n added to the exponent. Below -87 (e^-87 is 1.6e-38) 0, above 88 e^88, of NaN NaN.
INLINE float fast_exp(float x) {
    static const float taylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
    float clamped = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float shifted = __builtin_fmaf(clamped, 1.44269504f, 0x1.8p23f);  // its low bits are now n = round(x / ln 2)
    float n = shifted - 0x1.8p23f, p = taylor[0];
    float r = __builtin_fmaf(n, -0x1.7f7d1cp-20f, __builtin_fmaf(n, -0x1.62e4p-1f, clamped));  // ln 2 in two parts
    UNROLL for (int i = 1; i < 6; i++) p = __builtin_fmaf(r, p, taylor[i]);
    p = __builtin_fmaf(r * r, p, r) + 1.0f;
    union { float f; uint32_t u; } bits = {shifted}, power = {.u = (bits.u + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.f;
}

// ---- the checkpoint -------------------------------------------------------------------------------------------------
// One flat little-endian file, used in place. These tables are its specification; loading and `-m check` follow them.
//
// Header: 64 slots of 8 bytes. Slot 0 is the magic "run.c\r\n\x1a"; then one field a slot in the order of HEADER, as
// uint64 (COUNT), int64 (INT) or float64 (REAL), with the smallest and largest value that this program supports (others
// that are described belong to the format and are refused); the slots left are 0.
#define HEADER(COUNT, INT, REAL)                                                                                       \
    COUNT(version, 1, 1) COUNT(weight_type, 0, 0) /* 0 float32, 1 bfloat16 */ COUNT(dim, 1, INT_MAX)                   \
    COUNT(hidden_dim, 1, INT_MAX) COUNT(n_layers, 1, 65536) COUNT(n_heads, 1, INT_MAX)                                 \
    COUNT(n_kv_heads, 1, INT_MAX) /* each serves n_heads / n_kv_heads query heads (GQA) */ COUNT(head_dim, 2, INT_MAX) \
    COUNT(vocab_size, 1, INT_MAX) COUNT(seq_len, 1, INT_MAX) /* longest context */                                     \
    COUNT(tied, 0, 1)           /* 1: the classifier is the token embedding */                                         \
    COUNT(activation, 0, 4)     /* 0 silu, 1 gelu, 2 gelu_tanh, 3 relu, 4 sigmoid */                                   \
    COUNT(norm_kind, 0, 1)      /* 0 RMSNorm, 1 LayerNorm */                                                           \
    COUNT(norm_place, 0, 31)    /* 1 before attention + 2 after + 4 before FFN + 8 after + 16 both in parallel */     \
    COUNT(qk_norm, 0, 3)        /* 0 none, 1 per head, 2 over the projection, 3 per head with a weight for each */     \
    COUNT(biases, 0, 31)        /* 1 q/k/v + 2 attention output + 4 FFN + 8 norms + 16 classifier */                   \
    COUNT(rope_dim, 2, INT_MAX) /* elements of a head that are rotated */                                              \
    COUNT(rope_pairs, 0, 1)     /* 0: element i with i + rope_dim / 2, 1: 2i with 2i + 1 */                            \
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
    REAL(attention_softcap, 0, 1e9) REAL(logit_softcap, 0, 1e9) /* c: x becomes c tanh(x / c); 0: none */              \
    REAL(router_scale, 0, 0)

// Tensors follow, row-major, each at the next multiple of 64 bytes from the start of the file, in this order. W is
// float32 or bfloat16 by weight_type; q_dim is n_heads * head_dim, kv_dim n_kv_heads * head_dim. Last is the source's
// config.json, which run.c does not read.      TENSOR(name, type, present if, rows, columns)
#define TENSORS_FIRST(TENSOR)                                                                                          \
    TENSOR(eos_ids, I32, c->n_eos, 1, c->n_eos)                                                                        \
    TENSOR(layer_window, I32, 1, 1, c->n_layers)   /* positions that a token sees, 0: all */                           \
    TENSOR(layer_rope, I32, 1, 1, c->n_layers)     /* the layer's table of rope_freq from 1, 0: no rotation */         \
    TENSOR(rope_freq, F32, 1, c->n_rope_tables, c->rope_dim / 2) /* radians per position */                            \
    TENSOR(token_embedding, W, 1, c->vocab_size, c->dim)
#define NORM(TENSOR, name, present) /* and its bias */                                                                 \
    TENSOR(name, F32, present, 1, c->dim) TENSOR(name##_bias, F32, (present) && (c->biases & 8), 1, c->dim)
#define TENSORS_OF_LAYER(TENSOR) /* all of these for each layer */                                                     \
    NORM(TENSOR, attention_norm, c->norm_place & 1)                                                                    \
    TENSOR(wq, W, 1, q_dim, c->dim) TENSOR(wk, W, 1, kv_dim, c->dim) TENSOR(wv, W, 1, kv_dim, c->dim)                  \
    TENSOR(bq, F32, c->biases & 1, 1, q_dim) TENSOR(bk, F32, c->biases & 1, 1, kv_dim)                                 \
    TENSOR(bv, F32, c->biases & 1, 1, kv_dim)                                                                          \
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
static const char MAGIC[8] = {'r', 'u', 'n', '.', 'c', '\r', '\n', 0x1a};
typedef enum { F32, I32, BF16 } Type;

#define COUNT_MEMBER(name, low, high) size_t name;
#define INT_MEMBER(name, low, high) int64_t name;
#define REAL_MEMBER(name, low, high) double name;
#define COUNT_FIELD(name, low, high) {#name, 'c', low, (double)high},
#define INT_FIELD(name, low, high) {#name, 'i', low, high},
#define REAL_FIELD(name, low, high) {#name, 'r', low, high},
typedef struct { char magic[8]; HEADER(COUNT_MEMBER, INT_MEMBER, REAL_MEMBER) } Config;  // the header as in the file
static const struct { const char *name; char kind; double low, high; } FIELDS[] = {  // field i is in slot i + 1
    HEADER(COUNT_FIELD, INT_FIELD, REAL_FIELD)};
enum { N_FIELDS = sizeof FIELDS / sizeof *FIELDS };
_Static_assert(sizeof(Config) == 8 * (1 + N_FIELDS) && sizeof(Config) <= HEADER_SIZE, "one slot a field");

#define MEMBER(name, type, present, rows, columns) const float *name;
typedef struct { size_t window, rope; TENSORS_OF_LAYER(MEMBER) } Layer;  // of layer_window and layer_rope
typedef struct { const char *name; int layer; Type type; size_t rows, columns; const void *data; } Tensor;
typedef struct {
    Config config;
    File file;
    size_t taken, n_tensors;  // so far: bytes of the file that belong to something, tensors found
    Tensor *tensors;          // (n_tensors), in the order of the file
    Layer *layers;            // (n_layers)
    TENSORS_FIRST(MEMBER) TENSORS_LAST(MEMBER)
} Model;

// The value of field i, and the same as text.
static double field(const Config *c, int i, char text[32]) {
    union { size_t count; int64_t integer; double real; } slot;
    memcpy(&slot, (const char *)c + 8 * (i + 1), 8);
    if (FIELDS[i].kind == 'c') return snprintf(text, 32, "%zu", slot.count), (double)slot.count;
    if (FIELDS[i].kind == 'i') return snprintf(text, 32, "%lld", (long long)slot.integer), (double)slot.integer;
    return snprintf(text, 32, "%.9g", slot.real), slot.real;
}

// Dies unless every field is in its range and they agree with each other.
static void check_config(const Config *c, const char *path) {
    char text[32];
    for (int i = 0; i < N_FIELDS; i++) {
        double value = field(c, i, text);
        if (!(value >= FIELDS[i].low && value <= FIELDS[i].high))
            die("%s: %s is %s, supported is %.9g to %.9g (export it again with this version's export.py)", path,
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
}

// Finds the next tensor, at the next multiple of `align` bytes, and notes it in the model's list.
static const float *take(Model *m, const char *name, int layer, Type type, size_t rows, size_t columns, size_t align) {
    size_t start = round_up(m->taken, align);
    m->taken = add(start, mul(mul(rows, columns), type == BF16 ? 2 : 4));
    if (m->taken > m->file.size)
        die("%s ends early: %s of %zu x %zu would end at byte %zu, the file has %zu (copy or export it again)",
            m->file.path, name, rows, columns, m->taken, m->file.size);
    m->tensors[m->n_tensors++] = (Tensor){name, layer, type, rows, columns, m->file.data + start};
    return (const float *)(const void *)(m->file.data + start);
}

// Room for the layers and the list of their tensors.
static void allocate_layers(Model *m) {
    size_t n = m->config.n_layers;
    if (n > m->file.size) die("%s: n_layers is %zu in %zu bytes (the file is damaged)", m->file.path, n, m->file.size);
    m->layers = allocate(n, sizeof(Layer), "the layers");
    m->tensors = allocate(add(mul(n, sizeof(Layer) / sizeof(float *)), 16), sizeof(Tensor), "the list of tensors");
}

// Dies unless the integer tables hold what is supported; the layers get theirs. A llama2.c file has no such tables.
static void check_tables(const Model *m) {
    const int32_t *eos = (const void *)m->eos_ids, *w = (const void *)m->layer_window;
    const int32_t *rope = (const void *)m->layer_rope, n_tables = (int32_t)m->config.n_rope_tables;
    for (size_t l = 0; l < m->config.n_layers; l++) {
        if (w && (w[l] < 0 || rope[l] < 0 || rope[l] > n_tables))
            die("%s: layer %zu has window %d and table %d of %d (export it again)", m->file.path, l, w[l], rope[l],
                n_tables);
        m->layers[l].window = w ? (size_t)w[l] : 0, m->layers[l].rope = w ? (size_t)rope[l] : 1;
    }
    for (size_t i = 0, n = m->config.vocab_size; i < m->config.n_eos; i++)
        if (eos[i] < 0 || (size_t)eos[i] >= n)
            die("%s: end id %d is not in the vocabulary of %zu (export it again)", m->file.path, eos[i], n);
}

static void load_version_1(Model *m) {
    Config *c = &m->config;
    const unsigned char *file = m->file.data;
    if (m->file.size < HEADER_SIZE)
        die("%s has %zu bytes, a header has %d (copy it again)", m->file.path, m->file.size, HEADER_SIZE);
    memcpy(c, file, sizeof *c), check_config(c, m->file.path);
    for (size_t i = sizeof *c; i < HEADER_SIZE; i++)
        if (file[i]) die("%s: byte %zu of the header is %d, not 0 (update run.c)", m->file.path, i, file[i]);
    allocate_layers(m), m->taken = HEADER_SIZE;
    const size_t q_dim = c->n_heads * c->head_dim, kv_dim = c->n_kv_heads * c->head_dim;
    const Type W = c->weight_type ? BF16 : F32;
#define TAKE(name, type, present, rows, columns) \
    if (present) m->name = take(m, #name, OF_NO_LAYER, type, rows, columns, ALIGNMENT);
#define TAKE_OF_LAYER(name, type, present, rows, columns) \
    if (present) m->layers[l].name = take(m, #name, (int)l, type, rows, columns, ALIGNMENT);
    TENSORS_FIRST(TAKE)
    for (size_t l = 0; l < c->n_layers; l++) { TENSORS_OF_LAYER(TAKE_OF_LAYER) }
    TENSORS_LAST(TAKE)
    if (c->config_size) m->taken = add(round_up(m->taken, ALIGNMENT), c->config_size);
}

// llama2.c's float32 files: version 0 begins with seven int32, version 1 with a magic and a header of 256 bytes. A kind
// of tensor is stored for all layers in a row; adjacent elements are rotated together; eps is 1e-5, theta 10000, BOS 1.
enum { LLAMA2C_MAGIC = 0x616b3432, LLAMA2C_HEADER = 256 };
static void load_llama2c(Model *m, bool version) {
    static const int32_t end_ids[2] = {1, 2};
    Config *c = &m->config;
    int32_t start[10] = {0}, *h = start + (version ? 2 : 0);  // dim, hidden_dim, ... in the order of the initializer
    memcpy(start, m->file.data, min_size(sizeof start, m->file.size));
    bool tied = version ? start[9] & 255 : h[5] > 0;  // version 0: a negative vocab_size means untied
    if (!version && h[5] > -INT_MAX) h[5] = abs(h[5]);
    for (int i = 0; i < 7; i++)
        if (h[i] <= 0 || (i == 6 && h[0] % h[3]))
            die("%s is no checkpoint (export.py SOURCE model.bin makes one of a model)", m->file.path);
    size_t head_dim = (size_t)(h[0] / h[3]), kv_dim = mul((size_t)h[4], head_dim);
    *c = (Config){.version = 1, .dim = (size_t)h[0], .hidden_dim = (size_t)h[1], .n_layers = (size_t)h[2],
        .n_heads = (size_t)h[3], .n_kv_heads = (size_t)h[4], .head_dim = head_dim, .vocab_size = (size_t)h[5],
        .seq_len = (size_t)h[6], .tied = tied, .norm_place = 5, .rope_dim = head_dim, .rope_pairs = 1,
        .n_rope_tables = 1, .bos_id = 1, .n_eos = 2, .rms_norm_eps = 1e-5, .rope_theta = 1e4, .embedding_scale = 1,
        .rope_attention_factor = 1, .rope_attention_factor_local = 1, .attention_scale = 1 / sqrt((double)head_dim),
        .residual_scale = 1, .logit_scale = 1};
    check_config(c, m->file.path);
    float *freq = allocate(head_dim / 2, sizeof *freq, "the rotary frequencies");
    for (size_t i = 0; i < head_dim / 2; i++) freq[i] = (float)pow(c->rope_theta, -2.0 * (double)i / (double)head_dim);
    m->rope_freq = freq, m->eos_ids = (const void *)end_ids, allocate_layers(m);
    m->taken = version ? LLAMA2C_HEADER : 7 * sizeof *h;
#define ONE(name, rows, columns) m->name = take(m, #name, OF_NO_LAYER, F32, rows, columns, 4);
#define ALL(name, rows, columns) \
    for (size_t l = 0; l < c->n_layers; l++) m->layers[l].name = take(m, #name, (int)l, F32, rows, columns, 4);
    if (!version) ONE(token_embedding, c->vocab_size, c->dim)
    ALL(attention_norm, 1, c->dim)
    if (version) { ALL(ffn_norm, 1, c->dim) ONE(final_norm, 1, c->dim) ONE(token_embedding, c->vocab_size, c->dim) }
    ALL(wq, c->dim, c->dim) ALL(wk, kv_dim, c->dim) ALL(wv, kv_dim, c->dim) ALL(wo, c->dim, c->dim)
    if (!version) ALL(ffn_norm, 1, c->dim)
    ALL(w1, c->hidden_dim, c->dim) ALL(w2, c->dim, c->hidden_dim) ALL(w3, c->hidden_dim, c->dim)
    if (!version) ONE(final_norm, 1, c->dim)
    if (!version) m->taken = add(m->taken, mul(mul(c->seq_len, head_dim), 4));  // sine and cosine tables, not needed
    if (!tied) ONE(classifier, c->vocab_size, c->dim)
}

// Maps a checkpoint and checks it: every size against the file's before anything is used.
static void load_model(Model *m, const char *path) {
    *m = (Model){.file = map_file(path)};
    uint32_t word[2] = {0};
    memcpy(word, m->file.data, min_size(sizeof word, m->file.size));
    if (word[0] == LLAMA2C_MAGIC && word[1] != 1)
        die("%s is llama2.c's version %u, supported are the float32 ones, 0 and 1 (export it as one)", path, word[1]);
    if (!memcmp(word, MAGIC, sizeof MAGIC)) load_version_1(m);
    else load_llama2c(m, word[0] == LLAMA2C_MAGIC);
    if (m->taken != m->file.size)
        die("%s has %zu bytes, its header implies %zu (copy or export it again)", path, m->file.size, m->taken);
    check_tables(m);
    if (!m->classifier) m->classifier = m->token_embedding;
}

// ---- kernels --------------------------------------------------------------------------------------------------------
typedef Vec Sums[TILE_T][TILE_R][PARTS];

// acc[t][r] += x_t[k .. k + 16] * w_r[k .. k + 16], lane by lane.
INLINE void tile_step(Sums acc, const float *x, size_t x_stride, const float *const w[TILE_R], size_t k, int T) {
    Vec wv[TILE_R][PARTS];
    UNROLL for (int r = 0; r < TILE_R; r++)
        UNROLL for (int p = 0; p < PARTS; p++) wv[r][p] = load(w[r] + k + p * WIDTH);
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int p = 0; p < PARTS; p++) {
            Vec xv = load(x + (size_t)t * x_stride + k + p * WIDTH);
            UNROLL for (int r = 0; r < TILE_R; r++) acc[t][r][p] = multiply_add(xv, wv[r][p], acc[t][r][p]);
        }
}

// out[t][r] = x[t] . w[r] for T tokens (a constant, so that the sums live in registers) and TILE_R rows of w (rows, n)
// from `first`; where `last` leaves fewer, the last is computed several times over: the same value, to the same place.
// What is left of n after the last 16 is copied to rows padded with zeros.
INLINE void tile(float *out, size_t out_stride, const float *x, size_t x_stride, const float *w, size_t n, size_t first,
                 size_t last, int T) {
    Sums acc;
    const float *w_row[TILE_R];
    size_t k = 0;
    memset(&acc, 0, sizeof acc);
    UNROLL for (size_t r = 0; r < TILE_R; r++) w_row[r] = w + min_size(first + r, last - 1) * n;
    for (; k + LANES <= n; k += LANES) tile_step(acc, x, x_stride, w_row, k, T);
    if (k < n) {
        float x_rest[TILE_T][LANES] = {{0}}, w_rest[TILE_R][LANES] = {{0}};
        for (int t = 0; t < T; t++) memcpy(x_rest[t], x + (size_t)t * x_stride + k, (n - k) * sizeof(float));
        for (int r = 0; r < TILE_R; r++) w_row[r] = memcpy(w_rest[r], w_row[r] + k, (n - k) * sizeof(float));
        tile_step(acc, x_rest[0], LANES, w_row, 0, T);
    }
    UNROLL for (int t = 0; t < T; t++, out += out_stride)
        UNROLL for (size_t r = 0; r < TILE_R; r++) out[min_size(first + r, last - 1)] = sum_lanes(acc[t][r]);
}

// The same for any T and rows first..last, on one thread.
static void matmul_rows(float *out, size_t out_stride, const float *x, size_t x_stride, const float *w, size_t n,
                        size_t first, size_t last, size_t T) {
    for (size_t r = first; r < last; r += TILE_R)
        for (size_t t = 0, step; t < T; t += step) {
            float *out_t = out + t * out_stride;
            const float *x_t = x + t * x_stride;
            step = T - t >= TILE_T ? TILE_T : T - t >= 2 ? 2 : 1;
            if (step == TILE_T) tile(out_t, out_stride, x_t, x_stride, w, n, r, last, TILE_T);
            else if (step == 2) tile(out_t, out_stride, x_t, x_stride, w, n, r, last, 2);
            else tile(out_t, out_stride, x_t, x_stride, w, n, r, last, 1);
        }
}

// out (T, rows) = x (T, n) times the transpose of w (rows, n), plus bias (rows) if not NULL. Threads share the rows.
static void matmul(float *out, const float *x, const float *w, const float *bias, size_t T, size_t n, size_t rows) {
    enum { BLOCK = 8 * TILE_R };
    #pragma omp parallel for schedule(static) if (T * n * rows > 1 << 18)  // worth waking them
    for (size_t first = 0; first < rows; first += BLOCK) {
        size_t last = min_size(first + BLOCK, rows);
        matmul_rows(out, rows, x, n, w, n, first, last, T);
        for (size_t t = 0; bias && t < T; t++)
            for (size_t r = first; r < last; r++) out[t * rows + r] += bias[r];
    }
}

// The sum over a row of x - mean, or of its square, in double and in 16 lanes.
INLINE double sum_row(const float *x, size_t n, double mean, bool square) {
    double lane[LANES] = {0};
    for (size_t i = 0; i < n; i += LANES)
        for (size_t j = 0; j < min_size(LANES, n - i); j++) {
            double d = (double)x[i + j] - mean;
            lane[j] += square ? d * d : d;
        }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

// Normalizes rows of n, in double; out may be x. RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight;
// LayerNorm (Ba et al. 2016): the same of x - mean(x), plus bias if not NULL. Row t takes row t % sets of weight
// (sets, n), to which norm_weight_add is added.
static void norm(const Config *c, float *out, const float *x, const float *weight, const float *bias, size_t rows,
                 size_t n, size_t sets) {
    for (size_t t = 0; t < rows; t++, x += n, out += n) {
        const float *w = weight + t % sets * n;
        double mean = c->norm_kind ? sum_row(x, n, 0, false) / (double)n : 0, add = c->norm_weight_add;
        double scale = 1 / sqrt(sum_row(x, n, mean, true) / (double)n + c->rms_norm_eps);
        for (size_t i = 0; i < n; i++)
            out[i] = (float)(((double)x[i] - mean) * scale * (add + (double)w[i]) + (bias ? (double)bias[i] : 0));
    }
}

// c[0] x^(n-1) + ... + c[n-1]. The coefficients below are minimax fits to mpmath's values (Lawson's algorithm).
INLINE float polynomial(const float *c, int n, float x) {
    float p = c[0];
    UNROLL for (int i = 1; i < n; i++) p = __builtin_fmaf(p, x, c[i]);
    return p;
}

// tanh(x) to 2 ulp: x + x^3 P(x^2) below 0.8 (P is good to 4e-9), above 1 - 2 / (e^2x + 1).
INLINE float fast_tanh(float x) {
    static const float c[] = {0.00158476f, -0.00740956f, 0.02130299f, -0.05385233f, 0.13332221f, -0.33333297f};
    float a = __builtin_fabsf(x), z = x * x;
    float near = __builtin_fmaf(polynomial(c, 6, z) * z, a, a), far = 1 - 2 / (fast_exp(2 * a) + 1);
    return __builtin_copysignf(a < 0.8f ? near : far, x);
}

// erf(x) to 2 ulp: x + x P(x^2) below 1 (to 1e-9), above 1 - e^Q(x), Q close to ln erfc(x) (to 1e-9 of erf; 4 is 1).
INLINE float fast_erf(float x) {
    static const float p[] = {7.85388411e-5f, -8.01020109e-4f, 5.18832863e-3f, -2.68538125e-2f, 1.12835852e-1f,
                              -3.76126258e-1f, 1.28379167e-1f};
    static const float q[] = {1.85574009e-4f, -2.93960730e-3f, 2.18053183e-2f, -1.03037369e-1f, -6.38225677e-1f,
                              -1.12704004f, -3.53719502e-4f};
    float a = __builtin_fabsf(x), b = a > 4 ? 4 : a;
    float near = __builtin_fmaf(polynomial(p, 7, x * x), a, a), far = 1 - fast_exp(polynomial(q, 7, b));
    return __builtin_copysignf(a < 1 ? near : far, x);
}

// The activations, each to a few ulp (gelu and gelu_tanh of the larger of the result and x / 20).
INLINE float silu(float x) { return x / (1 + fast_exp(-x)); }
INLINE float gelu(float x) { return 0.5f * x * (1 + fast_erf(x * 0.707106781f)); }
INLINE float gelu_tanh(float x) {  // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    return x / (1 + fast_exp(-1.59576912f * __builtin_fmaf(0.044715f * x * x, x, x)));
}
INLINE float relu(float x) { return x < 0 ? 0 : x; }
INLINE float sigmoid(float x) { return 1 / (1 + fast_exp(-x)); }

// Gated linear units (Shazeer 2020): gate = activation(gate) * up, over n elements.
static void gated(size_t activation, float *gate, const float *up, size_t n) {
#define GATED(number, f) case number: for (size_t i = first; i < last; i++) gate[i] = f(gate[i]) * up[i]; break;
    #pragma omp parallel for schedule(static) if (n > 1 << 16)
    for (size_t first = 0; first < n; first += 4096) {
        size_t last = min_size(first + 4096, n);
        switch (activation) { GATED(0, silu) GATED(1, gelu) GATED(2, gelu_tanh) GATED(3, relu) GATED(4, sigmoid) }
    }
}

// ---- attention ------------------------------------------------------------------------------------------------------
enum { KV_BLOCK = 64 };  // positions that attention takes at a time
typedef struct { float largest; double sum; } Softmax;  // score so far; of e^(score - largest) so far

// What a run needs besides the model: the cache and the arrays that a chunk of T <= chunk tokens passes through.
typedef struct {
    const Model *model;
    size_t context, chunk, logit_rows, position;  // position: tokens in the cache
    void *block;                                  // that holds all of these:
    float *k_cache, *v_cache;                     // (n_layers, n_kv_heads, context, head_dim)
    float *x, *normed, *branch;                   // (T, dim) the residual stream, a sublayer's input and its output
    float *q, *attended, *k, *v;                  // (T, n_heads, head_dim), of k and v (T, n_kv_heads, head_dim)
    float *scores;                                // (T, n_heads, KV_BLOCK)
    Softmax *softmax;                             // (T, n_heads)
    float *gate, *up, *cosine, *sine;             // (T, hidden_dim) and (n_rope_tables, T, rope_dim / 2)
    float *logits;                                // (logit_rows, vocab_size)
    float *hidden;                                // (n_layers + 1, context, dim) if asked for, else NULL
} Run;

// Values that the keys of one position take in all layers; so do the values.
static size_t cache_row(const Config *c) { return mul(c->n_layers, mul(c->n_kv_heads, c->head_dim)); }

// Sets the arrays to successive parts of a block, each aligned to 64 bytes; returns what they take together.
static size_t lay_out(Run *r, char *block) {
    const Config *c = &r->model->config;
    size_t T = r->chunk, q_dim = mul(c->n_heads, c->head_dim), kv_dim = mul(c->n_kv_heads, c->head_dim);
    size_t angles = mul(c->n_rope_tables, c->rope_dim / 2), cached = mul(cache_row(c), r->context), end = 0;
    struct { void *array; size_t rows, columns; } arrays[] = {
        {&r->x, T, c->dim}, {&r->normed, T, c->dim}, {&r->branch, T, c->dim}, {&r->q, T, q_dim},
        {&r->attended, T, q_dim}, {&r->k, T, kv_dim}, {&r->v, T, kv_dim}, {&r->scores, T, mul(c->n_heads, KV_BLOCK)},
        {&r->softmax, T, mul(c->n_heads, sizeof(Softmax) / sizeof(float))}, {&r->gate, T, c->hidden_dim},
        {&r->up, T, c->hidden_dim}, {&r->cosine, T, angles}, {&r->sine, T, angles},
        {&r->logits, r->logit_rows, c->vocab_size}, {&r->k_cache, 1, cached}, {&r->v_cache, 1, cached}};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        if (block) memcpy(arrays[i].array, &(char *){block + end}, sizeof(char *));
        end = round_up(add(end, mul(mul(arrays[i].rows, arrays[i].columns), sizeof(float))), 64);
    }
    return end;
}

static void new_run(Run *r, const Model *m, size_t context, size_t chunk, size_t logit_rows) {
    *r = (Run){.model = m, .context = context, .chunk = min_size(chunk, context), .logit_rows = logit_rows};
    r->block = allocate(add(lay_out(r, NULL), 63), 1, "the cache and a chunk of tokens");
    lay_out(r, (char *)round_up((size_t)r->block, 64));
}

// Cosine and sine of position * frequency for T positions by each table, the product and both functions in double.
static void rope_angles(Run *r, size_t T) {
    const Config *c = &r->model->config;
    size_t half = c->rope_dim / 2;
    for (size_t i = 0; i < c->n_rope_tables * T * half; i++) {
        size_t table = i / (T * half), t = i / half % T;
        double angle = (double)(r->position + t) * (double)r->model->rope_freq[table * half + i % half];
        double factor = table ? c->rope_attention_factor_local : c->rope_attention_factor;
        r->cosine[i] = (float)(cos(angle) * factor), r->sine[i] = (float)(sin(angle) * factor);
    }
}

// Rotary position embedding (Su et al. 2021) of heads (T, n_heads, head_dim) by a table counted from 1 (0: none): each
// pair (a, b) of the first rope_dim elements of a head is turned by its angle.
static void rope(const Run *r, float *heads, size_t T, size_t n_heads, size_t table) {
    const Config *c = &r->model->config;
    size_t half = c->rope_dim / 2, step = c->rope_pairs ? 2 : 1, apart = c->rope_pairs ? 1 : half;
    for (size_t row = 0; table && row < T * n_heads; row++, heads += c->head_dim) {
        size_t angles = ((table - 1) * T + row / n_heads) * half;
        const float *cosine = r->cosine + angles, *sine = r->sine + angles;
        for (size_t i = 0; i < half; i++) {
            float *a = heads + i * step, *b = a + apart, turned = *a * cosine[i] - *b * sine[i];
            *b = *b * cosine[i] + *a * sine[i], *a = turned;
        }
    }
}

// Copies T new heads of k or v (T, n_kv_heads, head_dim) to a layer's cache (n_kv_heads, context, head_dim).
static void store(const Run *r, float *cache, const float *heads, size_t T) {
    size_t n_kv_heads = r->model->config.n_kv_heads, head_dim = r->model->config.head_dim;
    for (size_t i = 0; i < T * n_kv_heads; i++)
        memcpy(cache + (i % n_kv_heads * r->context + r->position + i / n_kv_heads) * head_dim, heads + i * head_dim,
               head_dim * sizeof(float));
}

// Takes one block of scores into a head's running softmax: p becomes e^(scale * p - m), m the largest score so far.
// Returns e^(m before - m now), by which what has been summed so far must fade.
static float softmax_step(Softmax *s, float *p, size_t count, float scale, float cap) {
    float largest = s->largest, lane[LANES] = {0};
    for (size_t i = 0; i < count; i++) p[i] *= scale;
    for (size_t i = 0; cap > 0 && i < count; i++) p[i] = cap * fast_tanh(p[i] / cap);
    for (size_t i = 0; i < count; i++) largest = p[i] > largest ? p[i] : largest;
    for (size_t i = 0; i < count; i++) p[i] = fast_exp(p[i] - largest);
    for (size_t i = 0; i < count; i++) lane[i % LANES] += p[i];
    float fade = fast_exp(s->largest - largest);
    *s = (Softmax){largest, s->sum * (double)fade + (double)sum_lanes(lane)};
    return fade;
}

// Attention of the `group` query heads that share one key/value head, for one token that sees n positions:
//   out = softmax(scale * q . k) v,  q and out (group, head_dim), k and v (n, head_dim), scores (group, KV_BLOCK).
// The softmax is taken online (Milakov and Gimelshein 2018), a block of positions at a time, so that each key and value
// is read from memory once for all heads of the group; at the end out is divided by the sum of the weights.
static void attend(float *restrict out, Softmax *softmax, float *scores, const float *q, const float *k,
                   const float *restrict v, size_t n, size_t group, size_t head_dim, float scale, float cap) {
    for (size_t h = 0; h < group; h++) softmax[h] = (Softmax){-INFINITY, 0};
    memset(out, 0, group * head_dim * sizeof(float));
    for (size_t start = 0; start < n; start += KV_BLOCK, k += KV_BLOCK * head_dim, v += KV_BLOCK * head_dim) {
        size_t count = min_size(KV_BLOCK, n - start);
        matmul_rows(scores, KV_BLOCK, q, head_dim, k, head_dim, 0, count, group);
        for (size_t h = 0; h < group; h++) {
            float *p = scores + h * KV_BLOCK, *o = out + h * head_dim;
            float fade = softmax_step(&softmax[h], p, count, scale, cap);
            for (size_t d = 0; d < head_dim; d++) o[d] *= fade;
            for (size_t i = 0; i < count; i++)
                for (size_t d = 0; d < head_dim; d++) o[d] = __builtin_fmaf(p[i], v[i * head_dim + d], o[d]);
        }
    }
    for (size_t i = 0; i < group * head_dim; i++) out[i] = (float)((double)out[i] / softmax[i / head_dim].sum);
}

// Attention of T tokens at the run's position over a layer's cache, or a window of it if that is not 0. Threads share
// the pairs of token and kv head.
static void attention(Run *r, const float *k_cache, const float *v_cache, size_t window, size_t T) {
    const Config *c = &r->model->config;
    size_t n_kv_heads = c->n_kv_heads, head_dim = c->head_dim, group = c->n_heads / n_kv_heads;
    #pragma omp parallel for schedule(dynamic) if (T * c->n_heads * head_dim * (r->position + T) > 1 << 18)
    for (size_t i = 0; i < T * n_kv_heads; i++) {
        size_t cached = i % n_kv_heads * r->context * head_dim, head = i * group, n = r->position + i / n_kv_heads + 1;
        size_t out_of_sight = window && n > window ? n - window : 0;
        cached += out_of_sight * head_dim;
        attend(r->attended + head * head_dim, r->softmax + head, r->scores + head * KV_BLOCK, r->q + head * head_dim,
               k_cache + cached, v_cache + cached, n - out_of_sight, group, head_dim, (float)c->attention_scale,
               (float)c->attention_softcap);
    }
}

// ---- the forward pass -----------------------------------------------------------------------------------------------
// The input of a sublayer: x (T, dim) through the norm before it, as it is where there is none.
static const float *norm_before(Run *r, const float *weight, const float *bias, size_t T) {
    if (!weight) return r->x;
    norm(&r->model->config, r->normed, r->x, weight, bias, T, r->model->config.dim, 1);
    return r->normed;
}

// x (T, dim) += residual_scale * branch, through the norm after the sublayer where there is one.
static void add_branch(Run *r, const float *weight, const float *bias, size_t T) {
    const Config *c = &r->model->config;
    if (weight) norm(c, r->branch, r->branch, weight, bias, T, c->dim, 1);
    float *x = r->x, scale = (float)c->residual_scale;
    for (size_t i = 0, n = T * c->dim; i < n; i++) x[i] = __builtin_fmaf(r->branch[i], scale, x[i]);
}

// The norm of queries or keys (T, n_heads, head_dim): each head, each with a weight of its own, or all heads as one.
static void norm_heads(const Config *c, float *heads, const float *weight, size_t T, size_t n_heads) {
    if (c->qk_norm == 2) norm(c, heads, heads, weight, NULL, T, n_heads * c->head_dim, 1);
    else if (c->qk_norm) norm(c, heads, heads, weight, NULL, T * n_heads, c->head_dim, c->qk_norm == 3 ? n_heads : 1);
}

// Keeps T rows of x as hidden state `index` (of n_layers + 1), where hidden states are asked for.
static void keep_hidden(Run *r, size_t index, const float *x, size_t T) {
    size_t dim = r->model->config.dim;
    if (r->hidden) memcpy(r->hidden + (index * r->context + r->position) * dim, x, T * dim * sizeof(float));
}

// Takes T tokens (at most a chunk) at the run's position through all layers: keys and values go to the cache, what
// comes out, before the final norm, stays in r->x (T, dim). Prefill is T tokens at a time, decoding is T = 1. A layer:
//   x += Wo attention(rope(Wq n), rope(Wk n), Wv n), n = norm(x);  then x += W2 (act(W1 n) * (W3 n)), n = norm(x).
// The header says where norms stand, what each layer's attention sees and rotates, and by what numbers things scale.
static void forward(Run *r, const int *tokens, size_t T) {
    const Model *m = r->model;
    const Config *c = &m->config;
    size_t dim = c->dim, q_dim = c->n_heads * c->head_dim, kv_dim = c->n_kv_heads * c->head_dim;
    float *x = r->x, embedding_scale = (float)c->embedding_scale;
    for (size_t i = 0; i < T * dim; i++)
        x[i] = m->token_embedding[(size_t)tokens[i / dim] * dim + i % dim] * embedding_scale;
    rope_angles(r, T);
    for (size_t l = 0; l < c->n_layers; l++) {
        const Layer *w = &m->layers[l];
        float *k_cache = r->k_cache + l * kv_dim * r->context, *v_cache = r->v_cache + l * kv_dim * r->context;
        keep_hidden(r, l, x, T);

        const float *n = norm_before(r, w->attention_norm, w->attention_norm_bias, T);
        matmul(r->q, n, w->wq, w->bq, T, dim, q_dim);
        matmul(r->k, n, w->wk, w->bk, T, dim, kv_dim), matmul(r->v, n, w->wv, w->bv, T, dim, kv_dim);
        norm_heads(c, r->q, w->q_norm, T, c->n_heads), norm_heads(c, r->k, w->k_norm, T, c->n_kv_heads);
        rope(r, r->q, T, c->n_heads, w->rope), rope(r, r->k, T, c->n_kv_heads, w->rope);
        store(r, k_cache, r->k, T), store(r, v_cache, r->v, T);
        attention(r, k_cache, v_cache, w->window, T);
        matmul(r->branch, r->attended, w->wo, w->bo, T, q_dim, dim);
        add_branch(r, w->attention_post_norm, w->attention_post_norm_bias, T);

        if (!(c->norm_place & PARALLEL)) n = norm_before(r, w->ffn_norm, w->ffn_norm_bias, T);
        matmul(r->gate, n, w->w1, w->b1, T, dim, c->hidden_dim), matmul(r->up, n, w->w3, w->b3, T, dim, c->hidden_dim);
        gated(c->activation, r->gate, r->up, T * c->hidden_dim);
        matmul(r->branch, r->gate, w->w2, w->b2, T, c->hidden_dim, dim);
        add_branch(r, w->ffn_post_norm, w->ffn_post_norm_bias, T);
    }
    if (r->hidden) keep_hidden(r, c->n_layers, norm_before(r, m->final_norm, m->final_norm_bias, T), T);
    r->position += T;
}

// Logits (n, vocab_size) of rows first .. first + n of the chunk that forward() has just taken.
static const float *logits_of(Run *r, size_t first, size_t n) {
    const Model *m = r->model;
    const Config *c = &m->config;
    float cap = (float)c->logit_softcap, *logits = r->logits;
    norm(c, r->normed, r->x + first * c->dim, m->final_norm, m->final_norm_bias, n, c->dim, 1);
    matmul(logits, r->normed, m->classifier, m->classifier_bias, n, c->dim, c->vocab_size);
    for (size_t i = 0; c->logit_scale != 1 && i < n * c->vocab_size; i++)
        logits[i] = (float)((double)logits[i] * c->logit_scale);
    for (size_t i = 0; cap > 0 && i < n * c->vocab_size; i++) logits[i] = cap * fast_tanh(logits[i] / cap);
    return logits;
}

// ---- the tokenizer --------------------------------------------------------------------------------------------------
// Bytes to ids and back. Nothing here knows Unicode or a model: tokenizer.bin holds tables and small programs that
// export.py makes from the model's tokenizer.json. The file, version 1: the first fields of Tokenizer, its sections.

#define NONE UINT32_MAX  // in place of an id
#define AS(type, buffer) ((type *)(void *)(buffer).data)
enum { IDS, DATA, CHARS, PAIRS, BYTES, WORDS, MASKS, RANGES, CODE, STEPS, RAW, ADDED, POST, MAP, MAPPED, MARKS, COMPOSE,
       TURNS, ENDS, N_SECTIONS };
enum { OP_REPEAT, OP_SPLIT, OP_JUMP, OP_SUB, OP_BEHIND, OP_MATCH, N_OPS };
enum { STEP_ADDED, STEP_SPLIT, STEP_NORMALIZE, N_STEPS };
enum { BYTE_UNITS = 1, FUSE_UNK = 2, WHOLE_WORDS = 4, STRIP_AFTER_BOS = 8 };    // bits of a model
enum { SPECIAL = 1, LSTRIP = 2, RSTRIP = 4, SINGLE_WORD = 8, CONTROL = 16 };    // of an id (hidden), of an added token

// Columns of uint32, for the loader's checks: d offset in DATA and, next, length (m: in MAPPED, M: in MAP), i id, n id
// or NONE, u code point, r row of MASKS, k class, p row of CODE, a RAW or ADDED, . any. Rows ascend by `keys` columns.
static const struct { const char *columns; uint32_t width, keys; } sections[N_SECTIONS] = {
    [IDS] = {"d-.", 3, 0},         // what each id decodes to; flags
    [DATA] = {"", 0, 0},           // bytes
    [CHARS] = {"ui", 2, 1},        // code point (BYTE_UNITS: byte), id: the symbols that merging begins with
    [PAIRS] = {"ii.i", 4, 2},      // left id, right id, rank, merged id: the lowest rank merges first
    [BYTES] = {"n", 1, 0},         // none or 256 ids: what a character without a symbol becomes, byte by byte
    [WORDS] = {"..d-i", 5, 2},     // FNV-1a of the bytes (high, low), bytes, id: pieces that are one without merging
    [MASKS] = {"..", 2, 0},        // sets of character classes: bits 0-31, 32-63
    [RANGES] = {"ur", 2, 1},       // the set of every code point from this one, first 0, to the next row's
    [CODE] = {"....", 4, 0},       // op, a, b, c: the programs of patterns, see match()
    [STEPS] = {".....", 5, 0},     // kind, a, b, c, d: what is done to every text, in this order
    [RAW] = {"..d-i.", 6, 2},      // as WORDS; flags: added tokens, found in the text as it comes
    [ADDED] = {"..d-i.", 6, 2},    // the same, found in the normalized text
    [POST] = {"i", 1, 0},          // ids around every text: n_before in front, the others at the end
    [MAP] = {"um-", 3, 0},         // what a code point becomes; ascending in each step's part
    [MAPPED] = {"u", 1, 0},        // code points
    [MARKS] = {"u.", 2, 1},        // code point, canonical combining class
    [COMPOSE] = {"uu.u", 4, 2},    // two code points, 0, the one they compose to
    [TURNS] = {"d-d-d-d-d-d-d-kkkkkkkk..", 24, 0},  // the chat format, see render()
    [ENDS] = {"i", 1, 0},          // ids that end a reply
};

typedef struct { const uint32_t *at; size_t n; } Table;  // (n, width)

typedef struct {
    unsigned char magic[8];      // "run.t\r\n\x1a"
    size_t version, file_size, n_ids;
    uint64_t hash;               // fingerprint of the vocabulary, 0: unknown
    uint32_t bos, unk;           // BOS is in front of every text; NONE: there is none
    uint32_t model, n_before, word_class, space_class;           // \w and \s of added tokens
    uint32_t strip, zero;        // how many spaces decoding drops in front; NONE: all of the first token's
    struct { uint32_t offset, n; } section[32];                  // from the file's start; rows
    const char *path;            // from here on not in the file
    Table table[N_SECTIONS];
    const unsigned char *data;   // DATA
    uint32_t *first_pair;        // (n_ids + 1) row of PAIRS where each left id's begin
    uint16_t *mask;              // (0x110100) row of MASKS of each code point
} Tokenizer;

typedef struct { uint32_t c, class; bool content; } Mark;      // code point, canonical combining class
typedef struct { uint32_t pc; size_t least, i; } Choice;       // on at pc from byte i, then each before it to least
typedef struct { uint32_t id, before, next, merged; } Symbol;  // neighbours, and what it makes with the next; or NONE
typedef struct { uint64_t order; uint32_t merged; } Merge;     // rank, position
// A part of the text. leads: starts where the whole text does; content (size): 1 where CONTROL tokens are plain text
typedef struct { const unsigned char *s; size_t size; bool leads; const unsigned char *content; } Stretch;

typedef struct {  // what encoding one text needs
    const Tokenizer *t;
    uint64_t budget;  // steps of patterns and bytes that may still be spent
    int depth;
    Buffer choices, symbols, merges, ids;
} Encoder;

// The first code point of s[0, n) and its length. A byte that begins no character is one of its own, 0x110000 + byte.
static size_t utf8_decode(const unsigned char *s, size_t n, uint32_t *c) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t length = s[0] < 0x80 ? 1 : s[0] < 0xC0 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF8 ? 4 : 0;
    uint32_t value = length > 1 ? s[0] & (0x7Fu >> length) : s[0];
    bool valid = length && length <= n;
    for (size_t k = 1; valid && k < length; k++) valid = (s[k] & 0xC0) == 0x80, value = value << 6 | (s[k] & 0x3F);
    valid = valid && value >= least[length] && value < 0x110000 && (value < 0xD800 || value > 0xDFFF);
    *c = valid ? value : 0x110000u + s[0];
    return valid ? length : 1;
}

static void utf8_append(Buffer *b, uint32_t c) {
    size_t n = c < 0x80 || c >= 0x110000 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    unsigned char s[4] = {(unsigned char)c};
    for (size_t k = n; n > 1 && k--; c >>= 6) s[k] = (unsigned char)(k ? 0x80 | (c & 0x3F) : (0xF0u << (4 - n)) | c);
    append(b, s, n);
}

// Of rows [from, to) of a section the one whose keys are a (and b), or NULL.
static const uint32_t *find_row(const Tokenizer *t, int section, size_t from, size_t to, uint32_t a, uint32_t b) {
    for (size_t width = sections[section].width, keys = sections[section].keys; from < to;) {
        size_t middle = from + (to - from) / 2;
        const uint32_t *row = t->table[section].at + middle * width, second = keys < 2 ? b : row[1];
        if (row[0] == a && second == b) return row;
        if (row[0] < a || (row[0] == a && second < b)) from = middle + 1;
        else to = middle;
    }
    return NULL;
}

static const uint32_t *find(const Tokenizer *t, int section, uint32_t a, uint32_t b) {
    return find_row(t, section, 0, t->table[section].n, a, b);
}

static uint64_t hash_bytes(const unsigned char *s, size_t n) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ s[i]) * 1099511628211u;
    return hash;
}

// The row of WORDS, RAW or ADDED with these bytes, or NULL.
static const uint32_t *find_bytes(const Tokenizer *t, int section, const unsigned char *s, size_t n) {
    uint64_t hash = hash_bytes(s, n);
    const uint32_t *row = find(t, section, (uint32_t)(hash >> 32), (uint32_t)hash);
    return row && row[3] == n && !memcmp(t->data + row[2], s, n) ? row : NULL;
}

// The length of the code point at (before) byte i if it is of class k, else 0.
static size_t class_at(const Tokenizer *t, const Stretch *x, size_t i, uint32_t k) {
    uint32_t c;
    size_t n = i < x->size ? utf8_decode(x->s + i, x->size - i, &c) : 0;
    return n && t->table[MASKS].at[2 * t->mask[c] + k / 32] >> k % 32 & 1 ? n : 0;
}

static size_t class_before(const Tokenizer *t, const Stretch *x, size_t i, uint32_t k) {
    uint32_t c;
    size_t n = min_size(i, 4);  // the character of n bytes that ends at i, else a byte that is none
    while (n > 1 && (utf8_decode(x->s + i - n, n, &c) < n)) n--;
    return n ? class_at(t, &(Stretch){.s = x->s, .size = i}, i - n, k) : 0;
}

static void spend(Encoder *e, size_t n) {
    if (e->budget < n) die("tokenizer %s takes too long on this text (split the text)", e->t->path);
    e->budget -= n;
}

// Patterns: runs the program at pc from byte i on, backtracking. Where the match ends, or SIZE_MAX.
static size_t match(Encoder *e, const Stretch *x, uint32_t pc, size_t i) {
    const uint32_t *code = e->t->table[CODE].at;
    size_t base = e->choices.size, k, n, least;
    if (e->depth++ == 32) die("tokenizer %s has a pattern nested too deeply (export it again)", e->t->path);
    for (bool good = true;; good = true) {
        const uint32_t *op = code + 4 * pc++, a = op[1], b = op[2], c = op[3];
        uint32_t count = 0;
        if (op[0] == OP_MATCH) break;
        if (op[0] == OP_REPEAT) {  // b to c code points of class a: as many as there are, then fewer
            for (k = least = i; count < c && (n = class_at(e->t, x, k, a)); least = ++count <= b ? k : least) k += n;
            good = count >= b;
            Choice fewer = {pc, least, k - class_before(e->t, x, k, a)};
            if (good && k > least) append(&e->choices, &fewer, sizeof fewer);
            i = k;
        } else if (op[0] == OP_SPLIT) {  // on at a, then at b
            append(&e->choices, &(Choice){b, i, i}, sizeof(Choice));
            pc = a;
        } else if (op[0] == OP_JUMP) pc = a;
        else if (op[0] == OP_SUB) {  // what follows, by itself, then on at a; b: 0 look-ahead, 1 negative, 2 atomic
            k = match(e, x, pc, i), pc = a;
            good = (k == SIZE_MAX) == (b == 1);
            if (b == 2) i = k;
        } else good = (class_before(e->t, x, i, a) > 0) != (b == 1) && (!c || x->leads);  // behind a, b: not; c: leads
        spend(e, e->choices.size - base > 4 * sizeof(Choice) * (x->size + 64) ? SIZE_MAX : count + 1);
        if (good) continue;
        i = SIZE_MAX;
        if (e->choices.size == base) break;
        Choice *next = AS(Choice, e->choices) + e->choices.size / sizeof *next - 1;
        pc = next->pc, i = next->i;
        if (i == next->least) e->choices.size -= sizeof *next;
        else next->i -= class_before(e->t, x, i, code[4 * (pc - 1) + 1]);  // of the OP_REPEAT
    }
    e->choices.size = base, e->depth--;
    return i;
}

// The next match, leftmost; an empty one does not touch the one before. *start is SIZE_MAX before the first.
static bool next_match(Encoder *e, const Stretch *x, uint32_t pc, size_t *start, size_t *end) {
    uint32_t c;
    for (size_t i = *end; i <= x->size; i += i < x->size ? utf8_decode(x->s + i, x->size - i, &c) : 1) {
        size_t stop = match(e, x, pc, i);
        if (stop == SIZE_MAX || (stop == i && i == *end && *start != SIZE_MAX)) continue;
        *start = i, *end = stop;
        return true;
    }
    return false;
}

static void run_steps(Encoder *e, size_t step, Stretch x);

static Stretch part_of(const Stretch *x, size_t from, size_t to) {
    return (Stretch){x->s + from, to - from, x->leads && !from, x->content + from};
}

// STEP_ADDED: tokens of section a become ids, leftmost-longest. They begin with a code point of class b, go on with one
// of class c and have at most d bytes.
static void split_added(Encoder *e, size_t k, const Stretch *x) {
    const Tokenizer *t = e->t;
    const uint32_t *step = t->table[STEPS].at + 5 * k;
    size_t done = 0, end;
    for (size_t i = 0, n; i <= x->size; i = end) {
        const uint32_t *a = NULL;
        size_t start = i, first = class_at(t, x, i, step[2]), length = min_size(step[4], x->size - i);
        bool here = first && (i + first == x->size || class_at(t, x, i + first, step[3]));
        for (; here && length && !a; spend(e, length--)) {
            a = find_bytes(t, (int)step[1], x->s + i, length);
            if (a && a[5] & CONTROL && memchr(x->content + i, 1, length)) a = NULL;
        }
        size_t stop = end = i + (a ? a[3] : 1);
        uint32_t flags = a ? a[5] : 0;
        if (flags & SINGLE_WORD &&
            (class_before(t, x, i, t->word_class) || class_at(t, x, end, t->word_class))) continue;
        if (flags & LSTRIP && start < done) start = done;
        while (flags & LSTRIP && start > done && (n = class_before(t, x, start, t->space_class))) start -= n;
        while (flags & RSTRIP && (n = class_at(t, x, stop, t->space_class))) stop += n;
        if ((a || i == x->size) && done < start) run_steps(e, k + 1, part_of(x, done, start));
        if (a && start < stop) append(&e->ids, &a[4], sizeof a[4]);  // not in spaces that the last one took
        if (a) done = stop;
    }
}

// STEP_SPLIT: matches of program a (kind 1) and what lies between them (kind 0). A new piece begins where bit 2 x (kind
// before) + kind of b is set; a kind whose bit 4 + kind of b is set becomes the d bytes at c.
static void split_pattern(Encoder *e, size_t k, const Stretch *x) {
    const uint32_t *step = e->t->table[STEPS].at + 5 * k, bits = step[2];
    Buffer piece = {0}, content = {0};
    bool leads = x->leads, more = true;
    size_t start = SIZE_MAX, end = 0;
    for (uint32_t kind, last = 2; more;) {
        size_t part[3] = {end, x->size, x->size};
        if ((more = next_match(e, x, step[1], &start, &end))) part[1] = start, part[2] = end;
        for (kind = part[0] == part[1]; kind < 1u + more; last = kind++) {
            if (last < 2 && bits >> (2 * last + kind) & 1) {
                run_steps(e, k + 1, (Stretch){piece.data, piece.size, leads, content.data});
                piece.size = content.size = 0, leads = false;
            }
            bool replaced = bits >> (4 + kind) & 1;
            Stretch p = part_of(x, part[kind], part[kind + 1]);
            unsigned char typed = p.size && memchr(p.content, 1, p.size);
            spend(e, replaced ? step[4] : 0);
            append(&piece, replaced ? e->t->data + step[3] : p.s, replaced ? step[4] : p.size);
            if (!replaced) append(&content, p.content, p.size);
            while (content.size < piece.size) append(&content, &typed, 1);
        }
    }
    run_steps(e, k + 1, (Stretch){piece.data, piece.size, leads, content.data});
    free(piece.data), free(content.data);
}

// Appends c behind those of its combining class: canonical ordering.
static void push_mark(Encoder *e, Buffer *marks, uint32_t c, bool ordered, bool content) {
    const uint32_t *row = ordered ? find(e->t, MARKS, c, 0) : NULL;
    Mark new = {c, row ? row[1] : 0, content}, *m;
    append(marks, &new, sizeof new);
    m = AS(Mark, *marks) + marks->size / sizeof new - 1;
    for (; new.class && m > AS(Mark, *marks) && m[-1].class > new.class; m--) *m = m[-1], spend(e, 1);
    *m = new;
}

// Canonical composition: each mark joins the last starter unless one of its class or above stands between. The new n.
static size_t compose(const Tokenizer *t, Mark *m, size_t n) {
    size_t out = 0, starter = SIZE_MAX;
    for (size_t i = 0; i < n; i++) {
        bool open = starter < out && (starter == out - 1 || m[out - 1].class < m[i].class);
        const uint32_t *pair = open ? find(t, COMPOSE, m[starter].c, m[i].c) : NULL;
        if (pair) m[starter].c = pair[3], m[starter].content |= m[i].content;
        else starter = m[i].class ? starter : out, m[out++] = m[i];
    }
    return out;
}

// STEP_NORMALIZE: code points become what the d rows of MAP from c on say; a & 1: canonical ordering, a & 2:
// composition; nothing if none is of class b.
static void normalize(Encoder *e, size_t k, const Stretch *x) {
    const Tokenizer *t = e->t;
    const uint32_t *step = t->table[STEPS].at + 5 * k, *mapped = t->table[MAPPED].at;
    Buffer marks = {0}, out = {0}, content = {0};
    bool as_is = true;
    for (size_t i = 0; i < x->size; i++) as_is = as_is && !class_at(t, x, i, step[2]);
    for (size_t i = 0, length; i < x->size && !as_is; i += length) {
        uint32_t c;
        length = utf8_decode(x->s + i, x->size - i, &c);
        const uint32_t *row = find_row(t, MAP, step[3], step[3] + step[4], c, 0), *to = row ? mapped + row[1] : &c;
        spend(e, row ? row[2] : 1);
        for (size_t j = 0; j < (row ? row[2] : 1); j++) push_mark(e, &marks, to[j], step[1] & 1, x->content[i]);
    }
    Mark *m = AS(Mark, marks);
    size_t n = marks.size / sizeof *m;
    if (step[1] & 2) n = compose(t, m, n);
    for (size_t i = 0; i < n; i++)
        for (utf8_append(&out, m[i].c); content.size < out.size;) append(&content, &(unsigned char){m[i].content}, 1);
    run_steps(e, k + 1, as_is ? *x : (Stretch){out.data, out.size, x->leads, content.data});
    free(marks.data), free(out.data), free(content.data);
}

static void push_symbol(Encoder *e, uint32_t id) {
    uint32_t i = (uint32_t)(e->symbols.size / sizeof(Symbol));
    append(&e->symbols, &(Symbol){id, i - 1, i + 1, NONE}, sizeof(Symbol));
}

// Byte-pair encoding begins with these. A character without a symbol becomes its byte tokens, else unk, else nothing.
static void push_symbols(Encoder *e, const unsigned char *s, size_t size) {
    const Tokenizer *t = e->t;
    const uint32_t *bytes = t->table[BYTES].n ? t->table[BYTES].at : NULL;
    bool due = false;  // an unk; byte tokens overtake it, as in `tokenizers`
    for (size_t i = 0, n; i < size; i += n) {
        uint32_t c = s[i];
        n = t->model & BYTE_UNITS ? 1 : utf8_decode(s + i, size - i, &c);
        const uint32_t *row = find(t, CHARS, c, 0);
        bool as_bytes = !row && bytes;
        for (size_t k = 0; k < n; k++) as_bytes = as_bytes && bytes[s[i + k]] != NONE;
        for (size_t k = 0; k < n && as_bytes; k++) push_symbol(e, bytes[s[i + k]]);
        if (as_bytes || (!row && t->unk == NONE)) continue;
        if (due && (row || !(t->model & FUSE_UNK))) push_symbol(e, t->unk);
        due = !row;
        if (row) push_symbol(e, row[1]);
    }
    if (due) push_symbol(e, t->unk);
}

// Finds what symbol i makes with the next one and puts the merge on the heap.
static void push_merge(Encoder *e, uint32_t i) {
    const uint32_t *first = e->t->first_pair, *pair = NULL;
    Symbol *s = AS(Symbol, e->symbols) + i;
    if (s->next != NONE) pair = find_row(e->t, PAIRS, first[s->id], first[s->id + 1], s->id, s[s->next - i].id);
    s->merged = pair ? pair[3] : NONE;
    if (!pair) return;
    Merge new = {(uint64_t)pair[2] << 32 | i, pair[3]};
    size_t k = e->merges.size / sizeof new;
    append(&e->merges, &new, sizeof new);
    Merge *heap = AS(Merge, e->merges);
    for (; k > 0 && heap[(k - 1) / 2].order > new.order; k = (k - 1) / 2) heap[k] = heap[(k - 1) / 2];
    heap[k] = new;
}

static Merge pop_merge(Encoder *e) {
    Merge *heap = AS(Merge, e->merges), first = heap[0];
    size_t n = (e->merges.size -= sizeof first) / sizeof first, k = 0;
    for (size_t child; (child = 2 * k + 1) < n; k = child) {
        if (child + 1 < n && heap[child + 1].order < heap[child].order) child++;
        if (heap[child].order >= heap[n].order) break;
        heap[k] = heap[child];
    }
    heap[k] = heap[n];
    return first;
}

// Byte-pair encoding of one piece: the neighbours of lowest rank merge first, the leftmost of these. O(n log n).
static void merge_piece(Encoder *e, const unsigned char *s, size_t size) {
    const uint32_t *word = e->t->model & WHOLE_WORDS ? find_bytes(e->t, WORDS, s, size) : NULL;
    e->symbols.size = 0;
    if (word) push_symbol(e, word[4]);
    else push_symbols(e, s, size);
    Symbol *x = AS(Symbol, e->symbols);
    size_t n = e->symbols.size / sizeof *x;
    if (n) x[n - 1].next = NONE;
    for (uint32_t i = 0; i < n; i++) push_merge(e, i);
    while (e->merges.size) {
        Merge m = pop_merge(e);
        uint32_t i = (uint32_t)m.order, next = x[i].next;
        if (x[i].merged != m.merged) continue;  // one of the two has merged otherwise
        x[i].id = m.merged, x[i].next = x[next].next, x[next].id = x[next].merged = NONE;
        if (x[i].next != NONE) x[x[i].next].before = i;
        if (x[i].before != NONE) push_merge(e, x[i].before);
        push_merge(e, i);
    }
    for (size_t i = 0; i < n; i++)
        if (x[i].id != NONE) append(&e->ids, &x[i].id, sizeof x[i].id);
}

// Takes a stretch of the text through the steps from number `step` on; a piece that has come through is merged.
static void run_steps(Encoder *e, size_t step, Stretch x) {
    static void (*const kinds[N_STEPS])(Encoder *, size_t, const Stretch *) = {split_added, split_pattern, normalize};
    if (!x.size) return;
    spend(e, x.size < NONE / 4 ? x.size : SIZE_MAX);
    if (step == e->t->table[STEPS].n) merge_piece(e, x.s, x.size);
    else kinds[e->t->table[STEPS].at[5 * step]](e, step, &x);
}

// The ids of a text, with those that the tokenizer adds around it unless bytes of content are marked, as in a chat. The
// caller frees them.
static int *encode(const Tokenizer *t, const unsigned char *text, const unsigned char *content, size_t size,
                          size_t *n) {
    Encoder e = {.t = t, .budget = 10000000 + 2000 * (uint64_t)size};
    const uint32_t *post = t->table[POST].at, *bytes = t->table[BYTES].n ? t->table[BYTES].at : NULL;
    for (size_t i = 0, length; i < size; i += length) {
        uint32_t c;
        length = utf8_decode(text + i, size - i, &c);
        bool has = t->model & BYTE_UNITS ? find(t, CHARS, text[i], 0) != NULL : bytes && bytes[text[i]] != NONE;
        if (c >= 0x110000 && !has)
            die("byte %zu of the text, %02X, is not UTF-8 and no token of %s (mend the text)", i, text[i], t->path);
    }
    unsigned char *none = content ? NULL : allocate(size, 1, "a text");
    if (!content) append(&e.ids, post, t->n_before * sizeof *post);
    run_steps(&e, 0, (Stretch){text, size, true, content ? content : none});
    if (!content) append(&e.ids, post + t->n_before, (t->table[POST].n - t->n_before) * sizeof *post);
    free(none), free(e.choices.data), free(e.symbols.data), free(e.merges.data);
    *n = e.ids.size / sizeof(int);
    return AS(int, e.ids);
}

typedef struct {            // begins as {0}
    unsigned char held[4];  // the first bytes of a character whose others are yet to come
    uint32_t n_held, stripped;
    bool started;           // spaces stay from now on
} Decoder;

static void decode_end(Decoder *d, Buffer *out) {
    append(out, d->held, d->n_held);
    d->n_held = 0;
}

// Appends what an id adds to the text; of a character that is not complete, nothing yet.
static void decode(const Tokenizer *t, Decoder *d, int id, bool show_special, Buffer *out) {
    if (id < 0 || (size_t)id >= t->n_ids) return;
    const uint32_t *row = t->table[IDS].at + 3 * (size_t)id;
    for (uint32_t i = 0; i < row[1] && (show_special || !(row[2] & SPECIAL)); i++) {
        unsigned char byte = t->data[row[0] + i], first = d->n_held && (byte & 0xC0) == 0x80 ? d->held[0] : byte;
        bool drop = !d->started && byte == ' ' && d->stripped < t->strip;
        d->stripped += drop;
        d->started |= t->strip == NONE ? i + 1 == row[1] : !drop;
        if (drop) continue;
        if ((byte & 0xC0) != 0x80) decode_end(d, out);
        d->held[d->n_held++] = byte;
        uint32_t length = first < 0xC2 || first > 0xF4 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
        if (d->n_held >= length) decode_end(d, out);
    }
    if (t->model & STRIP_AFTER_BOS && (uint32_t)id == t->bos) decode_end(d, out), *d = (Decoder){0};  // llama2.c
}

static void sound(const Tokenizer *t, bool good, const char *what) {
    if (!good) die("tokenizer %s has a bad %s (it is damaged or of another version: export it again)", t->path, what);
}

// Whether the numbers of a row are what its columns say.
static bool is_sound(const Tokenizer *t, const char *columns, const uint32_t *v) {
    static const char kinds[] = "inurkpadmM";
    const size_t limits[] = {t->n_ids, t->n_ids, 0x110100, t->table[MASKS].n, 64, t->table[CODE].n, ADDED + 1,
                             t->table[DATA].n, t->table[MAPPED].n, t->table[MAP].n};
    for (; *columns; columns++, v++) {
        const char *kind = strchr(kinds, *columns);
        size_t limit = kind ? limits[kind - kinds] : SIZE_MAX;
        if (columns[1] == '-' && (*v > limit || v[1] > limit - *v)) return false;
        if (columns[1] != '-' && kind && *v >= limit && !(*kind == 'n' && *v == NONE)) return false;
        if (*columns == 'a' && *v < RAW) return false;
    }
    return true;
}

// Points the tables into the file and checks every number in them.
static void load_sections(Tokenizer *t, File f) {
    static const char *const ops[N_OPS] = {".k..", ".pp.", ".p..", ".p..", ".k..", "...."};
    static const char *const steps[N_STEPS] = {".akk.", ".p.d-", "..kM-"};
    memcpy(t, f.data, offsetof(Tokenizer, path));
    sound(t, t->version == 1 && t->file_size == f.size, "version or size");
    for (int k = 0; k < 32; k++) {
        size_t offset = t->section[k].offset, n = t->section[k].n, width = k < N_SECTIONS ? sections[k].width : 0;
        bool fits = offset % 4 == 0 && offset <= f.size && n * (width ? 4 * width : 1) <= f.size - offset;
        sound(t, fits && (!n || k < N_SECTIONS), "section");
        if (n) t->table[k].at = (const uint32_t *)(const void *)(f.data + offset), t->table[k].n = n;
    }
    for (int k = 0; k < N_SECTIONS; k++)
        for (size_t i = 0, width = sections[k].width, keys = sections[k].keys; i < t->table[k].n && width; i++) {
            const uint32_t *row = t->table[k].at + i * width, *last = i ? row - width : row;
            if (k == CODE || k == STEPS) sound(t, row[0] < (k == CODE ? (int)N_OPS : (int)N_STEPS), "step");
            const char *columns = k == CODE ? ops[row[0]] : k == STEPS ? steps[row[0]] : sections[k].columns;
            sound(t, is_sound(t, columns, row), "number in a section");
            sound(t, !i || !keys || last[0] < row[0] || (last[0] == row[0] && keys > 1 && last[1] < row[1]), "order");
        }
    size_t n_code = t->table[CODE].n, n_bytes = t->table[BYTES].n, n_post = t->table[POST].n;
    sound(t, t->n_ids - 1 < INT_MAX && t->table[IDS].n == t->n_ids && is_sound(t, "nn..kk", &t->bos), "header");
    sound(t, !t->zero, "header");
    sound(t, t->table[RANGES].n && !t->table[RANGES].at[0] && t->table[MASKS].n <= 65536, "character class");
    sound(t, !n_code || t->table[CODE].at[4 * n_code - 4] == OP_MATCH, "pattern");
    sound(t, (!n_bytes || n_bytes == 256) && t->n_before <= n_post && n_post <= 64 && t->table[STEPS].n <= 64, "size");
    t->data = (const unsigned char *)t->table[DATA].at;
}

static int compare_keys(const void *a, const void *b) {
    const uint32_t *x = a, *y = b;
    return x[0] != y[0] ? (x[0] < y[0] ? -1 : 1) : (x[1] > y[1]) - (x[1] < y[1]);
}

static void add_row(Tokenizer *t, Buffer *rows, int section, const uint32_t *row) {
    append(&rows[section], row, sections[section].width * sizeof *row);
    t->table[section].at = AS(uint32_t, rows[section]), t->table[section].n++;
}

// Reads llama2.c's tokenizer.bin: uint32 longest piece, then for each id float32 score, int32 length, bytes. Ids 0 to 2
// are unk, BOS and EOS, the next 256 the bytes, a space goes in front of a text, and any two pieces merge that make a
// third one, the best score first.
static void load_llama2c_tokenizer(Tokenizer *t, File f) {
    static const uint32_t code[] = {OP_BEHIND, 0, 1, 0, OP_MATCH, 0, 0, 0}, any[] = {1, 0}, from_0[] = {0, 0};
    Buffer *rows = allocate(N_SECTIONS, sizeof *rows, "the tokenizer");
    uint32_t size = (uint32_t)f.size, n = 0, longest = 0;
    memcpy(&longest, f.data, min_size(4, f.size));
    sound(t, f.size < NONE / 2 && longest <= 512, "size, if it is a tokenizer");
    append(&rows[DATA], f.data, f.size);
    for (uint32_t at = 4, id = 0; at < size; at += n, id++) {
        sound(t, size - at >= 8, "end, if it is a tokenizer");
        memcpy(&n, f.data + at + 4, 4), at += 8;
        sound(t, n <= longest && n <= size - at, "piece, if it is a tokenizer");
        uint64_t hash = hash_bytes(f.data + at, n);
        bool byte = id - 3 < 256;
        add_row(t, rows, IDS, (uint32_t[]){byte ? size + id - 3 : at, byte ? 1 : n, id == 1 || id == 2 ? SPECIAL : 0});
        add_row(t, rows, WORDS, (uint32_t[]){(uint32_t)(hash >> 32), (uint32_t)hash, at, n, id});
    }
    sound(t, t->table[IDS].n >= 259, "number of pieces, if it is a tokenizer");
    for (uint32_t b = 0; b < 256; b++) append(&rows[DATA], &b, 1), add_row(t, rows, BYTES, (uint32_t[]){b + 3});
    t->data = rows[DATA].data;
    qsort(rows[WORDS].data, t->table[WORDS].n, 5 * sizeof(uint32_t), compare_keys);
    for (const uint32_t *w = t->table[WORDS].at, *end = w + 5 * t->table[WORDS].n, *left, *right; w < end; w += 5) {
        const unsigned char *s = t->data + w[2];
        uint32_t rank, c;
        float score;
        if (!w[3] || find_bytes(t, WORDS, s, w[3]) != w) continue;  // the same piece again
        memcpy(&score, s - 8, 4);
        sound(t, score == score, "score");
        score += 0.0f;  // -0 is 0
        memcpy(&rank, &score, 4);
        rank = rank >> 31 ? rank : ~rank - (1u << 31);  // falls as the score rises
        if (utf8_decode(s, w[3], &c) == w[3]) add_row(t, rows, CHARS, (uint32_t[]){c, w[4]});
        for (uint32_t k = 1; k < w[3]; k++)
            if ((left = find_bytes(t, WORDS, s, k)) && (right = find_bytes(t, WORDS, s + k, w[3] - k)))
                add_row(t, rows, PAIRS, (uint32_t[]){left[4], right[4], rank, w[4]});
    }
    if (t->table[CHARS].n) qsort(rows[CHARS].data, t->table[CHARS].n, 2 * sizeof(uint32_t), compare_keys);
    if (t->table[PAIRS].n) qsort(rows[PAIRS].data, t->table[PAIRS].n, 4 * sizeof(uint32_t), compare_keys);
    add_row(t, rows, STEPS, (uint32_t[]){STEP_SPLIT, 0, 1 << 5, size + ' ', 1});
    add_row(t, rows, POST, (uint32_t[]){1});
    t->table[CODE].at = code, t->table[MASKS].at = any, t->table[RANGES].at = from_0, t->table[RANGES].n = 1;
    t->n_ids = t->table[IDS].n, t->bos = t->n_before = t->strip = 1, t->model = FUSE_UNK | STRIP_AFTER_BOS;
}

static void tokenizer_load(Tokenizer *t, const char *path) {
    static const uint32_t nothing[8];
    File f = map_file(path);
    *t = (Tokenizer){.path = path};
    for (int k = 0; k < N_SECTIONS; k++) t->table[k].at = nothing;
    if (f.size < offsetof(Tokenizer, path) || memcmp(f.data, "run.t\r\n\x1a", 8)) load_llama2c_tokenizer(t, f);
    else load_sections(t, f);
    const uint32_t *pair = t->table[PAIRS].at, *range = t->table[RANGES].at;
    t->first_pair = allocate(t->n_ids + 1, sizeof *t->first_pair, "the tokenizer");
    for (size_t i = 0; i < t->table[PAIRS].n; i++) t->first_pair[pair[4 * i] + 1]++;
    for (size_t i = 0; i < t->n_ids; i++) t->first_pair[i + 1] += t->first_pair[i];
    t->mask = allocate(0x110100, sizeof *t->mask, "the tokenizer");
    for (size_t i = 1, c = 0; i <= t->table[RANGES].n; i++)
        for (; c < (i < t->table[RANGES].n ? range[2 * i] : 0x110100); c++) t->mask[c] = (uint16_t)range[2 * i - 1];
}

// ---- the chat format ------------------------------------------------------------------------------------------------
// export.py takes the model's chat template apart. A row of TURNS is what it writes around a turn, the first or a later
// one, without a system prompt and, if it takes any, with it: texts (PAST before a turn that has a reply, LAST before
// one that awaits it, in halves between which the system prompt may stand), classes of what it strips from contents,
// left and right, bits, and how many bytes of the text before an empty content go with it.

enum { PAST = 0, LAST = 4, BETWEEN = 8, PROMPT = 10, CUT = 12, OF_USER = 14, OF_REPLY = 16, OF_CUT = 18, OF_SYSTEM = 20,
       BITS = 22, DROP, TURN_WIDTH };
enum { IN_PAST = 1, IN_LAST = 2, EMPTY_IS_NONE = 4 };  // BITS: where the system prompt stands, what an empty one is

// A content, of a kind OF_..., as the template repeats it: stripped; a reply without all up to the last CUT, </think>.
static Buffer repeated(const Tokenizer *t, Buffer b, const uint32_t *row, int kind) {
    Stretch x = {.s = b.data, .size = b.size};
    size_t start = 0, n = kind == OF_REPLY ? row[CUT + 1] : 0;
    for (size_t i = n ? b.size : 0; i >= n && i && !start; i--)
        if (!memcmp(b.data + i - n, t->data + row[CUT], n)) start = i, kind = OF_CUT;
    while ((n = class_at(t, &x, start, row[kind]))) start += n;
    while (x.size > start && (n = class_before(t, &x, x.size, row[kind + 1]))) x.size -= n;
    return b.size ? (Buffer){b.data + start, x.size - start, 0} : b;
}

// The ids of n messages, users' and replies in turn, up to where the next reply begins.
static int *render(const Tokenizer *t, const char *system, const Buffer *messages, size_t n, size_t *n_ids) {
    const uint32_t *rows = t->table[TURNS].at + (system ? 2 * TURN_WIDTH : 0);
    Buffer text = {0}, content = {0}, given = {0};
    append(&given, system, system ? strlen(system) : 0);
    if (rows[BITS] & EMPTY_IS_NONE && !repeated(t, given, rows, OF_SYSTEM).size) rows = t->table[TURNS].at;
    for (size_t k = 0; k < n; k += 2) {
        bool last = k + 1 == n;
        const uint32_t *row = rows + (k ? TURN_WIDTH : 0), *before = row + (last ? LAST : PAST);
        const uint32_t *after = row + (last ? PROMPT : BETWEEN);
        Buffer user = repeated(t, messages[k], row, OF_USER), reply = {0}, prompt = {0};
        if (row[BITS] & (last ? IN_LAST : IN_PAST)) prompt = repeated(t, given, row, OF_SYSTEM);
        if (!last) reply = repeated(t, messages[k + 1], row, OF_REPLY);
        const struct { const unsigned char *s; size_t n; } parts[] = {  // the template's texts and contents by turns
            {t->data + before[0], before[1]}, {prompt.data, prompt.size},
            {t->data + before[2], before[3] - (user.size ? 0 : min_size(before[3], row[DROP]))}, {user.data, user.size},
            {t->data + after[0], after[1]}, {reply.data, reply.size}};
        for (int p = 0; p < 6; p++)
            for (append(&text, parts[p].s, parts[p].n); content.size < text.size;) append(&content, &"\0\1"[p & 1], 1);
    }
    int *ids = encode(t, text.data, content.data, text.size, n_ids);
    if (!*n_ids) die("the conversation has no tokens (say something)");
    free(text.data), free(content.data), free(given.data);
    return ids;
}

// ---- the sampler ----------------------------------------------------------------------------------------------------
typedef struct { float logit, weight; int id; } Candidate;  // weight: proportional to the probability
typedef struct {
    size_t vocab_size, top_k;                   // top_k 0: off
    double temperature, top_p, min_p, penalty;  // temperature 0: greedy
    uint64_t state;                             // of the generator
    bool *seen;                                 // (vocab_size) ids of the prompt and the output
    float *logits;                              // (vocab_size) after the repetition penalty
    Candidate *candidates;                      // (vocab_size)
    double *weights;                            // (vocab_size) by id, 0 for what a filter removed
} Sampler;

static void new_sampler(Sampler *s, size_t n) {
    s->vocab_size = n, s->candidates = allocate(n, sizeof *s->candidates, "the sampler");
    s->seen = allocate(n, sizeof *s->seen, "the sampler"), s->logits = allocate(n, sizeof *s->logits, "the sampler");
    s->weights = allocate(n, sizeof *s->weights, "the sampler");
}

// The next number in [0, 1), uniform in steps of 2^-24, from SplitMix64 (Steele, Lea and Flood 2014). Any seed will do.
static float uniform(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (float)((z ^ z >> 31) >> 40) * 0x1p-24f;
}

// The order of candidates: the larger logit first, at a tie the lower id.
static bool goes_before(Candidate a, Candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }
static void swap(Candidate *a, Candidate *b) { Candidate c = *a; *a = *b, *b = c; }

// Moves the best of n candidates to the front: the fewest whose weights add up to goal, at least one. Returns how many.
// A quickselect: only the side of the pivot on which the goal is reached is looked at again.
static size_t keep_best(Candidate *c, size_t n, double goal) {
    size_t low = 0, high = n;
    double kept = 0;  // weight of those before low
    for (goal = fmax(goal, DBL_MIN); low < high && kept < goal;) {
        size_t split = low;
        double sum = kept;  // weight of those before split
        swap(&c[low + (high - low) / 2], &c[high - 1]);
        for (size_t i = low; i + 1 < high; i++)
            if (goes_before(c[i], c[high - 1])) sum += (double)c[i].weight, swap(&c[i], &c[split++]);
        swap(&c[split], &c[high - 1]);
        if (sum >= goal) high = split;
        else kept = sum + (double)c[split].weight, low = split + 1;
    }
    return low;
}

// Dies if one of a row of n logits is NaN or +infinite; -inf is fine.
static void check_logits(const float *logits, size_t n, size_t position) {
    for (size_t i = 0; i < n; i++)
        if (!(logits[i] < INFINITY)) die("the logit of id %zu at position %zu is %g (damaged weights? see -m check)",
                                         i, position, (double)logits[i]);
}

// Copies the logits with the repetition penalty (Keskar et al. 2019) for ids seen: positive ones are divided by it,
// negative ones multiplied. Returns the id of the largest, the lowest at a tie.
static size_t penalize(Sampler *s, const float *logits, size_t position) {
    size_t best = 0;
    float penalty = (float)fmin(fmax(s->penalty, FLT_MIN), FLT_MAX);
    check_logits(logits, s->vocab_size, position);
    for (size_t i = 0; i < s->vocab_size; i++) {
        float penalized = logits[i] > 0 ? logits[i] / penalty : logits[i] * penalty;
        s->logits[i] = s->seen[i] ? fminf(penalized, FLT_MAX) : logits[i];
        if (s->logits[i] > s->logits[best]) best = i;
    }
    if (s->logits[best] == -INFINITY) die("all logits at position %zu are -inf (see -m check)", position);
    return best;
}

// Sets the weight of every id: e^((logit - largest) / temperature) if it passes top-k, top-p (Holtzman et al. 2019; of
// what top-k left) and min-p (that share of the largest), else 0.
static void filter(Sampler *s, float largest) {
    Candidate *c = s->candidates;
    size_t n = 0;
    double total = 0;
    for (size_t i = 0; i < s->vocab_size; i++)
        if (s->logits[i] > -INFINITY) c[n++] = (Candidate){s->logits[i], 1, (int)i};
    if (s->top_k && s->top_k < n) n = keep_best(c, n, (double)s->top_k);
    for (size_t i = 0; i < n; total += (double)c[i++].weight)
        c[i].weight = fast_exp((float)(((double)c[i].logit - (double)largest) / s->temperature));
    if (s->top_p < 1) n = keep_best(c, n, s->top_p * total);
    memset(s->weights, 0, s->vocab_size * sizeof *s->weights);
    for (size_t i = 0; i < n; i++)
        if ((double)c[i].weight >= s->min_p) s->weights[c[i].id] = (double)c[i].weight;
}

// Picks the next id from logits (vocab_size): one number is drawn, and the ids are walked in order until their weights
// pass that share of the total. None is drawn when greedy.
static int sample(Sampler *s, const float *logits, size_t position) {
    size_t picked = penalize(s, logits, position);
    if (s->temperature == 0) return (int)picked;
    filter(s, s->logits[picked]);
    double total = 0, passed = 0;
    for (size_t i = 0; i < s->vocab_size; i++) total += s->weights[i];
    double stop = (double)uniform(&s->state) * total;
    for (size_t i = 0; i < s->vocab_size && passed <= stop; i++)
        if (s->weights[i] > 0) passed += s->weights[i], picked = i;
    return (int)picked;
}

// ---- input and output -----------------------------------------------------------------------------------------------
static volatile sig_atomic_t stoppable;  // 1: chat writes a reply, which SIGINT ends; 2: it has

// A signal ends the program without a trace of unfinished output.
static void on_signal(int number) {
    static const char shrunk[] = "run: the model's file has become shorter (copy it again)\n";
    if (number == SIGINT && stoppable == 1) { stoppable = 2; return; }
    if (unfinished[0]) unlink(unfinished);
    _exit(number == SIGBUS && write(STDERR_FILENO, shrunk, sizeof shrunk - 1) ? 1 : 128 + number);
}

static void write_all(int fd, const void *data, size_t size, const char *name) {
    for (ssize_t n; size; data = (const char *)data + n, size -= (size_t)n) {
        while ((n = write(fd, data, size)) < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EPIPE) on_signal(SIGPIPE);  // the reader has seen enough
        if (n <= 0) die("cannot write to %s: %s (free some space, or write elsewhere)", name, strerror(errno));
    }
}
static void print(const void *text, size_t size) { write_all(STDOUT_FILENO, text, size, "standard output"); }
static void print_from(const Buffer *b, size_t start) { if (b->size > start) print(b->data + start, b->size - start); }

// Opens where binary output goes: standard output, a device or FIFO in place, or a temporary file beside `path` that
// takes its name (that of the file a link leads to) only when whole.
static int open_output(const char **name) {
    static char target[PATH_MAX];
    struct stat info;
    if (!strcmp(*name, "-")) return STDOUT_FILENO;
    const char *path = realpath(*name, target) ? target : *name;
    bool in_place = !stat(path, &info) && !S_ISREG(info.st_mode);
    *name = path;
    if (!in_place && snprintf(unfinished, PATH_MAX, "%s.%ld.part", path, (long)getpid()) >= PATH_MAX) unfinished[0] = 0;
    int how = O_WRONLY | O_CLOEXEC | (in_place ? 0 : O_CREAT | O_TRUNC | O_NOFOLLOW);
    int fd = open(in_place ? path : unfinished, how, 0666);
    if (fd < 0) unfinished[0] = 0, die("cannot write %s: %s (check the path)", path, strerror(errno));
    return fd;
}
static void close_output(int fd, const char *path) {
    if (fd != STDOUT_FILENO && (close(fd) || (unfinished[0] && rename(unfinished, path))))
        die("cannot write %s: %s (free some space, or write elsewhere)", path, strerror(errno));
    unfinished[0] = 0;
}

// The bytes of a file, or of standard input for "-".
static Buffer read_all(const char *path) {
    int fd = strcmp(path, "-") ? open(path, O_RDONLY | O_CLOEXEC) : STDIN_FILENO;
    if (fd < 0) die("cannot open %s: %s (check the path)", path, strerror(errno));
    char block[1 << 16];
    Buffer b = {0};
    for (ssize_t n = 1; n; append(&b, block, (size_t)n)) {
        while ((n = read(fd, block, sizeof block)) < 0 && errno == EINTR) continue;
        if (n < 0) die("cannot read %s: %s (check the path)", fd ? path : "standard input", strerror(errno));
    }
    return fd ? close(fd) : 0, b;
}

typedef struct {
    const char *model, *mode, *text, *file, *ids, *tokenizer, *output, *system;
    double n_new, context, chunk, threads, top_k, temperature, top_p, min_p, penalty;
    uint64_t seed;
    bool print_ids;
} Options;
typedef struct { int *ids; size_t n; Buffer text; } Prompt;  // (n); the text as given, empty with -I

// Loads -z, else STEM.tokenizer.bin beside STEM.bin, else tokenizer.bin beside the model, else here; dies unless it
// belongs to the model, where there is one.
static void load_tokenizer(Tokenizer *t, const Options *o, const Model *m) {
    static char found[PATH_MAX];
    const char *path = o->tokenizer, *model = o->model ? o->model : "", *slash = strrchr(model, '/');
    int stem = (int)strlen(model) - 4, kept[] = {stem, slash ? (int)(slash + 1 - model) : 0, 0};
    for (int i = stem > 0 && !strcmp(model + stem, ".bin") ? 0 : 1; !path && i < 3; i++) {
        int size = snprintf(found, PATH_MAX, "%.*s%stokenizer.bin", kept[i], model, i ? "" : ".");
        if (size < PATH_MAX && !access(found, F_OK)) path = found;
    }
    if (!path) die("there is no tokenizer.bin beside %s or here (export.py --tokenizer makes one, -z names one)",
                   o->model ? model : "a model");
    tokenizer_load(t, path);
    size_t hash = m->config.tokenizer_hash, rows = m->config.vocab_size;
    if (o->model && ((hash && t->hash && t->hash != hash) || t->n_ids > rows))
        die("%s (%zu ids, fingerprint %016zx) does not fit %s (%zu rows, fingerprint %016zx) (name its own with -z)",
            path, t->n_ids, (size_t)t->hash, model, rows, hash);
    if (t->n_ids < rows && !(hash && t->hash))
        fprintf(stderr, "run: note: %s has %zu ids, %s has %zu rows\n", path, t->n_ids, model, rows);
}

// The prompt of -i, -f or -I ("1 2 3", each in the vocabulary); where `starts`, an empty one becomes the model's BOS.
static Prompt read_prompt(const Options *o, const Tokenizer *t, const Model *m, bool starts) {
    size_t vocab_size = o->model ? m->config.vocab_size : t->n_ids, n = 0;
    Buffer text = {0}, ids = {0};
    if (o->file) text = read_all(o->file);
    if (o->text) append(&text, o->text, strlen(o->text));
    if (o->file || o->text) ids.data = (void *)encode(t, text.data, NULL, text.size, &n), ids.size = n * sizeof(int);
    for (const char *at = o->ids ? o->ids : ""; *(at += strspn(at, " \t\n"));) {
        size_t digits = strspn(at, "0123456789"), word = strcspn(at, " \t\n"), id = strtoull(at, NULL, 10);
        int shown = (int)min_size(word, 80);
        if (digits < word) usage_error("-I has \"%.*s\", no token id (give ids as \"1 2 3\")", shown, at);
        if (digits > 10 || id >= vocab_size)
            die("id %.*s is not in the vocabulary (ids are 0 to %zu)", shown, at, vocab_size - 1);
        append(&ids, &(int){(int)id}, sizeof(int)), at += word;
    }
    starts &= !ids.size;
    if (starts && m->config.bos_id < 0) die("the prompt is empty and %s has no BOS id (give some text)", m->file.path);
    if (starts) append(&ids, &(int){(int)m->config.bos_id}, sizeof(int));
    return (Prompt){(int *)(void *)ids.data, ids.size / sizeof(int), text};
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

// Bytes of memory that may still be taken: what the system has available, within the container's limit.
static size_t available_memory(void) {
    size_t limit = number_in("/sys/fs/cgroup/memory.max", "%zu", SIZE_MAX);
    size_t used = number_in("/sys/fs/cgroup/memory.current", "%zu", 0);
    used -= min_size(used, number_in("/sys/fs/cgroup/memory.stat", "inactive_file %zu", 0));  // given up at need
    size_t kib = number_in("/proc/meminfo", "MemAvailable: %zu", SIZE_MAX >> 10);
    return min_size(kib << 10, limit > used ? limit - used : 0);
}

// The context: -c, else `fallback`; dies if that is above seq_len or a prompt of n tokens does not fit.
static size_t context_for(const Options *o, const Model *m, size_t fallback, size_t n) {
    size_t seq_len = m->config.seq_len, context = o->context > 0 ? (size_t)o->context : fallback;
    if (context > seq_len) die("a context of %zu is above the model's seq_len %zu (use less)", context, seq_len);
    if (n > context) die("the prompt has %zu tokens, the context %zu (use a shorter one or a larger -c)", n, context);
    return context;
}

// The context in which to generate n_new tokens (-1: all that fit) after n: as far as -c, seq_len and memory allow.
static size_t plan(const Options *o, const Model *m, size_t n, double n_new) {
    size_t wanted = n_new < 0 ? m->config.seq_len : (size_t)n_new, full = context_for(o, m, m->config.seq_len, n);
    size_t fits = available_memory() / mul(2 * sizeof(float), cache_row(&m->config));
    if (o->context <= 0 && fits < min_size(full, n + wanted)) {
        fprintf(stderr, "run: note: memory holds a context of %zu tokens, not %zu (-c sets it)\n", fits, full);
        if (n > (full = fits)) die("the prompt has %zu tokens, memory holds %zu (use a shorter prompt)", n, fits);
    }
    if (wanted > full - n && n_new >= 0)
        fprintf(stderr, "run: note: the context of %zu has room for %zu new tokens, not %zu\n", full, full - n, wanted);
    return min_size(full, n + wanted);
}

// Takes the next chunk of n tokens of which `done` have been taken; returns how many tokens that was.
static size_t next_chunk(Run *r, const int *ids, size_t done, size_t n) {
    size_t T = min_size(r->chunk, n - done);
    bool show = n > 4 * r->chunk && isatty(STDERR_FILENO);
    if (show) fprintf(stderr, "\rprompt: %zu of %zu tokens", done, n);
    forward(r, ids + done, T);
    if (show && done + T == n) fprintf(stderr, "\r%*s\r", 60, "");
    return T;
}

// Appends what an id adds to the text (special tokens only if shown); without a tokenizer the id.
static void append_token(Buffer *b, const Tokenizer *t, Decoder *d, int id, bool first, bool show_special) {
    char number[16];
    if (t) decode(t, d, id, show_special, b);
    else append(b, number, (size_t)snprintf(number, sizeof number, first ? "%d" : " %d", id));
}

typedef struct {  // of generate and chat
    const Options *o;
    const Tokenizer *t;       // NULL: ids are printed
    Run run; Sampler sampler; Decoder decoder;
    bool *ends;               // (vocab_size) ids that end what is written
    Buffer ids, out;          // what the cache holds, and perhaps one more; what has been written
    size_t fed, made, timed;  // tokens of prompts, new ones, and of these all but the first of each reply
    double feeding, making;   // seconds for `fed` and for `timed`
} Session;

static void new_session(Session *x, const Options *o, const Model *m, const Tokenizer *t, size_t context, bool chats) {
    const Table *ends = &t->table[ENDS];
    const int32_t *eos = (const void *)m->eos_ids;
    size_t n = m->config.vocab_size;
    *x = (Session){.o = o, .t = o->print_ids ? NULL : t, .ends = allocate(n, sizeof *x->ends, "the ids at ends"),
        .sampler = {.temperature = o->temperature, .top_p = o->top_p, .min_p = o->min_p, .penalty = o->penalty,
                    .top_k = (size_t)o->top_k, .state = o->seed}};
    for (size_t i = 0; i < m->config.n_eos; i++) if ((size_t)eos[i] < n) x->ends[eos[i]] = true;
    for (size_t i = 0; chats && i < ends->n; i++) x->ends[ends->at[i]] = true;
    new_run(&x->run, m, context, (size_t)o->chunk, 1), new_sampler(&x->sampler, n);
}

// Feeds those of n ids that the cache lacks, then samples up to `wanted` more, printing them as they come.
// Returns whether the text came to its end, or the user had enough of it.
static bool write_on(Session *x, const int *ids, size_t n, size_t wanted) {
    Run *r = &x->run;
    size_t fed = n - r->position, made = 0, shown, T = 0;
    bool ended = false;
    x->ids.size = x->out.size = 0, append(&x->ids, ids, n * sizeof *ids);
    memset(x->sampler.seen, 0, x->sampler.vocab_size * sizeof *x->sampler.seen);
    for (size_t i = 0; i < n; i++) x->sampler.seen[ids[i]] = true;
    double start = seconds(CLOCK_MONOTONIC), first = start;
    for (size_t done = 0; done < fed; done += T) T = next_chunk(r, ids + n - fed, done, fed);
    const float *logits = logits_of(r, T - 1, 1);
    while (made < wanted && !(ended = stoppable == 2)) {
        int id = sample(&x->sampler, logits, r->position - 1);
        if (made++ == 0) first = seconds(CLOCK_MONOTONIC);
        if ((ended = x->ends[id])) break;
        x->sampler.seen[id] = true, shown = x->out.size, append(&x->ids, &id, sizeof id);
        append_token(&x->out, x->t, &x->decoder, id, false, false), print_from(&x->out, shown);
        if (made < wanted) forward(r, &id, 1), logits = logits_of(r, 0, 1);
    }
    double end = seconds(CLOCK_MONOTONIC);
    x->fed += fed, x->feeding += (made ? first : end) - start, x->made += made;
    if (made) x->timed += made - 1, x->making += end - first;
    shown = x->out.size, decode_end(&x->decoder, &x->out), print_from(&x->out, shown);
    if (stoppable || !x->t || isatty(STDOUT_FILENO)) print("\n", 1);
    return ended;
}

static void report(const Session *x) {
    fprintf(stderr, "prompt: %zu tokens, %.1f tok/s; generated: %zu tokens, %.1f tok/s; seed %llu\n", x->fed,
            per_second(x->fed, x->feeding), x->made, per_second(x->timed, x->making), (unsigned long long)x->o->seed);
}

static void generate(const Options *o, const Model *m, const Tokenizer *t, const Prompt *p) {
    size_t context = plan(o, m, p->n, o->n_new);
    Session x;
    new_session(&x, o, m, t, context, false);
    bool as_given = x.t && p->text.size;  // text is shown as it was given
    for (size_t i = 0; i < p->n; i++) append_token(&x.out, x.t, &x.decoder, p->ids[i], i == 0, false);
    if (as_given) decode_end(&x.decoder, &x.out);
    print_from(as_given ? &p->text : &x.out, 0);
    write_on(&x, p->ids, p->n, context - p->n), report(&x);
}

// Reads the next turn: -i, then lines of -f or standard input, one that ends in \ with the next. False at their end.
static bool next_turn(const Options *o, bool first, Buffer *turn) {
    static FILE *in;
    char *line = NULL;
    size_t room = 0;
    ssize_t n = 0;
    *turn = (Buffer){0};
    if (!in) in = o->file && strcmp(o->file, "-") ? fopen(o->file, "r") : stdin;
    if (!in) die("cannot read %s: %s (check the path)", o->file, strerror(errno));
    if (first && o->text) return append(turn, o->text, strlen(o->text)), true;
    bool terminal = isatty(fileno(in)), marks = terminal && isatty(STDOUT_FILENO), whole = false, joined = false;
    do {
        if (marks && !turn->size) print("> ", 2);
        if ((n = getline(&line, &room, in)) <= 0) break;
        whole = line[n - 1] == '\n', joined = whole && n > 1 && line[n - 2] == '\\';
        if (joined) line[n - 2] = '\n';
        append(turn, line, (size_t)n - whole);
    } while (joined || (terminal && whole && !turn->size));
    free(line);
    if (n <= 0 && !feof(in)) die("cannot read the turns: %s (check -f)", strerror(errno));
    if (n <= 0 && marks) print("\n", 1);
    return n > 0 || turn->size;
}

// Answers a turn, feeding what the conversation's ids have beyond those in the cache. False when the context is full.
static bool answer(Session *x, Buffer *talk, Buffer said) {
    append(talk, &said, sizeof said);
    size_t n, n_said = talk->size / sizeof said, context = x->run.context, same = 0;
    int *ids = render(x->t, x->o->system, (Buffer *)(void *)talk->data, n_said, &n), *held = (int *)(void *)x->ids.data;
    if (n > context && n_said > 1) return false;
    size_t room = context_for(x->o, x->run.model, context, n) - n;
    bool endless = x->o->n_new < 0 || (size_t)x->o->n_new > room;
    while (same < x->run.position && same + 1 < n && held[same] == ids[same]) same++;
    x->run.position = same, x->decoder = (Decoder){0}, stoppable = 1;
    bool ended = write_on(x, ids, n, endless ? room : (size_t)x->o->n_new);
    append(talk, &x->out, sizeof said);
    x->out = (Buffer){0}, stoppable = 0, free(ids);
    return ended || !endless;
}

static void chat(const Options *o, const Model *m, const Tokenizer *t) {
    size_t context = plan(o, m, 0, -1);
    Buffer talk = {0}, said;
    Session x;
    bool full = false;
    new_session(&x, o, m, t, context, true);
    while (!full && next_turn(o, !talk.size, &said)) full = !answer(&x, &talk, said);
    if (full) fprintf(stderr, "run: the context of %zu tokens is full (start anew, or give a larger -c)\n", context);
    report(&x);
}

// -m tokenize (without a tokenizer to decode with: the ids) and detokenize
static void translate(const Tokenizer *t, const int *ids, size_t n) {
    Buffer b = {0};
    Decoder d = {0};
    for (size_t i = 0; i < n; i++) append_token(&b, t, &d, ids[i], i == 0, true);
    t ? decode_end(&d, &b) : append(&b, "\n", 1);
    print_from(&b, 0);
}

// -m chat --ids: those of a whole conversation.
static void translate_chat(const Options *o, const Tokenizer *t) {
    Buffer talk = {0}, said;
    size_t n = 0, n_ids;
    for (; next_turn(o, n == 0, &said); n++) append(&talk, &said, sizeof said);
    if (n % 2 == 0) die("the conversation has %zu messages, an even number (the last must be a user's)", n);
    const int *ids = render(t, o->system, (Buffer *)(void *)talk.data, n, &n_ids);
    translate(NULL, ids, n_ids);
}

// -ln p(id) of a row of n logits.
static double surprise(const float *logits, size_t n, int id) {
    double largest = -INFINITY, sum = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, (double)logits[i]);
    for (size_t i = 0; i < n; i++) sum += exp((double)logits[i] - largest);
    if (!(sum > 0)) die("all logits of a position are -inf (damaged weights? see -m check)");
    return largest + log(sum) - (double)logits[id];
}

// -m logits: a row for each position of the prompt. -m hidden: the hidden states, (n_layers + 1, T, dim).
// -m perplexity: windows of the context's length, each from an empty cache, its first id being context only.
static void evaluate(const Options *o, const Model *m, const Prompt *p, bool hidden, bool scores) {
    enum { LOGIT_ROWS = 16 };  // taken at a time
    const Config *c = &m->config;
    size_t vocab_size = c->vocab_size, scored = 0, states = hidden ? mul(mul(c->n_layers + 1, p->n), c->dim) : 0;
    size_t context = context_for(o, m, min_size(c->seq_len, scores ? 2048 : p->n), scores ? 0 : p->n);
    if (scores && (p->n < 2 || context < 2))
        die("a text of %zu ids in a context of %zu leaves nothing to score (both must be 2 or more)", p->n, context);
    Run r;
    new_run(&r, m, min_size(context, p->n), (size_t)o->chunk, hidden ? 0 : LOGIT_ROWS);
    if (hidden) r.hidden = allocate(states, sizeof(float), "the hidden states");
    const char *path = o->output ? o->output : "-";
    int fd = open_output(&path);
    double start = seconds(CLOCK_MONOTONIC), nll = 0;
    for (size_t first = 0, n; first < p->n; first += n, scored += n - 1) {
        n = min_size(context, p->n - first), r.position = 0;
        for (size_t done = 0, T, rows; done < n; done += T) {
            T = next_chunk(&r, p->ids + first, done, n);
            for (size_t row = 0; row < T && !hidden; row += rows) {
                const float *logits = logits_of(&r, row, rows = min_size(LOGIT_ROWS, T - row)), *x = logits;
                for (size_t at = done + row; at < done + row + rows && at + scores < n; at++, x += vocab_size) {
                    check_logits(x, vocab_size, at);
                    if (scores) nll += surprise(x, vocab_size, p->ids[first + at + 1]);
                }
                if (!scores) write_all(fd, logits, rows * vocab_size * sizeof *logits, path);
            }
        }
    }
    char line[128];
    nll /= (double)scored;
    int size = snprintf(line, sizeof line, "perplexity %.9g nll %.9g tokens %zu\n", exp(nll), nll, scored);
    if (scores) print(line, (size_t)size);
    if (hidden) write_all(fd, r.hidden, states * sizeof(float), path);
    close_output(fd, path);
    fprintf(stderr, "prompt: %zu tokens, %.1f tok/s\n", p->n, per_second(p->n, seconds(CLOCK_MONOTONIC) - start));
}

// Prints a tensor's line of -m check; returns how many of its values are not finite.
static size_t check_tensor(const Tensor *t) {
    size_t n = t->rows * t->columns, finite = 0;
    double low = INFINITY, high = -INFINITY, squares = 0;
    for (size_t i = 0; i < n; i++) {
        double value = t->type == I32 ? (double)((const int32_t *)t->data)[i] : (double)((const float *)t->data)[i];
        if (!isfinite(value)) continue;
        low = fmin(low, value), high = fmax(high, value), squares += value * value, finite++;
    }
    char name[64];
    snprintf(name, sizeof name, t->layer == OF_NO_LAYER ? "%s" : "%s[%d]", t->name, t->layer);
    printf("  %-24s %7zu x %-7zu %-7s min %-12.5g max %-12.5g rms %-12.5g non-finite %zu\n", name, t->rows, t->columns,
           t->type == I32 ? "int32" : "float32", low, high, sqrt(squares / (double)finite), n - finite);
    return n - finite;
}

// -m check: the header, the tensors, the tokenizer of -z, and the memory that a run would take.
static void check(const Options *o, const Model *m, const Tokenizer *t) {
    size_t bad = 0, context = context_for(o, m, m->config.seq_len, 0), chunk = min_size((size_t)o->chunk, context);
    Run r = {.model = m, .context = context, .chunk = chunk, .logit_rows = 1};
    size_t run = lay_out(&r, NULL), cache = mul(mul(2 * sizeof(float), cache_row(&m->config)), context);
    char text[32];
    printf("%s: %zu bytes\n\nheader\n", m->file.path, m->file.size);
    for (int i = 0; i < N_FIELDS; i++) field(&m->config, i, text), printf("  %-28s %s\n", FIELDS[i].name, text);
    printf("\ntensors\n");
    for (size_t i = 0; i < m->n_tensors; i++) bad += check_tensor(&m->tensors[i]);
    if (t->n_ids) printf("\ntokenizer %s: %zu ids, fingerprint %zu\n", t->path, t->n_ids, (size_t)t->hash);
    printf("\nmemory at a context of %zu, in chunks of %zu\n", context, chunk);
    printf("  weights %zu bytes, cache %zu, the rest %zu, together %zu\n", m->file.size, cache, run - cache,
           add(m->file.size, run));
    if (fflush(stdout) && errno == EPIPE) on_signal(SIGPIPE);
    if (ferror(stdout)) die("cannot write to standard output: %s (free some space)", strerror(errno));
    if (bad) die("%s has %zu values that are not finite (export it again)", m->file.path, bad);
}

// ---- the command line -----------------------------------------------------------------------------------------------
static const char USAGE[] =
    "usage: run MODEL [options]\n"
    "  -m MODE   generate (default) | chat | tokenize | detokenize | logits | hidden | perplexity | check\n"
    "  -i TEXT   prompt (chat: the first turn)          -t F  temperature, 0 = greedy (1.0)\n"
    "  -f FILE   prompt from a file, - = stdin          -p F  top-p (0.9; 1 = off)\n"
    "  -I IDS    prompt as token ids, \"1 2 3\"           -k N  top-k, 0 = off (0)\n"
    "  -n N      tokens to generate (256; -1 = until    -s N  seed (from the clock; printed)\n"
    "            end of text or full context)           -c N  context length\n"
    "  -b N      prefill chunk (256)                    -j N  threads\n"
    "  -z FILE   tokenizer                              --min-p F (0)   --repeat-penalty F (1)\n"
    "  -y TEXT   system prompt for chat                 --ids  print token ids instead of text\n"
    "  -o FILE   where binary output goes, - = stdout   -h, --help   --version\n";

// kind: 's' text, 'i' whole number, 'f' number, 'u' uint64, 'b' yes or no, 'a' answer with a text and end.
typedef struct { const char *name; char kind; void *value; double low, high; } Flag;

// Sets a flag from text: a number must be one as a whole and in the flag's range.
static void set_flag(const Flag *f, const char *text) {
    char *end;
    double number = strtod(text, &end);
    if (f->kind == 's') { *(const char **)f->value = text; return; }
    if (!*text || *end || text[strspn(text, f->kind == 'u' ? "0123456789" : "+-.0123456789eE")])
        usage_error("%s takes a number, not \"%s\" (see run --help)", f->name, text);
    errno = 0;
    if (f->kind == 'u') *(uint64_t *)f->value = strtoull(text, NULL, 10);
    else *(double *)f->value = number;
    if (errno || !(number >= f->low && number <= f->high) || (f->kind == 'i' && number != floor(number)))
        usage_error("%s %s is out of range, %.9g to %.9g (see run --help)", f->name, text, f->low, f->high);
}

static void parse_options(Options *o, int argc, char **argv) {
    *o = (Options){.mode = "generate", .n_new = 256, .chunk = 256, .temperature = 1, .top_p = 0.9, .penalty = 1,
                   .seed = (uint64_t)(seconds(CLOCK_REALTIME) * 1e6)};
    const Flag flags[] = {
        {"-m", 's', &o->mode, 0, 0}, {"-i", 's', &o->text, 0, 0}, {"-f", 's', &o->file, 0, 0},
        {"-I", 's', &o->ids, 0, 0}, {"-z", 's', &o->tokenizer, 0, 0}, {"-o", 's', &o->output, 0, 0},
        {"-y", 's', &o->system, 0, 0}, {"-n", 'i', &o->n_new, -1, INT_MAX}, {"-b", 'i', &o->chunk, 1, INT_MAX},
        {"-c", 'i', &o->context, 1, INT_MAX}, {"-j", 'i', &o->threads, 1, 1024}, {"-k", 'i', &o->top_k, 0, INT_MAX},
        {"-t", 'f', &o->temperature, 0, DBL_MAX}, {"-p", 'f', &o->top_p, 0, 1}, {"-s", 'u', &o->seed, 0, 0x1p64},
        {"--min-p", 'f', &o->min_p, 0, 1}, {"--repeat-penalty", 'f', &o->penalty, DBL_MIN, DBL_MAX},
        {"--ids", 'b', &o->print_ids, 0, 0}, {"-h", 'a', (void *)USAGE, 0, 0}, {"--help", 'a', (void *)USAGE, 0, 0},
        {"--version", 'a', "run.c 1.0\n", 0, 0}};
    const Flag *const last = flags + sizeof flags / sizeof *flags;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *equals = !strncmp(word, "--", 2) ? strchr(word, '=') : NULL;
        size_t length = equals ? (size_t)(equals - word) : strlen(word);
        const Flag *f = flags;
        while (f < last && (strlen(f->name) != length || strncmp(f->name, word, length))) f++;
        if (f == last && word[0] == '-' && word[1]) usage_error("unknown option %s (see run --help)", word);
        if (f == last && o->model) usage_error("%s and %s: two models (a prompt goes after -i)", o->model, word);
        if (f == last) o->model = word;
        else if (f->kind < 'f' && equals) usage_error("%s takes no value, not %s (run --help)", f->name, equals + 1);
        else if (f->kind == 'b') *(bool *)f->value = true;
        else if (f->kind == 'a') print(f->value, strlen(f->value)), exit(0);
        else if (!equals && i + 1 == argc) usage_error("%s needs a value (see run --help)", f->name);
        else set_flag(f, equals ? equals + 1 : argv[++i]);
    }
}

typedef enum { GENERATE, CHAT, TOKENIZE, DETOKENIZE, LOGITS, HIDDEN, PERPLEXITY, CHECK, N_MODES } Mode;

// The mode; ends the program if the options do not go together.
static Mode check_options(const Options *o) {
    static const char *const names[] = {"generate", "chat", "tokenize", "detokenize", "logits", "hidden", "perplexity",
                                        "check"};
    Mode mode = GENERATE;
    while (mode < N_MODES && strcmp(o->mode, names[mode])) mode++;
    if (mode == N_MODES) usage_error("unknown mode %s (see run --help)", o->mode);
    bool binary = mode == LOGITS || mode == HIDDEN, to_stdout = !o->output || !strcmp(o->output, "-");
    bool chats = mode == CHAT, without = mode == TOKENIZE || mode == DETOKENIZE || (chats && o->print_ids);
    if (chats && o->ids) usage_error("-I is given with -m chat (leave it out)");
    if (!chats && !!o->text + !!o->file + !!o->ids > 1) usage_error("-i, -f, -I: more than one is given (leave one)");
    if (o->system && !chats) usage_error("-y is for -m chat, not %s (put it into the prompt)", o->mode);
    if (!o->model && !without) usage_error("no model is named (run MODEL [options]; see run --help)");
    if (mode == TOKENIZE && !o->text && !o->file) usage_error("-m tokenize has no text (give -i or -f)");
    if (mode == DETOKENIZE && !o->ids) usage_error("-m detokenize has no ids (give -I)");
    if (o->output && !binary) usage_error("-o is for -m logits and hidden, not %s (redirect its output)", o->mode);
    if (binary && to_stdout && isatty(STDOUT_FILENO))
        usage_error("-m %s writes binary to a terminal (give -o)", o->mode);
    return mode;
}

#ifndef RUN_NO_MAIN
int main(int argc, char **argv) {
    static Model m;
    static Tokenizer t;
    Options o;
    for (int fd = 0; fd < 3; fd++)  // a closed one stays unusable, and no file of ours takes its place
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_RDONLY : O_WRONLY) < 0) exit(1);
    parse_options(&o, argc, argv);
    Mode mode = check_options(&o);
#ifdef _OPENMP
    omp_set_dynamic(0);
    if (o.threads > 0) omp_set_num_threads((int)o.threads);
#else
    if (o.threads > 1) fprintf(stderr, "run: note: -j %g has no effect, this is built without OpenMP\n", o.threads);
#endif
    for (const int *s = (int[]){SIGINT, SIGTERM, SIGHUP, SIGBUS, 0}; *s; s++) signal(*s, on_signal);
    signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit is an error
    bool has_text = o.text || o.file || mode == CHAT || mode == TOKENIZE || mode == DETOKENIZE;
    if (o.model) load_model(&m, o.model);
    if (has_text || (mode == CHECK && o.tokenizer) || (mode == GENERATE && !o.print_ids)) load_tokenizer(&t, &o, &m);
    if (mode == CHECK) return check(&o, &m, &t), 0;
    if (mode == CHAT && t.table[TURNS].n < 2)
        die("%s has no chat format: the model has no chat template, or export.py said what is wrong with it "
            "(-m generate takes a whole prompt in -i, special tokens included)", t.path);
    if (o.system && t.table[TURNS].n < 4) die("the chat template in %s takes no system prompt (leave out -y)", t.path);
    if (mode == CHAT) return o.print_ids ? translate_chat(&o, &t) : chat(&o, &m, &t), 0;
    bool starts = mode == GENERATE || mode == LOGITS || mode == HIDDEN;
    Prompt p = read_prompt(&o, &t, &m, starts);
    if (mode == GENERATE) generate(&o, &m, &t, &p);
    else if (starts || mode == PERPLEXITY) evaluate(&o, &m, &p, mode == HIDDEN, mode == PERPLEXITY);
    else translate(mode == DETOKENIZE ? &t : NULL, p.ids, p.n);
    return 0;
}
#endif
