/* A language model in a C program: reads a prompt, writes fifty tokens.
 *
 *     cc main.c $(pkg-config --cflags --libs furious) -o generate && ./generate <checkpoint> "Once upon a time" */
#include <furious/furious.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(furious_status status) {
  if (status == FURIOUS_OK) return;
  fprintf(stderr, "generate: %s\n", furious_last_error());
  exit(1);
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: generate CHECKPOINT PROMPT\n");
    return 2;
  }
  furious_model* model = NULL;
  check(furious_model_load(argv[1], NULL, &model));

  int32_t start = -1, end = -1;
  check(furious_model_start_token(model, &start));
  check(furious_model_end_token(model, &end));
  size_t count = 0;
  check(furious_model_encode(model, argv[2], strlen(argv[2]), NULL, 0, &count)); /* asks for the size */
  int32_t* ids = malloc((count + 1) * sizeof *ids);
  if (ids == NULL) return 1;
  ids[0] = start;
  check(furious_model_encode(model, argv[2], strlen(argv[2]), ids + 1, count, &count));

  furious_session* session = NULL;
  check(furious_session_new(model, &session));
  check(start >= 0 ? furious_session_prefill(session, ids, count + 1)
                   : furious_session_prefill(session, ids + 1, count));
  free(ids);

  furious_sampling sampling;
  furious_sampling_init(&sampling);
  sampling.temperature = 0.7;
  int32_t written[50];
  size_t tokens = 0;
  while (tokens < sizeof written / sizeof *written) {
    check(furious_session_sample(session, &sampling, &written[tokens]));
    if (written[tokens] == end) break;
    tokens += 1;
  }

  size_t bytes = 0;
  check(furious_model_decode(model, written, tokens, NULL, 0, &bytes));
  char* text = malloc(bytes + 1);
  if (text == NULL) return 1;
  check(furious_model_decode(model, written, tokens, text, bytes, &bytes));
  printf("%.*s\n", (int)bytes, text);
  free(text);

  furious_session_free(session);
  furious_model_free(model);
  return 0;
}
