/* A test of the C interface from C: c_api CHECKPOINT STATE_FILE */
#include <furious/furious.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition)                                                                           \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      fprintf(stderr, "line %d: %s\nlast error: %s\n", __LINE__, #condition, furious_last_error()); \
      exit(1);                                                                                      \
    }                                                                                               \
  } while (0)

enum { kMost = 4096 };

static const char kText[] = "Hello";

static void test_errors(const furious_model* model, const char* checkpoint) {
  furious_model* other = NULL;
  furious_session* session = NULL;
  int64_t number = 7;
  int32_t id = 7;
  size_t size = 7;
  float logits[1];
  EXPECT(furious_model_load("/no/such/folder", NULL, &other) == FURIOUS_ERROR);
  EXPECT(other == NULL && strstr(furious_last_error(), "/no/such/folder") != NULL);
  EXPECT(furious_model_load(NULL, NULL, &other) == FURIOUS_INVALID_ARGUMENT);
  EXPECT(strstr(furious_last_error(), "path") != NULL);
  EXPECT(furious_model_load(checkpoint, NULL, NULL) == FURIOUS_INVALID_ARGUMENT);
  furious_load_options options;
  furious_load_options_init(&options);
  options.device = "gpu";
  EXPECT(furious_model_load(checkpoint, &options, &other) == FURIOUS_ERROR);
  EXPECT(strstr(furious_last_error(), "gpu") != NULL);
  EXPECT(furious_model_vocabulary(NULL, &number) == FURIOUS_INVALID_ARGUMENT && number == 7);
  EXPECT(furious_model_encode(model, kText, 5, NULL, 3, &size) == FURIOUS_INVALID_ARGUMENT);
  EXPECT(furious_model_encode(model, kText, 5, &id, 1, &size) == FURIOUS_BUFFER_TOO_SMALL && size > 1 && id == 7);
  EXPECT(furious_session_new(NULL, &session) == FURIOUS_INVALID_ARGUMENT && session == NULL);
  EXPECT(furious_session_new(model, &session) == FURIOUS_OK);
  EXPECT(furious_session_sample(session, NULL, &id) == FURIOUS_ERROR && id == 7);
  EXPECT(strstr(furious_last_error(), "nothing has been read") != NULL);
  EXPECT(furious_session_logits(session, NULL, 0, &size) == FURIOUS_ERROR);
  EXPECT(furious_session_save(session, "unused") == FURIOUS_ERROR);
  EXPECT(furious_session_load(session, "/no/such/file") == FURIOUS_ERROR);
  id = -1;
  EXPECT(furious_session_prefill(session, &id, 1) == FURIOUS_INVALID_ARGUMENT);
  EXPECT(furious_session_step(session, 1 << 30) == FURIOUS_INVALID_ARGUMENT);
  EXPECT(strstr(furious_last_error(), "1073741824") != NULL);
  EXPECT(furious_session_prefill(session, NULL, 1) == FURIOUS_INVALID_ARGUMENT);
  id = 1;
  EXPECT(furious_session_prefill(session, &id, 1) == FURIOUS_OK);
  EXPECT(furious_session_logits(session, logits, 1, &size) == FURIOUS_BUFFER_TOO_SMALL && size > 1);
  furious_sampling sampling;
  furious_sampling_init(&sampling);
  sampling.top_p = 2;
  EXPECT(furious_session_sample(session, &sampling, &id) == FURIOUS_ERROR);
  EXPECT(furious_session_tokens(session, &number) == FURIOUS_OK && number == 1); /* still usable */
  furious_session_free(session);
  furious_session_free(NULL);
  furious_model_free(NULL);
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  EXPECT(strchr(furious_version(), '.') != NULL);
  EXPECT(strcmp(furious_last_error(), "") == 0);
  furious_model* model = NULL;
  EXPECT(furious_model_load(argv[1], NULL, &model) == FURIOUS_OK);

  int32_t ids[kMost];
  char text[kMost];
  size_t count = 0, bytes = 0, vocabulary = 0;
  EXPECT(furious_model_encode(model, kText, strlen(kText), ids, kMost, &count) == FURIOUS_OK && count > 0);
  EXPECT(furious_model_decode(model, ids, count, text, kMost, &bytes) == FURIOUS_OK);
  EXPECT(bytes == strlen(kText) && memcmp(text, kText, bytes) == 0);

  furious_session *session = NULL, *forked = NULL, *loaded = NULL;
  EXPECT(furious_session_new(model, &session) == FURIOUS_OK);
  EXPECT(furious_session_prefill(session, ids, count) == FURIOUS_OK);
  EXPECT(furious_session_step(session, ids[0]) == FURIOUS_OK);
  int64_t tokens = 0, state_bytes = 0;
  EXPECT(furious_session_tokens(session, &tokens) == FURIOUS_OK && tokens == (int64_t)count + 1);
  EXPECT(furious_session_bytes(session, &state_bytes) == FURIOUS_OK && state_bytes > 0);
  float logits[kMost], again[kMost];
  EXPECT(furious_session_logits(session, logits, kMost, &vocabulary) == FURIOUS_OK && vocabulary > 1);
  for (size_t i = 0; i < vocabulary; ++i) EXPECT(isfinite(logits[i]));

  EXPECT(furious_session_fork(session, &forked) == FURIOUS_OK);
  EXPECT(furious_session_save(session, argv[2]) == FURIOUS_OK);
  EXPECT(furious_session_new(model, &loaded) == FURIOUS_OK);
  furious_model_free(model); /* the sessions keep what they need */
  EXPECT(furious_session_load(loaded, argv[2]) == FURIOUS_OK);
  furious_sampling sampling;
  furious_sampling_init(&sampling);
  sampling.seed = 5;
  for (int i = 0; i < 100; ++i) {
    int32_t first = -1, second = -2, third = -3;
    EXPECT(furious_session_sample(session, &sampling, &first) == FURIOUS_OK);
    EXPECT(furious_session_sample(forked, &sampling, &second) == FURIOUS_OK && first == second);
    EXPECT(furious_session_sample(loaded, &sampling, &third) == FURIOUS_OK && first == third);
  }
  EXPECT(furious_session_logits(session, logits, kMost, &vocabulary) == FURIOUS_OK);
  EXPECT(furious_session_logits(loaded, again, kMost, &vocabulary) == FURIOUS_OK);
  EXPECT(memcmp(logits, again, vocabulary * sizeof *logits) == 0);
  furious_session_free(session);
  furious_session_free(forked);
  furious_session_free(loaded);

  EXPECT(furious_model_load(argv[1], NULL, &model) == FURIOUS_OK);
  test_errors(model, argv[1]);
  furious_model_free(model);
  return 0;
}
