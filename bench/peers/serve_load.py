#!/usr/bin/env python3
"""Streams completions from a server with OpenAI's API on this machine, several clients at once.

Prints tokens per second, prompts included, and the time to the first token. A prompt is the same for the same --seed, so
that it can be sent once more after a restart of the server.
"""
import argparse
import http.client
import json
import random
import threading
import time


def stream(args, client, results):
    ids = random.Random(args.seed * 1000 + client)
    prompt = [1] + [ids.randrange(300, 30000) for _ in range(args.prompt - 1)]
    body = {"prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "stream": True,
            "logit_bias": {"2": -100}, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", args.port, timeout=600)
    start = time.time()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    first, usage = None, {}
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        if event.get("choices") and first is None:
            first = time.time() - start
    results[client] = (first, usage)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="ids of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = {}
    threads = [threading.Thread(target=stream, args=(args, i, results)) for i in range(args.clients)]
    start = time.time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.time() - start
    written = sum(usage["completion_tokens"] for _, usage in results.values())
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for _, usage in results.values())
    first = sorted(first for first, _ in results.values())[len(results) // 2]
    print(f"{args.clients} clients: {written / seconds:.1f} tokens/s, first token p50 {first:.3f} s, "
          f"{cached} tokens cached")


main()
