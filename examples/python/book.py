"""Reads a book once, keeps what the model remembers of it in a file, and asks from that file as often as you like.

    python book.py --model runs/stories --book book.txt --state book.state                  reads the book
    python book.py --model runs/stories --state book.state --ask "The captain said"         answers at once
"""

import argparse
import os
import sys
import time

import furious


def read_book(model, book, state):
    with open(book, encoding="utf-8", errors="replace") as file:
        ids = model.prompt(file.read())
    session = model.session()
    start = time.time()

    def progress(read, all):
        print(f"\r{read:,} of {all:,} tokens", end="", flush=True)

    session.prefill(ids, progress)
    session.save(state)
    seconds = time.time() - start
    print(f"\nread in {seconds:.1f} s; the state has {os.path.getsize(state):,} bytes, however long the book is")


def ask(model, state, question, tokens, seed):
    session = model.session()
    session.load(state)
    session.prefill(question)
    print(question, end="")
    for piece in session.stream(tokens, seed=seed):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint or a run")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--book")
    parser.add_argument("--state", default="book.state")
    parser.add_argument("--ask", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=123)
    options = parser.parse_args()
    model = furious.Model.load(options.model, tokenizer=options.tokenizer)
    if options.book:
        read_book(model, options.book, options.state)
    for question in options.ask:  # each from the same state: none knows of the others
        ask(model, options.state, question, options.tokens, options.seed)


if __name__ == "__main__":
    main()
