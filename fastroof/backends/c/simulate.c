/* Serve requests by one engine:  cc -O2 simulate.c fastroof_step.o -lm -o simulate && ./simulate NAME.plan BLOCKS
 *
 * 100,000 requests of 1,024 tokens in and 128 out, 8 a second, in an engine with BLOCKS blocks of KV cache
 * (plan.memory.max_kv_tokens // 16 in Python). */
#include "fastroof_step.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { REQUESTS = 100000, INPUT = 1024, OUTPUT = 128 };

static void check(int32_t code)
{
    if (code == FASTROOF_OK) return;
    fprintf(stderr, "simulate: %s\n", fastroof_message(code));
    exit(1);
}

static int rises(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static void show(const char *what, double ms)
{
    uint64_t bits; /* what Python must agree on */
    memcpy(&bits, &ms, sizeof bits);
    printf("%s: %.3f ms, bits %016" PRIx64 "\n", what, ms, bits);
}

int main(int argc, char **argv)
{
    static double arrival_us[REQUESTS], first_us[REQUESTS], last_us[REQUESTS], ttft_ms[REQUESTS];
    static int32_t input_tokens[REQUESTS], output_tokens[REQUESTS], preemptions[REQUESTS];
    static uint8_t status[REQUESTS];
    const fastroof_plan *plan;
    fastroof_served served;
    if (argc != 3) {
        fputs("usage: simulate NAME.plan BLOCKS\n", stderr);
        return 2;
    }
    fastroof_engine engine = fastroof_engine_of(atoll(argv[2]));
    check(fastroof_open(argv[1], &plan));

    for (int i = 0; i < REQUESTS; i++) {
        arrival_us[i] = 1.25e5 * i;
        input_tokens[i] = INPUT;
        output_tokens[i] = OUTPUT;
    }
    int64_t bytes = fastroof_simulate_bytes(&engine, REQUESTS, OUTPUT);
    void *memory = bytes < 0 ? NULL : malloc((size_t)bytes);

    clock_t start = clock();
    check(fastroof_simulate(plan, &engine, REQUESTS, arrival_us, input_tokens, output_tokens, NULL, memory,
                            bytes, first_us, last_us, preemptions, status, &served));
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;

    for (int i = 0; i < REQUESTS; i++) ttft_ms[i] = (first_us[i] - arrival_us[i]) / 1e3;
    show("TTFT of the last", ttft_ms[REQUESTS - 1]);
    qsort(ttft_ms, REQUESTS, sizeof *ttft_ms, rises);
    show("TTFT, 99 of 100", ttft_ms[REQUESTS - 1 - REQUESTS / 100]);
    show("the end", served.end_us / 1e3);
    printf("%" PRId64 " steps, %" PRId64 " preemptions\n", served.steps, served.preemptions);
    printf("a step: %.1f ns\n", seconds / (double)served.steps * 1e9);
    free(memory);
    fastroof_close(plan);
    return 0;
}
