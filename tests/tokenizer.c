// The tokenizer of run.c for many texts in one process: tests/tokenizer FILE. Requests on stdin: {uint32 kind, size; bytes};
// kind 0 encodes a text, 1 decodes int32 ids, 2 decodes them without special tokens. Answers: {uint32 size; bytes}.
#define RUN_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../run.c"

static Buffer respond(const Tokenizer *t, uint32_t kind, unsigned char *body, size_t size) {
    Buffer out = {0}, text = {0};
    size_t n = size / sizeof(int);
    if (kind == 0) {
        append_utf8(t, &text, (Buffer){body, size, 0}, false);
        int *ids = encode(t, text, true, &n);
        if (n) append(&out, ids, n * sizeof *ids);
        free(ids);
        return out;
    }
    Decoder d = {0};
    for (size_t i = 0; i < n; i++) decode(t, &d, ((const int *)(const void *)body)[i], kind != 2, &out);
    if (kind != 3) decode_end(&d, &out);
    return out;
}

int main(int argc, char **argv) {
    if (argc != 2) usage_error("no tokenizer (give one)");
    static Tokenizer t;
    read_tokenizer(&t, argv[1]);
    for (uint32_t request[2]; fread(request, sizeof request, 1, stdin) == 1;) {
        unsigned char *body = allocate(request[1], 1, "a request");  // of its exact size, for AddressSanitizer
        if (fread(body, 1, request[1], stdin) != request[1]) die("a request of %u bytes is cut off (send it whole)", request[1]);
        Buffer out = respond(&t, request[0], body, request[1]);
        uint32_t size = (uint32_t)out.size;
        fwrite(&size, sizeof size, 1, stdout);
        if (size) fwrite(out.data, 1, size, stdout);
        fflush(stdout);
        free(out.data);
        free(body);
    }
    return 0;
}
