/* The C interface of libfurious, for C and for the foreign function interfaces of other languages: load a model, let a
 * session read tokens, choose the next ones, keep its state.
 *
 *   furious_model* model = NULL;
 *   furious_session* session = NULL;
 *   if (furious_model_load("runs/stories", NULL, &model) != FURIOUS_OK) fprintf(stderr, "%s\n", furious_last_error());
 *   ...
 *   furious_session_free(session);
 *   furious_model_free(model);
 *
 * Every function that can fail returns a furious_status and leaves its outputs as they were unless that is FURIOUS_OK.
 * No C++ exception passes through. Handles are opaque; each *_free accepts NULL.
 *
 * Threads: a model may be used by any number of threads at once, a session by one at a time. A session keeps what it
 * needs of its model: either may be freed first. */
#ifndef FURIOUS_FURIOUS_H
#define FURIOUS_FURIOUS_H

#include <stddef.h>
#include <stdint.h>

#include "furious/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum furious_status {
  FURIOUS_OK = 0,
  FURIOUS_ERROR = 1,            /* furious_last_error() says what went wrong and what to do */
  FURIOUS_INVALID_ARGUMENT = 2, /* a null pointer where something is needed, or a number out of range */
  FURIOUS_OUT_OF_MEMORY = 3,
  FURIOUS_BUFFER_TOO_SMALL = 4 /* the size that is needed has been stored; nothing else */
} furious_status;

typedef struct furious_model furious_model;     /* weights and tokenizer */
typedef struct furious_session furious_session; /* one sequence of tokens, and what the model remembers of it */

/* The version of the library that the program runs with, "0.1.0". */
FURIOUS_API const char* furious_version(void);

/* The message of this thread's last failure; "" before the first. Valid until the thread's next failure. */
FURIOUS_API const char* furious_last_error(void);

typedef struct furious_load_options {
  const char* arch;      /* for weights without a config.json: a preset; NULL: that of the checkpoint */
  const char* tokenizer; /* "byte", a SentencePiece model, a tokenizer.json or a folder with one of them; NULL: that of
                            the checkpoint */
  const char* device;    /* "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one */
  const char* dtype;     /* "f32" or "bf16", of the products; NULL: bf16 on a GPU, f32 on the CPU */
  int32_t threads;       /* of the CPU, for each session; 0: all cores that the program may use */
  int32_t bos;           /* not 0: texts begin with bos */
} furious_load_options;
FURIOUS_API void furious_load_options_init(furious_load_options* options); /* the defaults */

/* `path`: a checkpoint directory, a training run, or a .safetensors file. `options`: NULL for the defaults. */
FURIOUS_API furious_status furious_model_load(const char* path, const furious_load_options* options,
                                              furious_model** model);
FURIOUS_API void furious_model_free(furious_model* model);
FURIOUS_API furious_status furious_model_vocabulary(const furious_model* model, int64_t* vocabulary);
/* The token before the first of a text, and the one after the last; -1: there is none. */
FURIOUS_API furious_status furious_model_start_token(const furious_model* model, int32_t* id);
FURIOUS_API furious_status furious_model_end_token(const furious_model* model, int32_t* id);

/* Text to tokens, without the start token, and back. `count` and `bytes` receive the size that the result has; a buffer
 * of NULL with capacity 0 asks for it alone. The text is UTF-8 of a given size. decode does not end it with a zero;
 * tokens that split a character give the bytes of its parts. */
FURIOUS_API furious_status furious_model_encode(const furious_model* model, const char* text, size_t text_bytes,
                                                int32_t* ids, size_t capacity, size_t* count);
FURIOUS_API furious_status furious_model_decode(const furious_model* model, const int32_t* ids, size_t count,
                                                char* text, size_t capacity, size_t* bytes);

/* An empty sequence. */
FURIOUS_API furious_status furious_session_new(const furious_model* model, furious_session** session);
/* Another one that goes on like this one, to the bit. */
FURIOUS_API furious_status furious_session_fork(const furious_session* session, furious_session** forked);
FURIOUS_API void furious_session_free(furious_session* session);

/* Reads tokens: many at once (prefill), or one (a decode step). The first of a sequence should be the start token. */
FURIOUS_API furious_status furious_session_prefill(furious_session* session, const int32_t* ids, size_t count);
FURIOUS_API furious_status furious_session_step(furious_session* session, int32_t id);

/* The logits after the last token, as many as the vocabulary has. */
FURIOUS_API furious_status furious_session_logits(const furious_session* session, float* logits, size_t capacity,
                                                  size_t* count);

typedef struct furious_sampling {
  double temperature;        /* 0: always the most probable token */
  int64_t top_k;             /* only the k most probable tokens; 0: all */
  double top_p;              /* only the most probable tokens that together have this probability; 1: all */
  double min_p;              /* only tokens with at least this times the largest probability; 0: all */
  double repetition_penalty; /* above 1: tokens that occurred become less probable */
  double frequency_penalty;  /* subtracted from a token's logit for each time it occurred */
  double presence_penalty;   /* subtracted once if it occurred */
  uint64_t seed;
} furious_sampling;
FURIOUS_API void furious_sampling_init(furious_sampling* sampling); /* the defaults */

/* Chooses the next token from the last logits and reads it. `sampling`: NULL for the defaults. A choice depends on the
 * sampling options, the tokens before it and their number. */
FURIOUS_API furious_status furious_session_sample(furious_session* session, const furious_sampling* sampling,
                                                  int32_t* id);

FURIOUS_API furious_status furious_session_tokens(const furious_session* session, int64_t* tokens); /* read so far */
FURIOUS_API furious_status furious_session_bytes(const furious_session* session, int64_t* bytes);   /* that they take */

/* The state in a file, in the format of furious::Session. A session that loads it goes on where this one was, to the
 * bit; after a failed load it is as it was before. */
FURIOUS_API furious_status furious_session_save(const furious_session* session, const char* path);
FURIOUS_API furious_status furious_session_load(furious_session* session, const char* path);
/* The bytes of such a file, in memory. `bytes` receives their number; a buffer of NULL with capacity 0 asks for it
 * alone. It stays the same until more is read. */
FURIOUS_API furious_status furious_session_save_bytes(const furious_session* session, void* buffer, size_t capacity,
                                                      size_t* bytes);
FURIOUS_API furious_status furious_session_load_bytes(furious_session* session, const void* buffer, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
