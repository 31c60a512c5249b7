/* fastroof in C: how long one step of an LLM takes on a GPU, from a plan file that fastroof exported.
 *
 * Link fastroof_step.o or libfastroof_step.so; neither needs Python. Every call is thread-safe, allocates
 * nothing, and takes or returns microseconds as double. A plan is read-only: processes that open one file
 * share its pages.
 */
#ifndef FASTROOF_STEP_H
#define FASTROOF_STEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fastroof_plan fastroof_plan;

/* What every int32_t below returns. Where it is not FASTROOF_OK, nothing was written but the times of
 * steps before the one at fault. */
enum {
    FASTROOF_OK = 0,
    FASTROOF_SIZES = 1,     /* a size that no step has, or a step larger than the plan */
    FASTROOF_OFFSETS = 2,   /* offsets that fall or start below 0 */
    FASTROOF_IO = 10,       /* the file cannot be opened or mapped */
    FASTROOF_FOREIGN = 11,  /* not a plan file */
    FASTROOF_VERSION = 12,  /* a plan file of another version of the format */
    FASTROOF_TRUNCATED = 13,/* shorter or longer than it says */
    FASTROOF_CORRUPT = 14   /* its CRC or its contents are wrong */
};

/* Map and check a plan file. */
int32_t fastroof_open(const char *path, const fastroof_plan **plan);

/* Unmap what fastroof_open mapped. */
void fastroof_close(const fastroof_plan *plan);

/* Check a plan file's bytes, aligned to 8, which stay where they are: the plan is their address. */
int32_t fastroof_open_bytes(const void *bytes, int64_t size, const fastroof_plan **plan);

/* The largest step: tokens in all, and requests. */
int64_t fastroof_max_tokens(const fastroof_plan *plan);
int64_t fastroof_max_seqs(const fastroof_plan *plan);

/* What the plan is, as JSON: name, model, gpu, tp, dtype, kv_dtype, runtime, method, max_tokens, max_seqs,
 * tables_hash, version. */
const char *fastroof_describe(const fastroof_plan *plan);

/* One decode step: batch_size requests, each attending to kv_len tokens, its new one included. */
int32_t fastroof_decode_us(const fastroof_plan *plan, int64_t batch_size, int64_t kv_len, double *step_us);

/* One step of batch_size equal prefill chunks of new_tokens after context_len tokens. */
int32_t fastroof_prefill_us(const fastroof_plan *plan, int64_t new_tokens, int64_t context_len,
                            int64_t batch_size, double *step_us);

/* One step of any requests: new_tokens[i] after context_len[i] tokens in the KV cache. One new token after
 * a context is a decode. A step without requests takes 0. */
int32_t fastroof_step_us(const fastroof_plan *plan, const int64_t *new_tokens, const int64_t *context_len,
                         int64_t num_requests, double *step_us);

/* num_steps decode steps. step_us must not overlap the sizes. */
int32_t fastroof_decode_steps_us(const fastroof_plan *plan, const int64_t *batch_size, const int64_t *kv_len,
                                 int64_t num_steps, double *step_us);

/* num_steps steps of any requests: step i holds requests offsets[i] to offsets[i + 1] - 1, of num_requests
 * in all. step_us must not overlap the sizes. */
int32_t fastroof_steps_us(const fastroof_plan *plan, const int64_t *new_tokens, const int64_t *context_len,
                          int64_t num_requests, const int64_t *offsets, int64_t num_steps, double *step_us);

/* A code in words. */
static inline const char *fastroof_message(int32_t code)
{
    switch (code) {
    case FASTROOF_OK: return "no error";
    case FASTROOF_SIZES: return "a size that no step has, or a step larger than the plan";
    case FASTROOF_OFFSETS: return "offsets that fall or lie outside the requests";
    case FASTROOF_IO: return "the plan file cannot be opened or mapped";
    case FASTROOF_FOREIGN: return "not a plan file";
    case FASTROOF_VERSION: return "a plan file of another version of the format";
    case FASTROOF_TRUNCATED: return "a plan file that is shorter or longer than it says";
    case FASTROOF_CORRUPT: return "a damaged plan file";
    default: return "unknown code";
    }
}

#ifdef __cplusplus
}
#endif

#endif
