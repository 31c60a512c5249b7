/* Time the steps of one plan:  cc -O2 example.c fastroof_step.o -o example && ./example NAME.plan */
#include "fastroof_step.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { REQUESTS = 32, CALLS = 1000000 };

static void check(int32_t code)
{
    if (code == FASTROOF_OK) return;
    fprintf(stderr, "example: %s\n", fastroof_message(code));
    exit(1);
}

static void show(const char *what, double us)
{
    uint64_t bits; /* what Python, Go and Rust must agree on */
    memcpy(&bits, &us, sizeof bits);
    printf("%s: %.3f us, bits %016" PRIx64 "\n", what, us, bits);
}

int main(int argc, char **argv)
{
    const fastroof_plan *plan;
    int64_t new_tokens[REQUESTS] = {2048}, context_len[REQUESTS] = {0};
    fastroof_memory_of memory;
    double us, sum_us = 0;
    if (argc != 2) {
        fputs("usage: example NAME.plan\n", stderr);
        return 2;
    }
    check(fastroof_open(argv[1], &plan));
    printf("plan: %s\n", fastroof_describe(plan));

    check(fastroof_memory(plan, &memory));
    printf("%" PRId64 " tokens of KV cache fit, %" PRId64 " bytes each\n", memory.max_kv_tokens,
           memory.kv_bytes_per_token);

    check(fastroof_decode_us(plan, 64, 4096, &us));
    show("64 decodes at 4096 tokens", us);

    check(fastroof_verify_us(plan, 64, 4096, 4, &us));
    show("the same, 4 tokens verified by each", us);

    for (int i = 1; i < REQUESTS; i++) new_tokens[i] = 1, context_len[i] = 100 * i;
    check(fastroof_step_us(plan, new_tokens, context_len, REQUESTS, &us));
    show("a prompt of 2048 tokens and 31 decodes", us);

    clock_t start = clock();
    for (int i = 0; i < CALLS; i++, sum_us += us)
        check(fastroof_decode_us(plan, 1 + i % 256, 1 + i % 8191, &us));
    double ns = (double)(clock() - start) / CLOCKS_PER_SEC * 1e9 / (double)CALLS;
    show("1000000 decode steps", sum_us);
    printf("a call: %.1f ns\n", ns);
    fastroof_close(plan);
    return 0;
}
