// The sampler of run.c as a filter: reads records of settings, history and logits, writes the probabilities after all
// filters and the ids drawn. tests/test_sampler.py makes the records.
#define RUN_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../run.c"

typedef struct {
    double temperature, top_p, min_p, penalty;
    int32_t top_k, vocab_size, history, draws;  // then int32 (history) and float32 logits (vocab_size)
    uint64_t seed;
} Request;

static bool get(void *data, size_t size, size_t count) { return fread(data, size, count, stdin) == count; }

// Answers int32 vocab_size and draws, float64 probabilities (vocab_size), int32 ids (draws).
static void answer_request(const Request *q, const int32_t *history, const float *logits) {
    size_t n = (size_t)q->vocab_size, draws = (size_t)q->draws;
    Sampler s = {.temperature = q->temperature, .top_p = q->top_p, .min_p = q->min_p, .penalty = q->penalty,
                 .top_k = q->top_k, .state = q->seed};
    s.candidates = allocate(n, sizeof *s.candidates, "candidates");
    s.scores = allocate(n, 2 * sizeof *s.scores, "scores");
    size_t seen = (size_t)q->history;
    int best = sample(&s, logits, n, history, seen);
    float *weights = s.scores + n;
    if (s.temperature == 0) weights[best] = 1;
    s.state = q->seed;
    double total = 0, *p = allocate(n, sizeof *p, "probabilities");
    for (size_t i = 0; i < n; i++) total += (double)weights[i];
    for (size_t i = 0; i < n; i++) p[i] = (double)weights[i] / total;
    int32_t *picked = allocate(draws, sizeof *picked, "draws"), sizes[2] = {q->vocab_size, q->draws};
    for (size_t i = 0; i < draws; i++) picked[i] = sample(&s, logits, n, history, seen);
    fwrite(sizes, sizeof sizes, 1, stdout);
    fwrite(p, sizeof *p, n, stdout);
    fwrite(picked, sizeof *picked, draws, stdout);
    free(s.candidates), free(s.scores), free(p), free(picked);
}

int main(void) {
    Request q;
    while (get(&q, sizeof q, 1)) {
        int32_t *history = allocate((size_t)q.history, sizeof *history, "history");
        float *logits = allocate((size_t)q.vocab_size, sizeof *logits, "logits");
        if (!get(history, sizeof *history, (size_t)q.history) || !get(logits, sizeof *logits, (size_t)q.vocab_size))
            die("a record ends early (see tests/test_sampler.py)");
        answer_request(&q, history, logits);
        free(history), free(logits);
    }
    return 0;
}
